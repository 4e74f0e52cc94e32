// Residual add and RMS norm: a block takes a row, and a thread every blockDim-th chunk of it, so
// that the order of the sum follows from the number of columns alone.
#ifndef BATON_OPS_ROW_NORM_CUH_
#define BATON_OPS_ROW_NORM_CUH_

#include "baton_ops/grid_order.cuh"
#include "baton_ops/values.cuh"

namespace baton_ops::cuda {

constexpr int kMostNormThreads = 1024;

template <class E>
struct NormParams {
  const E* x;  // or null
  E* residual;
  const E* weight;
  E* out;
  int64_t x_stride;
  int64_t residual_stride;
  int64_t out_stride;
  int64_t columns;
  float eps;
};

template <class E, bool kWide>
struct NormRow {
  const NormParams<E>& p;
  const E* x;
  E* residual;
  E* out;

  __device__ __forceinline__ NormRow(const NormParams<E>& params, int64_t row)
      : p(params),
        x(p.x ? p.x + row * p.x_stride : nullptr),
        residual(p.residual + row * p.residual_stride),
        out(p.out + row * p.out_stride) {}

  static __device__ __forceinline__ void AddTo(Packed<E, kChunk>& sum,
                                               const Packed<E, kChunk>& add) {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      sum.at[i] = Rounded<E>(__fadd_rn(ToFloat(sum.at[i]), ToFloat(add.at[i])));
    }
  }

  // The residual with x added. Both are under way together.
  __device__ __forceinline__ Packed<E, kChunk> Sum(int64_t first) const {
    if constexpr (kWide) {
      ChunkWords<E> before, add;
      before.Load(residual, first);
      add.Load(x ? x : residual, first);
      const Packed<E, kChunk> alone = before.Elements();
      Packed<E, kChunk> sum = alone;
      AddTo(sum, add.Elements());
      // Chosen, not branched around: else the compiler puts the second load behind the branch.
#pragma unroll
      for (int i = 0; i < kChunk; ++i) sum.at[i] = x ? sum.at[i] : alone.at[i];
      return sum;
    } else {
      Packed<E, kChunk> sum = LoadChunk<E, kWide>(residual, first, p.columns);
      if (x) AddTo(sum, LoadChunk<E, kWide>(x, first, p.columns));
      return sum;
    }
  }

  // The same, which is written back.
  __device__ __forceinline__ Packed<E, kChunk> Add(int64_t first) const {
    const Packed<E, kChunk> sum = Sum(first);
    if (x) StoreChunk<E, kWide>(residual, first, p.columns, sum);
    return sum;
  }

  static __device__ __forceinline__ float Squares(const Packed<E, kChunk>& chunk, float sum) {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      sum = __fmaf_rn(ToFloat(chunk.at[i]), ToFloat(chunk.at[i]), sum);
    }
    return sum;
  }

  __device__ __forceinline__ float Scale(float sum, float* shared) const {
    const float mean = __fdiv_rn(SumOfBlock(sum, shared), static_cast<float>(p.columns));
    return __frsqrt_rn(__fadd_rn(mean, p.eps));
  }

  static __device__ __forceinline__ Packed<E, kChunk> Normed(Packed<E, kChunk> chunk,
                                                             const Packed<E, kChunk>& weight,
                                                             float scale) {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      const float normed = __fmul_rn(ToFloat(chunk.at[i]), scale);
      chunk.at[i] = Rounded<E>(__fmul_rn(normed, ToFloat(weight.at[i])));
    }
    return chunk;
  }

  __device__ __forceinline__ void Write(int64_t first, const Packed<E, kChunk>& chunk,
                                        const Packed<E, kChunk>& weight, float scale) const {
    StoreChunk<E, kWide>(out, first, p.columns, Normed(chunk, weight, scale));
  }
};

// Rows of up to kHeld chunks a thread, which it keeps in registers. The weight, which no kernel
// writes, is read before the kernel before this one is complete, and the next kernel may begin then
// too: a product fetches its weights meanwhile, for as long as the addition is still being made.
template <class E, bool kWide, int kHeld>
__global__ void __launch_bounds__(kMostNormThreads) AddNormKernel(NormParams<E> p) {
  __shared__ float warps[kWarp];
  Packed<E, kChunk> chunk[kHeld], weight[kHeld];
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    const int64_t first = (threadIdx.x + static_cast<int64_t>(k) * blockDim.x) * kChunk;
    if (first < p.columns) weight[k] = LoadChunk<E, kWide>(p.weight, first, p.columns);
  }
  LetNextGridStart();
  WaitForEarlierGrids();
  const NormRow<E, kWide> row(p, blockIdx.x);
  float sum = 0.0f;
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    const int64_t first = (threadIdx.x + static_cast<int64_t>(k) * blockDim.x) * kChunk;
    if (first >= p.columns) break;
    chunk[k] = row.Add(first);
    sum = row.Squares(chunk[k], sum);
  }
  const float scale = row.Scale(sum, warps);
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    const int64_t first = (threadIdx.x + static_cast<int64_t>(k) * blockDim.x) * kChunk;
    if (first >= p.columns) break;
    row.Write(first, chunk[k], weight[k], scale);
  }
}

// Rows of any length: each thread reads again what it wrote.
template <class E, bool kWide>
__global__ void __launch_bounds__(kMostNormThreads) AddNormLongKernel(NormParams<E> p) {
  __shared__ float warps[kWarp];
  LetNextGridStart();
  WaitForEarlierGrids();
  const NormRow<E, kWide> row(p, blockIdx.x);
  const int64_t start = threadIdx.x * static_cast<int64_t>(kChunk);
  const int64_t step = blockDim.x * static_cast<int64_t>(kChunk);
  float sum = 0.0f;
  for (int64_t first = start; first < p.columns; first += step) {
    sum = row.Squares(row.Add(first), sum);
  }
  const float scale = row.Scale(sum, warps);
  for (int64_t first = start; first < p.columns; first += step) {
    row.Write(first, LoadChunk<E, kWide>(row.residual, first, p.columns),
              LoadChunk<E, kWide>(p.weight, first, p.columns), scale);
  }
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_ROW_NORM_CUH_
