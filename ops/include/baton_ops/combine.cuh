// The sum of what a token's experts made of it, in the order of the token's own list, so that it
// does not depend on who shares them.
#ifndef BATON_OPS_COMBINE_CUH_
#define BATON_OPS_COMBINE_CUH_

#include "baton_ops/grid_order.cuh"
#include "baton_ops/values.cuh"

namespace baton_ops::cuda {

constexpr int kCombineThreads = 256, kMostCombined = 32;
// Of a token, so many rows are asked for at once. With many tokens others' loads fill the time.
constexpr int kCombineFewTokens = 8, kCombineOfFew = 8, kCombineOfMany = 4;

template <class E>
struct CombineParams {
  const E* made;  // by place
  const int32_t* place;
  const float* weight;
  const E* beside;  // by token, or null
  E* out;
  int64_t made_stride, beside_stride, out_stride;
  int64_t columns;
  int chosen;
};

// out[t] = the sum of weight * made of a token's pairs from the first on, then of beside; products
// and sums are rounded to fp32 one by one. The next kernel may begin before anything is added: a
// norm, and behind it a product, which fetches its weights as soon as the experts leave room. Where
// pairs stand was told some launches before: it is read while the experts' products are still made.
// Grid: (tokens, parts of a row).
template <class E, bool kWide, int kAtOnce>
__global__ void __launch_bounds__(kCombineThreads) CombineKernel(CombineParams<E> p) {
  __shared__ int32_t places[kMostCombined];
  __shared__ float weights[kMostCombined];
  LetNextGridStart();
  const int64_t token = blockIdx.x;
  if (static_cast<int>(threadIdx.x) < p.chosen) {
    places[threadIdx.x] = __ldcg(p.place + token * p.chosen + threadIdx.x);
    weights[threadIdx.x] = __ldcg(p.weight + token * p.chosen + threadIdx.x);
  }
  WaitForEarlierGrids();
  __syncthreads();
  const int64_t first = (blockIdx.y * static_cast<int64_t>(kCombineThreads) + threadIdx.x) * kChunk;
  if (first >= p.columns) return;
  float sum[kChunk] = {};
  // What takes time is waiting for memory, so loads of some pairs are under way together.
  for (int from = 0; from < p.chosen; from += kAtOnce) {
    Packed<E, kChunk> made[kAtOnce];
    float weight[kAtOnce];
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const int pair = min(from + n, p.chosen - 1);
      made[n] = LoadChunk<E, kWide>(p.made + places[pair] * p.made_stride, first, p.columns);
      weight[n] = weights[pair];
    }
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      if (from + n >= p.chosen) break;
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        sum[i] = __fadd_rn(sum[i], __fmul_rn(weight[n], ToFloat(made[n].at[i])));
      }
    }
  }
  if (p.beside != nullptr) {
    const E* row = p.beside + token * p.beside_stride;
    const auto beside = LoadChunk<E, kWide>(row, first, p.columns);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) sum[i] = __fadd_rn(sum[i], ToFloat(beside.at[i]));
  }
  Packed<E, kChunk> out;
#pragma unroll
  for (int i = 0; i < kChunk; ++i) out.at[i] = Rounded<E>(sum[i]);
  StoreChunk<E, kWide>(p.out + token * p.out_stride, first, p.columns, out);
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_COMBINE_CUH_
