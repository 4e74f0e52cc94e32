// Selecting the spans of groups that contain a row's top k.
#ifndef BATON_OPS_ROW_SPANS_CUH_
#define BATON_OPS_ROW_SPANS_CUH_

#include "baton_ops/row_parts.cuh"

namespace baton_ops::cuda {

// The maxima of a thread's spans, and the records they are read from, a group of each at a time.
struct HeldOrders {
  uint4 record[kHeldSpans];
  int order[kHeldSpans];
};

template <class E>
__device__ __forceinline__ int OrderIn(const uint4& record, int group) {
  if constexpr (kPartGroups<E> == 2) return E::OrderOfKept(group % 2 ? record.y : record.x);
  const uint32_t word = group & 2 ? record.y : record.x;
  return E::OrderOfKept(group & 1 ? word >> 16 : word);
}

// The n-th group of a thread's i-th span.
__device__ __forceinline__ int GroupOf(const LogprobParams& p, int thread, int i, int n) {
  return (thread + i * kSelectThreads) * p.span + n;
}

// The record of a group, null for one past the row.
template <class E>
__device__ __forceinline__ const PartRecord* RecordOf(const LogprobParams& p, int32_t t,
                                                      int group) {
  return group < p.groups ? RecordAt(p, t, group / kPartGroups<E>) : nullptr;
}

// Starts to load the records of the n-th groups.
template <class E>
__device__ __forceinline__ void LoadOrders(const LogprobParams& p, int32_t t, int n, int thread,
                                           HeldOrders& held) {
#pragma unroll
  for (int i = 0; i < kHeldSpans; ++i) {
    const PartRecord* at = RecordOf<E>(p, t, GroupOf(p, thread, i, n));
    if (at) held.record[i] = LoadNow(at);
  }
}

// Awaits the records, of which the first groups' are on their way.
template <class E>
__device__ __forceinline__ void AwaitOrders(const LogprobParams& p, int32_t t, int thread,
                                            HeldOrders& held) {
#pragma unroll
  for (int i = 0; i < kHeldSpans; ++i) held.order[i] = kNoOrder;
#pragma unroll 1
  for (int n = 0; n < p.span; ++n) {
    if (n > 0) LoadOrders<E>(p, t, n, thread, held);
    AwaitRecords(held.record, [&](int i) { return RecordOf<E>(p, t, GroupOf(p, thread, i, n)); });
#pragma unroll
    for (int i = 0; i < kHeldSpans; ++i) {
      const int group = GroupOf(p, thread, i, n);
      if (group >= p.groups) continue;
      held.order[i] =
          max(held.order[i], MergeZeros<E>(OrderIn<E>(held.record[i], group % kPartGroups<E>)));
    }
  }
}

// How many of `n` orders reach one.
template <int n>
__device__ __forceinline__ int CountReaching(const int* orders, int order) {
  const int4* compared = reinterpret_cast<const int4*>(orders);
  int reached_by[2] = {0, 0};
#pragma unroll 4
  for (int i = 0; i < n / 4; ++i) {
    const int4 others = compared[i];
    reached_by[0] += (others.x >= order) + (others.y >= order);
    reached_by[1] += (others.z >= order) + (others.w >= order);
  }
  return reached_by[0] + reached_by[1];
}

// Raises the scratch's floor to an order that k spans reach, and few more: the k-th of the bests of
// disjoint sets of spans, since most of the best spans lie in sets of their own. Needs more spans
// than k.
__device__ __forceinline__ void RaiseFloor(const FinishedRow& row, const HeldOrders& held,
                                           int spans, int thread) {
  int best = held.order[0];
#pragma unroll
  for (int i = 1; i < kHeldSpans; ++i) best = max(best, held.order[i]);
  int* bests = row.scratch.best;
  int reached_by;
  // For a small k half as many sets will do, each of two threads, which share the comparisons.
  if (row.scratch.k <= 24 && spans >= kSelectThreads) {
    constexpr int kHalf = kSelectThreads / 4;
    best = max(best, __shfl_xor_sync(kAllLanes, best, 1));
    if (thread % 2 == 0) bests[thread / 2] = best;
    SyncSelecting();
    reached_by = CountReaching<kHalf>(bests + thread % 2 * kHalf, best);
    reached_by += __shfl_xor_sync(kAllLanes, reached_by, 1);
  } else {
    bests[thread] = best;
    SyncSelecting();
    reached_by = CountReaching<kSelectThreads>(bests, best);
  }
  const int floor = __reduce_max_sync(kAllLanes, reached_by >= row.scratch.k ? best : kNoOrder);
  if (thread % 32 == 0) atomicMax(&row.scratch.floor, floor);
  SyncSelecting();
}

// Selects the spans that reach the scratch's floor, and counts them even where they are too many.
__device__ __forceinline__ void TakeReaching(const FinishedRow& row, const HeldOrders& held,
                                             int thread) {
  const int floor = row.scratch.floor;
  uint32_t taken = 0;
#pragma unroll
  for (int i = 0; i < kHeldSpans; ++i) taken |= (held.order[i] >= floor ? 1u : 0u) << i;
  if (taken != 0) {
    uint32_t at = atomicAdd(&row.scratch.n_spans, __popc(taken));
#pragma unroll
    for (int i = 0; i < kHeldSpans; ++i) {
      if ((taken >> i & 1) == 0) continue;
      if (at < kMaxSelected) row.scratch.span[at] = thread + i * kSelectThreads;
      ++at;
    }
  }
  SyncSelecting();
}

// An order, and how many of a set of orders reach it.
struct Floor {
  int order;
  int reached_by;
};

// Bisects for an order that k of the counted reach, and no more than `most` if ties allow. `low`
// must be reached by at least k, `high` by at least one. Where ties do not allow, the result is the
// largest order that k reach.
template <class Count>
__device__ __forceinline__ Floor FindFloor(int low, int high, int k, int most, const Count& count) {
  Floor floor{low, count(low)};
#pragma unroll 1
  while (floor.reached_by > most && floor.order < high) {
    const uint32_t distance = static_cast<uint32_t>(high) - static_cast<uint32_t>(floor.order);
    const int middle = static_cast<int>(floor.order + (distance + 1) / 2);
    const int reached_by = count(middle);
    if (reached_by >= k) {
      floor = {middle, reached_by};
    } else {
      high = middle - 1;
    }
  }
  return floor;
}

// Selects exactly where a floor from RaiseFloor selects too many spans, so with many ties or a
// large k: all spans above the k-th, and the first of its equals. One warp, over scratch.order.
__device__ __forceinline__ void SelectExactly(const FinishedRow& row, int lane) {
  FinishScratch& scratch = row.scratch;
  int highest = kNoOrder;
  for (int i = lane; i < kMaxSpans; i += 32) highest = max(highest, scratch.order[i]);
  const auto count = [&](int order) {
    int reached_by = 0;
#pragma unroll 4
    for (int i = lane; i < kMaxSpans; i += 32) reached_by += scratch.order[i] >= order;
    return __reduce_add_sync(kAllLanes, reached_by);
  };
  const Floor floor = FindFloor(scratch.floor, __reduce_max_sync(kAllLanes, highest), row.scratch.k,
                                kMaxSelected, count);
  const bool all = floor.reached_by <= kMaxSelected;
  const uint32_t before = (1u << lane) - 1;
  int least = 0x7fffffff, n = 0;
#pragma unroll 1
  for (int i = lane; i < kMaxSpans; i += 32) {
    const int order = scratch.order[i];
    const bool take = all ? order >= floor.order : order > floor.order;
    if (order >= floor.order) least = min(least, order);
    const uint32_t taken = __ballot_sync(kAllLanes, take);
    if (take) scratch.span[n + __popc(taken & before)] = i;
    n += __popc(taken);
  }
#pragma unroll 1
  for (int i = lane; i < kMaxSpans && !all; i += 32) {
    const bool take = scratch.order[i] == floor.order;
    const uint32_t taken = __ballot_sync(kAllLanes, take);
    const int at = n + __popc(taken & before);
    if (take && at < row.scratch.k) scratch.span[at] = i;
    n = min(n + __popc(taken), row.scratch.k);
  }
  least = __reduce_min_sync(kAllLanes, least);
  if (lane != 0) return;
  scratch.n_spans = n;
  scratch.floor = least;
}

// Selects spans that contain the row's top k, and an order that the top k reach.
template <class E>
__device__ __forceinline__ void SelectSpans(const FinishedRow& row, const HeldOrders& held,
                                            int thread) {
  const LogprobParams& p = row.params;
  FinishScratch& scratch = row.scratch;
  const int spans = (p.groups + p.span - 1) / p.span;
  // What thread 0 prepared is there.
  SyncSelecting();
  if (spans > row.scratch.k) RaiseFloor(row, held, spans, thread);
  TakeReaching(row, held, thread);
  if (__builtin_expect(scratch.n_spans > kMaxSelected, 0)) {
#pragma unroll
    for (int i = 0; i < kHeldSpans; ++i) {
      scratch.order[thread + i * kSelectThreads] = held.order[i];
    }
    SyncSelecting();
    if (thread < 32) SelectExactly(row, thread);
    SyncSelecting();
  }
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_ROW_SPANS_CUH_
