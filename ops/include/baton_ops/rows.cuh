// Row-wise work without a sum: copying chosen rows, the gated activation, finding broken rows.
#ifndef BATON_OPS_ROWS_CUH_
#define BATON_OPS_ROWS_CUH_

#include "baton_ops/gate.cuh"
#include "baton_ops/grid_order.cuh"
#include "baton_ops/values.cuh"

namespace baton_ops::cuda {

constexpr int kRowThreads = 256;

// Word: what is copied at once; strides and columns are counted in it.
template <class Word>
struct CopyParams {
  const Word* table;
  Word* out;
  const int32_t* index;
  int64_t table_stride;
  int64_t out_stride;
  int64_t table_rows;
  int64_t columns;
};

// Grid: (rows, parts of a row).
template <class Word>
__global__ void __launch_bounds__(kRowThreads) CopyRowsKernel(CopyParams<Word> p) {
  WaitForEarlierGrids();
  LetNextGridStart();
  const int64_t from = p.index[blockIdx.x];
  const bool is_there = from >= 0 && from < p.table_rows;
  const Word* source = p.table + from * p.table_stride;
  Word* out = p.out + blockIdx.x * p.out_stride;
  const int64_t step = static_cast<int64_t>(gridDim.y) * blockDim.x;
  for (int64_t i = blockIdx.y * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < p.columns;
       i += step) {
    out[i] = is_there ? source[i] : Word{};
  }
}

template <class E>
struct GateParams {
  const E* gate_up;
  E* out;
  int64_t in_stride;
  int64_t out_stride;
  int64_t columns;
};

// kCount elements a thread. Grid: (rows, parts of a row).
template <class E, int kCount>
__global__ void __launch_bounds__(kRowThreads) SiluMulKernel(GateParams<E> p) {
  using Vector = Packed<E, kCount>;
  WaitForEarlierGrids();
  LetNextGridStart();
  const int64_t first = (blockIdx.y * static_cast<int64_t>(blockDim.x) + threadIdx.x) * kCount;
  if (first >= p.columns) return;
  const E* gate = p.gate_up + blockIdx.x * p.in_stride + first;
  const Vector gates = *reinterpret_cast<const Vector*>(gate);
  const Vector ups = *reinterpret_cast<const Vector*>(gate + p.columns);
  Vector out;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    out.at[i] = Rounded<E>(SiluMulOf(ToFloat(gates.at[i]), ToFloat(ups.at[i])));
  }
  *reinterpret_cast<Vector*>(p.out + blockIdx.x * p.out_stride + first) = out;
}

// kCount elements at once. A block takes a row.
template <class E, int kCount>
__global__ void __launch_bounds__(kRowThreads)
    BrokenRowsKernel(const E* x, int64_t stride, int64_t columns, uint8_t* out) {
  using Vector = Packed<E, kCount>;
  WaitForEarlierGrids();
  LetNextGridStart();
  const E* row = x + blockIdx.x * stride;
  bool broken = false;
  for (int64_t first = static_cast<int64_t>(threadIdx.x) * kCount; first < columns;
       first += static_cast<int64_t>(blockDim.x) * kCount) {
    const Vector values = *reinterpret_cast<const Vector*>(row + first);
#pragma unroll
    for (int i = 0; i < kCount; ++i) broken |= !isfinite(ToFloat(values.at[i]));
  }
  broken = __syncthreads_or(broken);
  if (broken && threadIdx.x == 0) out[blockIdx.x] |= 1;
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_ROWS_CUH_
