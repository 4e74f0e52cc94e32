// A sum over ranks, and what row_norm.cuh makes of it, for few rows: the sum, rounded, is not
// stored but added to the residual, and that normed, by the block that met for the row. Small parts
// are pushed (rank_push.cuh). Where ranks do not come in time, residual and out are NaN.
#ifndef BATON_OPS_RANK_NORM_CUH_
#define BATON_OPS_RANK_NORM_CUH_

#include <cstring>

#include "baton_ops/grid_order.cuh"
#include "baton_ops/rank_push.cuh"
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

// The sum of a chunk of every rank's part, read from where they lie.
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

// The same of what the others push: of elements `first` on of the part, the thread's chunk of its
// row. A rank's is added as it comes, in their order.
template <class E, int kRanks>
struct PushedChunk {
  static constexpr int kCount = kPerVector<E>, kVectors = kChunk / kCount;
  using Vector = Packed<E, kCount>;
  Packed<E, kChunk> sum;

  // Returns a rank that did not come, or -1.
  __device__ __forceinline__ int Meet(const RankExchange& exchange, int64_t first,
                                      uint32_t number) {
    RankPush<kRanks> push(exchange, number);
    const char* part = exchange.buffers[exchange.rank] + exchange.part;
    const Vector* vectors = reinterpret_cast<const Vector*>(part) + first / kCount;
    Vector own[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      own[v] = ReadPart(vectors + v);
      uint4 bits;
      memcpy(&bits, &own[v], sizeof bits);
      push.Push(static_cast<int>(threadIdx.x) * kVectors + v, bits);
    }
    int missing = -1;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float total[kCount];
#pragma unroll
      for (int r = 0; r < kRanks; ++r) {
        Vector theirs = own[v];
        if (r != exchange.rank) {
          uint4 bits;
          if (!push.Await(r, static_cast<int>(threadIdx.x) * kVectors + v, bits)) missing = r;
          memcpy(&theirs, &bits, sizeof bits);
        }
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          const float value = ToFloat(theirs.at[i]);
          total[i] = r == 0 ? value : __fadd_rn(total[i], value);
        }
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) sum.at[v * kCount + i] = Rounded<E>(total[i]);
    }
    return missing;
  }
};

// A thread has a chunk of its block's row. What this rank's earlier kernels wrote is read before
// the ranks meet, what no kernel writes before that. Grid: (rows).
template <class E, int kRanks, bool kPushes>
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
  const int64_t at = blockIdx.x * columns + first;
  Packed<E, kChunk> made = ChunkOfNan<E>();
  if constexpr (kPushes) {
    PushedChunk<E, kRanks> pushed;
    const auto meet = [&](uint32_t number) {
      return is_there ? pushed.Meet(p.exchange, at, number) : -1;
    };
    if (team.MeetBy(meet)) made = pushed.sum;
  } else {
    if (team.Meet() && is_there) made = SummedChunk<E, kRanks>(p.exchange, at);
  }
  if (is_there) {
    row.AddTo(sum, made);
    StoreChunk<E, true>(row.residual, first, columns, sum);
  }
  const float scale = row.Scale(row.Squares(sum, 0.0f), warps);
  if (is_there) row.Write(first, sum, weight, scale);
  team.Leave();
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_RANK_NORM_CUH_
