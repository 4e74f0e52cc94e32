// A single token between attention and its experts in one kernel: residual add, RMS norm, the
// router's products and the choice. The bits are those of row_norm.cuh, router.cuh and routes.cuh,
// one after the other.
//
// What takes time with one token are launches that wait for each other, so a cluster does it all:
// each block norms the row for itself and multiplies it by its own experts' rows of the router,
// which no kernel writes and most of which lie in its shared memory before the row is there. Then
// the first block chooses.
#ifndef BATON_OPS_NORM_ROUTE_CUH_
#define BATON_OPS_NORM_ROUTE_CUH_

#include "baton_ops/router.cuh"
#include "baton_ops/routes.cuh"
#include "baton_ops/row_group.cuh"
#include "baton_ops/row_norm.cuh"
#include "baton_ops/warp_mma.cuh"

namespace baton_ops::cuda {

constexpr unsigned kLeastRouteThreads = 256;
constexpr int kRouteBlocks = 16, kMostRouteExperts = 256;
// Of a block: three of them lie on a multiprocessor, for they are there before a product ends.
constexpr int kHeldRouterBytes = 60 * 1024;

template <class E>
struct NormRouteParams {
  NormParams<E> norm;
  ChooseParams choose;
  const float* router;
  int held;  // of a block's rows of the router, how many lie in shared memory
};

// Of a block: sums of its warps. Of the first: all products, and how it chooses.
struct NormRouteShared {
  float sums[kWarp], all[kMostRouteExperts];
  double powers[kMostRouteExperts], scores[kMostRouteExperts];
  uint64_t keys[kMostRouteExperts];
  int taken[kMostChosen];  // by pair: its expert, then its number
};

// The largest product, each warp for itself.
__device__ __forceinline__ float LargestOf(const float* products, int experts, int lane) {
  float most = -INFINITY;
#pragma unroll 1
  for (int i = lane; i < experts; i += kWarp) most = fmaxf(most, products[i]);
  return MaxOfWarp(most);
}

// The sum of all powers in the order of Scores::Read, each warp for itself.
__device__ __forceinline__ double SumOfPowers(const double* powers, int experts, int lane) {
  double sum = 0.0;
#pragma unroll 1
  for (int i = lane; i < experts; i += kWarp) sum += powers[i];
  return AddLanes(sum);
}

// Scores of all experts, by a block, as Scores::Read has them. Returns whether one wanted is NaN.
__device__ __forceinline__ bool ScoreAll(const ChooseParams& p, NormRouteShared& shared, int lane) {
  const double most = p.is_sigmoid ? 0.0 : LargestOf(shared.all, p.experts, lane);
#pragma unroll 1
  for (int i = threadIdx.x; i < p.experts; i += blockDim.x) {
    const double value = shared.all[i];
    shared.powers[i] = exp(p.is_sigmoid ? -value : value - most);
  }
  __syncthreads();
  const double sum = p.is_sigmoid ? 0.0 : SumOfPowers(shared.powers, p.experts, lane);
  bool has_nan = false;
#pragma unroll 1
  for (int i = threadIdx.x; i < p.experts; i += blockDim.x) {
    const double power = shared.powers[i];
    const double score = (p.is_sigmoid ? 1.0 : power) / (p.is_sigmoid ? 1.0 + power : sum);
    const double wanted = p.bias ? score + static_cast<double>(p.bias[i]) : score;
    has_nan |= isnan(wanted);
    shared.scores[i] = score;
    shared.keys[i] = KeyOf(isnan(wanted) ? -INFINITY : wanted);
  }
  return __syncthreads_or(has_nan) != 0;
}

// Who has the largest of a warp's keys, of equal ones the lowest: expert v * 32 + lane has key v of
// the lane, in halves, for which a warp has instructions.
template <int kEach>
__device__ __forceinline__ int LargestOfWarp(const uint32_t (&high)[kEach],
                                             const uint32_t (&low)[kEach], int lane) {
  uint32_t most_high = 0, most_low = 0, id = kMostRouteExperts;
#pragma unroll
  for (int v = 0; v < kEach; ++v) most_high = max(most_high, high[v]);
  most_high = __reduce_max_sync(kEveryLane, most_high);
#pragma unroll
  for (int v = 0; v < kEach; ++v) most_low = max(most_low, high[v] == most_high ? low[v] : 0);
  most_low = __reduce_max_sync(kEveryLane, most_low);
#pragma unroll
  for (int v = kEach - 1; v >= 0; --v) {
    if (high[v] == most_high && low[v] == most_low) id = v * kWarp + lane;
  }
  return static_cast<int>(__reduce_min_sync(kEveryLane, id));
}

// Chooses by a warp, as ChooseExperts does: a best one after the other, of equals the lower number.
// What was chosen has key 0, and what is not there: below all others.
template <int kEach>
__device__ __forceinline__ void TakeBest(const ChooseParams& p, NormRouteShared& shared, int lane) {
  uint32_t high[kEach], low[kEach];
#pragma unroll
  for (int v = 0; v < kEach; ++v) {
    const int i = v * kWarp + lane;
    const uint64_t key = i < p.experts ? shared.keys[i] : 0;
    high[v] = static_cast<uint32_t>(key >> 32);
    low[v] = static_cast<uint32_t>(key);
  }
#pragma unroll 1
  for (int n = 0; n < p.chosen; ++n) {
    const int id = LargestOfWarp<kEach>(high, low, lane);
#pragma unroll
    for (int v = 0; v < kEach; ++v) {
      if (v * kWarp + lane == id) high[v] = low[v] = 0;
    }
    if (lane == 0) shared.taken[n] = id << kPairBits | n;
  }
}

// What those that are chosen count, by a warp: of their sum in the order of the choice.
__device__ __forceinline__ void WeighOne(const ChooseParams& p, const NormRouteShared& shared,
                                         bool is_broken, int lane) {
  if (lane >= p.chosen) return;
  const int expert = shared.taken[lane] >> kPairBits;
  double own = shared.scores[expert], total = 0.0;
#pragma unroll 4
  for (int n = 0; n < p.chosen; ++n) total += shared.scores[shared.taken[n] >> kPairBits];
  if (p.normalises) own /= total < p.least_sum ? p.least_sum : total;
  p.expert[lane] = expert;
  p.weight[lane] = is_broken ? NAN : static_cast<float>(own * p.scaling);
}

// As OrderFew, of one token.
__device__ __forceinline__ void OrderOne(const ChooseParams& p, const int* taken) {
  const auto count_below = [&](int bound) {
    int count = 0;
#pragma unroll 8
    for (int i = 0; i < p.chosen; ++i) count += taken[i] < bound;
    return count;
  };
#pragma unroll 1
  for (int e = threadIdx.x; e <= p.experts; e += blockDim.x) {
    p.starts[e] = count_below(e << kPairBits);
  }
  const int pair = threadIdx.x;
  if (pair >= p.chosen) return;
  const int place = count_below(taken[pair]);
  p.place[pair] = place;
  p.row[place] = 0;
}

// What the first block makes of all products: the choice, and where its pairs stand.
__device__ __forceinline__ void ChooseOne(const ChooseParams& p, NormRouteShared& shared,
                                          int lane) {
  const int warp = threadIdx.x / kWarp;
  for (int i = threadIdx.x; i < p.experts; i += blockDim.x) p.products[i] = shared.all[i];
  const bool is_broken = ScoreAll(p, shared, lane);
  if (warp == 0) {
    if (p.experts <= 4 * kWarp) {
      TakeBest<4>(p, shared, lane);
    } else {
      TakeBest<kMostRouteExperts / kWarp>(p, shared, lane);
    }
  }
  __syncthreads();
  if (warp == 1) WeighOne(p, shared, is_broken, lane);
  OrderOne(p, shared.taken);
}

// A block's rows of the router: those that it holds, and where the others lie.
template <class E>
struct RouterRows {
  float* held;
  const float* rows;
  int own, kept;  // of a block, and of these in shared memory

  // Begins to copy what is held, and asks for the others to be brought near.
  __device__ __forceinline__ void Begin(int64_t columns, int lane, int warp, int warps) const {
    const int64_t copied = min(own, kept) * columns;
#pragma unroll 1
    for (int64_t at = threadIdx.x * 4; at < copied; at += blockDim.x * 4) {
      BeginCopy(held + at, rows + at);
    }
#pragma unroll 1
    for (int e = kept + warp; e < own; e += warps) PrefetchRow(rows + e * columns, columns, lane);
  }

  // The product of one and x, by a warp, in the order of RouterKernel.
  __device__ __forceinline__ float Product(int e, const E* x, int64_t columns, int lane) const {
    const float* row = e < kept ? held + e * columns : rows + e * columns;
    float sum = 0.0f;
#pragma unroll 4
    for (int64_t at = lane * kChunk; at < columns; at += kWarp * kChunk) {
      const auto chunk = LoadChunk<E, true>(x, at, columns);
      const auto weights = LoadChunk<float, true>(row, at, columns);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        sum = __fmaf_rn(ToFloat(chunk.at[i]), weights.at[i], sum);
      }
    }
    return SumOfWarp(sum);
  }
};

// A thread has a chunk of the row. Grid: one cluster.
template <class E>
__global__ void __launch_bounds__(kMostNormThreads) NormRouteKernel(NormRouteParams<E> p) {
  using Group = RowGroup<kRouteBlocks>;
  extern __shared__ __align__(16) float held[];  // rows of the router, then the row
  __shared__ NormRouteShared shared;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  const int experts = p.choose.experts, each = (experts + kRouteBlocks - 1) / kRouteBlocks;
  const int rank = static_cast<int>(Group::Rank()), first_expert = rank * each;
  const int64_t columns = p.norm.columns, first = threadIdx.x * int64_t{kChunk};
  const bool is_there = first < columns;
  const RouterRows<E> router{held, p.router + first_expert * columns,
                             max(0, min(each, experts - first_expert)), p.held};
  E* const normed = reinterpret_cast<E*>(held + p.held * columns);
  router.Begin(columns, lane, warp, warps);
  Packed<E, kChunk> weight{}, sum{};
  if (is_there) weight = LoadChunk<E, true>(p.norm.weight, first, columns);
  LetNextGridStart();
  Group::Sync();  // all are there
  WaitForEarlierGrids();
  const NormRow<E, true> row(p.norm, 0);
  if (is_there) sum = row.Sum(first);
  const float scale = row.Scale(row.Squares(sum, 0.0f), shared.sums);
  if (is_there) {
    const Packed<E, kChunk> mine = row.Normed(sum, weight, scale);
    StoreChunk<E, true>(normed, first, columns, mine);
  }
  WaitForCopies();
  __syncthreads();
#pragma unroll 1
  for (int e = warp; e < router.own; e += warps) {
    const float product = router.Product(e, normed, columns, lane);
    if (lane == 0) Group::Write(shared.all + first_expert + e, 0, product);
  }
  Group::Sync();  // all have read the residual, too
  // Not before: the cluster would wait for it.
  if (rank == 1 && is_there) {
    StoreChunk<E, true>(row.out, first, columns, LoadChunk<E, true>(normed, first, columns));
    if (row.x) StoreChunk<E, true>(row.residual, first, columns, sum);
  }
  if (rank == 0) ChooseOne(p.choose, shared, lane);
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_NORM_ROUTE_CUH_
