// Sums and collections over the ranks of a tensor-parallel group. Every rank has written its part
// to its own exchange buffer, see rank_team.cuh for how they meet.
//
//   out[i] = round(((part of rank 0)[i] + (part of rank 1)[i]) + ...), in fp32
//
// Whoever sums an element takes the ranks in this order and starts from rank 0's value, so that all
// ranks have the same bits, whatever else is summed with it and in whichever way:
//
//   one shot  each rank reads all parts: (R - 1) S bytes come over the links, after one meeting
//   two shots each rank sums its share in place, they meet again and read each other's shares:
//             2 (R - 1) / R S bytes, after two
//
// In the second way a rank's share of its own part is read by that rank alone before it is
// overwritten, by the thread that overwrites it. Where ranks do not come in time, `out` is NaN.
#ifndef BATON_OPS_RANK_SUM_CUH_
#define BATON_OPS_RANK_SUM_CUH_

#include "baton_ops/grid_order.cuh"
#include "baton_ops/rank_team.cuh"
#include "baton_ops/values.cuh"

namespace baton_ops::cuda {

constexpr int kRankThreads = 256;      // while all blocks' threads suffice for a vector each
constexpr int kMostRankThreads = 512;  // else: a link needs 800 KB in flight

// In: of the parts, 16 bytes at once. Out: of the sum.
template <class In, class Out>
struct RankSumParams {
  RankExchange exchange;
  Out* out;
  int64_t vectors;
};

struct RankGatherParams {
  RankExchange exchange;
  uint4* out;  // [ranks, vectors]
  int64_t vectors;
};

struct RankErrorsParams {
  RankExchange exchange;
  int32_t* out;  // [ranks]
};

// The next kernel may begin before these have waited: what it fetches of constant memory, as a
// product does its weights, comes while ranks meet.

// Weak accesses: meetings order them. The compiler may not take them for reads of constant memory,
// which the meetings' clobbers see to.
template <class Vector>
__device__ __forceinline__ Vector ReadPart(const Vector* at) {
  return *at;
}
template <class Vector>
__device__ __forceinline__ void WritePart(Vector* at, const Vector& value) {
  *at = value;
}

// The vectors that this thread takes of a range: every rank's thread of this number takes the same.
struct VectorsOfThread {
  int64_t first, step;

  __device__ __forceinline__ VectorsOfThread()
      : first(blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x),
        step(gridDim.x * static_cast<int64_t>(blockDim.x)) {}
};

// One vector of every rank.
template <class Vector, int kRanks>
struct OfRanks {
  Vector rank[kRanks];

  __device__ __forceinline__ void Read(const RankExchange& from, int64_t vector) {
#pragma unroll
    for (int r = 0; r < kRanks; ++r) {
      rank[r] = ReadPart(reinterpret_cast<const Vector*>(from.buffers[r] + from.part) + vector);
    }
  }
};

template <class In, class Out, int kRanks>
struct RankSum {
  static constexpr int kCount = kPerVector<In>;
  using Vector = Packed<In, kCount>;
  using OutVector = Packed<Out, kCount>;
  // So many vectors a thread are on their way at once, as registers allow.
  static constexpr int kAtOnce = kRanks < 8 ? 8 / kRanks : 1;

  const RankSumParams<In, Out>& p;
  const VectorsOfThread mine;

  __device__ __forceinline__ Vector* Part(int rank) const {
    return reinterpret_cast<Vector*>(p.exchange.buffers[rank] + p.exchange.part);
  }

  static __device__ __forceinline__ OutVector Sum(const OfRanks<Vector, kRanks>& parts) {
    OutVector out;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      float sum = ToFloat(parts.rank[0].at[i]);
#pragma unroll
      for (int r = 1; r < kRanks; ++r) sum = __fadd_rn(sum, ToFloat(parts.rank[r].at[i]));
      out.at[i] = Rounded<Out>(sum);
    }
    return out;
  }

  __device__ __forceinline__ void Store(int64_t vector, const OutVector& value) const {
    reinterpret_cast<OutVector*>(p.out)[vector] = value;
  }

  // Sums vectors first .. end - 1. kKeeps: also to where they are read from on this rank.
  template <bool kKeeps>
  __device__ __forceinline__ void SumRange(int64_t first, int64_t end) const {
    for (int64_t at = first + mine.first; at < end; at += kAtOnce * mine.step) {
      OfRanks<Vector, kRanks> parts[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        if (at + k * mine.step < end) parts[k].Read(p.exchange, at + k * mine.step);
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        if (at + k * mine.step >= end) break;
        const OutVector sum = Sum(parts[k]);
        Store(at + k * mine.step, sum);
        if constexpr (kKeeps) Keep(at + k * mine.step, sum);
      }
    }
  }

  // A rounded value has the same bits in a wider type and back.
  __device__ __forceinline__ void Keep(int64_t vector, const OutVector& sum) const {
    Vector kept;
#pragma unroll
    for (int i = 0; i < kCount; ++i) kept.at[i] = Rounded<In>(ToFloat(sum.at[i]));
    WritePart(Part(p.exchange.rank) + vector, kept);
  }

  __device__ __forceinline__ void Collect(int64_t vector, const Vector& kept) const {
    OutVector sum;
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum.at[i] = Rounded<Out>(ToFloat(kept.at[i]));
    Store(vector, sum);
  }

  __device__ __forceinline__ void SpoilRange(int64_t first, int64_t end) const {
    OutVector nan;
#pragma unroll
    for (int i = 0; i < kCount; ++i) nan.at[i] = Rounded<Out>(__uint_as_float(0x7fc00000u));
    for (int64_t at = first + mine.first; at < end; at += mine.step) Store(at, nan);
  }
};

template <class In, class Out, int kRanks>
__global__ void __launch_bounds__(kMostRankThreads, 1)
    RankSumOnceKernel(const __grid_constant__ RankSumParams<In, Out> p) {
  LetNextGridStart();
  WaitForEarlierGrids();
  RankTeam<kRanks> team(p.exchange);
  const RankSum<In, Out, kRanks> sum{p, {}};
  if (team.Meet()) {
    sum.template SumRange<false>(0, p.vectors);
  } else {
    sum.SpoilRange(0, p.vectors);
  }
  team.Leave();
}

// Rank r's share is the r-th of kRanks ranges. A block collects of every rank what that rank's
// block of its team summed.
template <class In, class Out, int kRanks>
__global__ void __launch_bounds__(kMostRankThreads, 1)
    RankSumTwiceKernel(const __grid_constant__ RankSumParams<In, Out> p) {
  LetNextGridStart();
  WaitForEarlierGrids();
  RankTeam<kRanks> team(p.exchange);
  const RankSum<In, Out, kRanks> sum{p, {}};
  const int64_t share = (p.vectors + kRanks - 1) / kRanks, own = share * p.exchange.rank;
  if (team.Meet()) sum.template SumRange<true>(own, min(own + share, p.vectors));
  __syncthreads();
  if (team.Meet()) {
    for (int64_t at = sum.mine.first; at < share; at += sum.mine.step) {
      typename RankSum<In, Out, kRanks>::Vector kept[kRanks];
#pragma unroll
      for (int r = 0; r < kRanks; ++r) {
        const int64_t vector = r * share + at;
        if (r != p.exchange.rank && vector < p.vectors) kept[r] = ReadPart(sum.Part(r) + vector);
      }
#pragma unroll
      for (int r = 0; r < kRanks; ++r) {
        const int64_t vector = r * share + at;
        if (r != p.exchange.rank && vector < p.vectors) sum.Collect(vector, kept[r]);
      }
    }
  } else {
    for (int r = 0; r < kRanks; ++r) sum.SpoilRange(r * share, min((r + 1) * share, p.vectors));
  }
  team.Leave();
}

// out[r] = the part of rank r, byte for byte; all bits set where ranks do not come in time.
template <int kRanks>
__global__ void __launch_bounds__(kMostRankThreads, 1)
    RankGatherKernel(const __grid_constant__ RankGatherParams p) {
  LetNextGridStart();
  WaitForEarlierGrids();
  RankTeam<kRanks> team(p.exchange);
  const bool are_here = team.Meet();
  const VectorsOfThread mine;
  for (int64_t at = mine.first; at < p.vectors; at += mine.step) {
    OfRanks<uint4, kRanks> parts;
    if (are_here) parts.Read(p.exchange, at);
#pragma unroll
    for (int r = 0; r < kRanks; ++r) {
      p.out[r * p.vectors + at] = are_here ? parts.rank[r] : uint4{~0u, ~0u, ~0u, ~0u};
    }
  }
  team.Leave();
}

// out[r] = the error in the head of rank r, once all calls of this rank before it are complete.
// Meets nobody.
template <int kRanks>
__global__ void __launch_bounds__(kRankThreads, 1)
    RankErrorsKernel(const __grid_constant__ RankErrorsParams p) {
  WaitForEarlierGrids();
  const int rank = threadIdx.x;
  if (rank >= kRanks) return;
  p.out[rank] = LoadAcquire(&reinterpret_cast<ExchangeHead*>(p.exchange.buffers[rank])->error);
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_RANK_SUM_CUH_
