// A sum over ranks, and what row_norm.cuh makes of it, for few rows: the sum, rounded, is not
// stored but added to the residual, and that normed, by the block that met for the row. Where
// ranks do not come in time, residual and out are NaN.
#ifndef BATON_OPS_RANK_NORM_CUH_
#define BATON_OPS_RANK_NORM_CUH_

#include "baton_ops/grid_order.cuh"
#include "baton_ops/rank_sum.cuh"
#include "baton_ops/rank_team.cuh"
#include "baton_ops/row_norm.cuh"
#include "baton_ops/values.cuh"

namespace baton_ops::cuda {

template <class E>
struct RankNormParams {
  RankExchange exchange;  // parts are contiguous rows
  NormParams<E> norm;     // its x is what is summed
};

template <class E>
__device__ __forceinline__ Packed<E, kChunk> ChunkOfNan() {
  Packed<E, kChunk> nan;
#pragma unroll
  for (int i = 0; i < kChunk; ++i) nan.at[i] = Rounded<E>(__uint_as_float(0x7fc00000u));
  return nan;
}

// The sum of a chunk of every rank's part.
template <class E, int kRanks>
__device__ __forceinline__ Packed<E, kChunk> SummedChunk(const RankExchange& exchange,
                                                         int64_t first) {
  using Sum = RankSum<E, E, kRanks>;
  constexpr int kVectors = kChunk / Sum::kCount;
  OfRanks<typename Sum::Vector, kRanks> parts[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) parts[v].Read(exchange, first / Sum::kCount + v);
  Packed<E, kChunk> out;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const auto sum = Sum::Sum(parts[v]);
#pragma unroll
    for (int i = 0; i < Sum::kCount; ++i) out.at[v * Sum::kCount + i] = sum.at[i];
  }
  return out;
}

// A thread has a chunk of its block's row. What this rank's earlier kernels wrote is read before
// the ranks meet, what no kernel writes before that. Grid: (rows).
template <class E, int kRanks>
__global__ void __launch_bounds__(kMostNormThreads, 1)
    RankNormKernel(const __grid_constant__ RankNormParams<E> p) {
  __shared__ float warps[kWarp];
  const int64_t columns = p.norm.columns, first = threadIdx.x * int64_t{kChunk};
  const bool is_there = first < columns;
  Packed<E, kChunk> weight{};
  if (is_there) weight = LoadChunk<E, true>(p.norm.weight, first, columns);
  LetNextGridStart();
  WaitForEarlierGrids();
  const NormRow<E, true> row(p.norm, blockIdx.x);
  Packed<E, kChunk> sum{};
  if (is_there) sum = LoadChunk<E, true>(row.residual, first, columns);
  RankTeam<kRanks> team(p.exchange);
  const bool are_here = team.Meet();
  if (is_there) {
    const int64_t at = blockIdx.x * columns + first;
    row.AddTo(sum, are_here ? SummedChunk<E, kRanks>(p.exchange, at) : ChunkOfNan<E>());
    StoreChunk<E, true>(row.residual, first, columns, sum);
  }
  const float scale = row.Scale(row.Squares(sum, 0.0f), warps);
  if (is_there) row.Write(first, sum, weight, scale);
  team.Leave();
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_RANK_NORM_CUH_
