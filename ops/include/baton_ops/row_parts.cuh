// What the parts of a row amount to: the normaliser, the rank and the sampled token's columns.
#ifndef BATON_OPS_ROW_PARTS_CUH_
#define BATON_OPS_ROW_PARTS_CUH_

#include "baton_ops/grid_order.cuh"
#include "baton_ops/row_elements.cuh"

namespace baton_ops::cuda {

constexpr int kNoOrder = static_cast<int>(0x80000000u);  // below every order

// A load that is issued where it stands, before it is known whether it is needed.
__device__ __forceinline__ int32_t LoadNow(const int32_t* at) {
  int32_t value;
  asm volatile("ld.global.cg.b32 %0, [%1];" : "=r"(value) : "l"(at));
  return value;
}

// The same of a record, which a warp of the scan may be writing: all of it is old, or all is new.
__device__ __forceinline__ uint4 LoadNow(const PartRecord* at) {
  uint64_t low, high;
  asm volatile("{ .reg .b128 all; ld.relaxed.gpu.global.b128 all, [%2]; mov.b128 {%0, %1}, all; }"
               : "=l"(low), "=l"(high)
               : "l"(at)
               : "memory");
  return make_uint4(static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32),
                    static_cast<uint32_t>(high), static_cast<uint32_t>(high >> 32));
}

// Some hundred microseconds. The finish starts when every block of the scan has, so that records
// are complete soon; waiting for the whole scan instead is for offsets that contradict k.
constexpr int kMostPolls = 1000;

// Loads records again until all are complete. `at(i)`: where record i is, null for none.
template <int n, class At>
__device__ __forceinline__ void AwaitRecords(uint4 (&record)[n], const At& at) {
#pragma unroll 1
  for (int polls = 0;; ++polls) {
    uint32_t differing = 0;
#pragma unroll
    for (int i = 0; i < n; ++i) differing |= at(i) ? record[i].w ^ kComplete : 0;
    if (differing <= kCountBits || polls > kMostPolls) break;
    if (polls == kMostPolls) WaitForEarlierGrids();
#pragma unroll
    for (int i = 0; i < n; ++i) {
      if (at(i) && (record[i].w ^ kComplete) > kCountBits) record[i] = LoadNow(at(i));
    }
  }
}

// What a part contributes to its row.
struct Partial {
  float base;
  float sum;
  int32_t count;
};

template <class E>
__device__ __forceinline__ Partial PartialOf(const uint4& record, float scale) {
  int highest;
  if constexpr (kPartGroups<E> == 2) {
    highest = max(E::OrderOfKept(record.x), E::OrderOfKept(record.y));
  } else {
    // The lower halves of orders decide nothing.
    highest = max(max(static_cast<int>(record.x), static_cast<int>(record.x << 16)),
                  max(static_cast<int>(record.y), static_cast<int>(record.y << 16)));
  }
  return {BaseOf<E>(highest, scale), __uint_as_float(record.z),
          static_cast<int32_t>(record.w ^ kComplete)};
}

// A part's sum relative to `base`. Both bases are whole, so only what underflows is lost.
__device__ __forceinline__ float Rebased(const Partial& part, float base) {
  const float shift = part.base - base;
  if (!(shift >= -120.0f)) return part.sum == part.sum ? 0.0f : part.sum;
  return part.sum * __int_as_float((127 + static_cast<int>(shift)) << 23);
}

// Natural logarithm of a sum >= 1/2, to about 1e-7: the whole part of log2 is exact.
__device__ __forceinline__ double LogOfSum(float sum) {
  if (!(sum < INFINITY)) return sum;
  const int bits = __float_as_int(sum);
  const float mantissa = __int_as_float((bits & 0x7fffff) | 0x3f800000);
  return ((bits >> 23) - 127) * 0.69314718055994530942 + logf(mantissa);
}

__device__ __forceinline__ int32_t RankOf(const LogprobParams& p, uint32_t flags, int32_t count) {
  if (flags & kBadToken) return 0;
  if (flags & kCountNone) return 1;
  if (flags & kCountsPadding) count -= p.padding;
  return p.rank_mode == RankMode::kAtLeast ? count : count + 1;
}

// A maximum over the warp that drops NaN, as fmaxf does.
__device__ __forceinline__ float WarpMaxOf(float value) {
  const int order = value == value ? SignedOrder(__float_as_uint(value)) : kNoOrder;
  return __uint_as_float(SignedOrder(__reduce_max_sync(kAllLanes, order)));
}

// The records that one lane holds at once: every 32nd.
constexpr int kHeldRecords = 4;

struct HeldRecords {
  uint4 record[kHeldRecords];
  int32_t token;
  int32_t output;  // place in logprob and rank
  int32_t first;   // place in topk_*
  float scale;
};

__device__ __forceinline__ const PartRecord* RecordAt(const LogprobParams& p, int32_t t, int part) {
  return part < p.parts ? p.records + static_cast<int64_t>(t) * p.parts + part : nullptr;
}

// Starts to load the records from `first` on.
__device__ __forceinline__ void LoadRecords(const LogprobParams& p, int32_t t, int first,
                                            HeldRecords& held) {
#pragma unroll
  for (int i = 0; i < kHeldRecords; ++i) {
    if (const PartRecord* at = RecordAt(p, t, first + i * 32)) held.record[i] = LoadNow(at);
  }
}

// Starts to load what combining a row takes.
__device__ __forceinline__ void LoadRow(const LogprobParams& p, int32_t t, int lane,
                                        HeldRecords& held) {
  held.token = LoadNow(p.token + t);
  held.output = LoadNow(p.row_offset + t);
  held.first = LoadNow(p.topk_offset + t);
  held.scale = ScaleOf(p.inv_temp ? __ldcg(p.inv_temp + t) : 1.0f);
  LoadRecords(p, t, lane, held);
}

// Adds the held records to a lane's sum of those before.
template <class E>
__device__ __forceinline__ void AddRecords(const LogprobParams& p, int first,
                                           const HeldRecords& held, Partial& total) {
  Partial part[kHeldRecords];
  float base = total.base;
#pragma unroll
  for (int i = 0; i < kHeldRecords; ++i) {
    part[i] = first + i * 32 < p.parts ? PartialOf<E>(held.record[i], held.scale)
                                       : Partial{-INFINITY, 0.0f, 0};
    base = fmaxf(base, part[i].base);
  }
  total = {base, Rebased(total, base), total.count};
#pragma unroll
  for (int i = 0; i < kHeldRecords; ++i) {
    total.sum += Rebased(part[i], base);
    total.count += part[i].count;
  }
}

// Combines the row's parts in an order that depends on the row alone, and writes the sampled
// token's columns. One warp.
template <class E>
__device__ __forceinline__ void CombineParts(const FinishedRow& row, HeldRecords& held, int lane) {
  using Raw = typename E::Raw;
  const LogprobParams& p = row.params;
  const int32_t token = held.token;
  const bool valid = token >= 0 && token < p.vocab;
  const Raw raw = valid ? __ldcg(reinterpret_cast<const Raw*>(row.logits) + token) : Raw{0};
  Partial total{-INFINITY, 0.0f, 0};
#pragma unroll 1
  for (int first = lane; first - lane < p.parts; first += kHeldRecords * 32) {
    if (first != lane) LoadRecords(p, row.t, first, held);
    AwaitRecords(held.record, [&](int i) { return RecordAt(p, row.t, first + i * 32); });
    AddRecords<E>(p, first, held, total);
  }
  const float base = WarpMaxOf(total.base);
  float sum = Rebased(total, base);
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    sum += __shfl_xor_sync(kAllLanes, sum, offset);
  }
  const int32_t count = __reduce_add_sync(kAllLanes, total.count);
  const Normaliser normaliser{held.scale, base, LogOfSum(sum)};
  if (lane != 0) return;
  row.scratch.normaliser = normaliser;
  row.scratch.first = held.first;
  const Threshold threshold = ThresholdOf<E>(token, raw, p.vocab, p.rank_mode);
  p.logprob[held.output] = normaliser.Logprob(threshold.sampled);
  p.rank[held.output] = RankOf(p, threshold.flags, count);
}

// Leaves no record of the row complete. One warp, after all readers.
__device__ __forceinline__ void ResetRecords(const FinishedRow& row, int lane) {
  const LogprobParams& p = row.params;
#pragma unroll 1
  for (int part = lane; part < p.parts; part += 32) {
    p.records[static_cast<int64_t>(row.t) * p.parts + part].count = 0;
  }
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_ROW_PARTS_CUH_
