// What the parts of a row amount to: the normaliser, the rank and the sampled token's columns.
#ifndef BATON_OPS_ROW_PARTS_CUH_
#define BATON_OPS_ROW_PARTS_CUH_

#include "baton_ops/row_elements.cuh"

namespace baton_ops::cuda {

constexpr int kNoOrder = static_cast<int>(0x80000000u);  // below every order

// A load that is issued where it stands, before it is known whether it is needed.
__device__ __forceinline__ uint4 LoadNow(const PartRecord* at) {
  uint4 v;
  asm volatile("ld.global.cg.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(at));
  return v;
}

__device__ __forceinline__ int32_t LoadNow(const int32_t* at) {
  int32_t value;
  asm volatile("ld.global.cg.b32 %0, [%1];" : "=r"(value) : "l"(at));
  return value;
}

__device__ __forceinline__ uint32_t LoadNow(const uint32_t* at) {
  return LoadNow(reinterpret_cast<const int32_t*>(at));
}

__device__ __forceinline__ uint16_t LoadNow(const uint16_t* at) {
  uint16_t value;
  asm volatile("ld.global.cg.b16 %0, [%1];" : "=h"(value) : "l"(at));
  return value;
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
  return {BaseOf<E>(highest, scale), __uint_as_float(record.z), static_cast<int32_t>(record.w)};
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

// The records that one lane holds: every 32nd.
constexpr int kHeldRecords = 4;

struct HeldRecords {
  uint4 record[kHeldRecords];
  int32_t token;
  int32_t output;  // place in logprob and rank
  int32_t first;   // place in topk_*
  float scale;
};

__device__ __forceinline__ HeldRecords LoadRecords(const LogprobParams& p, int32_t t, int lane) {
  const PartRecord* records = p.records + static_cast<int64_t>(t) * p.parts;
  HeldRecords held;
  held.token = LoadNow(p.token + t);
  held.output = LoadNow(p.row_offset + t);
  held.first = LoadNow(p.topk_offset + t);
  held.scale = ScaleOf(p, t);
#pragma unroll
  for (int i = 0; i < kHeldRecords; ++i) {
    const int at = lane + i * 32;
    if (at < p.parts) held.record[i] = LoadNow(records + at);
  }
  return held;
}

// Combines the row's parts in an order that depends on the row alone, and writes the sampled
// token's columns. One warp.
template <class E>
__device__ __forceinline__ void CombineParts(const FinishedRow& row, const HeldRecords& held,
                                             int lane) {
  using Raw = typename E::Raw;
  const LogprobParams& p = row.params;
  const float scale = held.scale;
  const int32_t token = held.token, output = held.output;
  const bool valid = token >= 0 && token < p.vocab;
  const Raw raw = valid ? reinterpret_cast<const Raw*>(row.logits)[token] : Raw{0};
  const PartRecord* records = p.records + static_cast<int64_t>(row.t) * p.parts;
  Partial part[kHeldRecords];
  float base = -INFINITY;
#pragma unroll
  for (int i = 0; i < kHeldRecords; ++i) {
    part[i] =
        lane + i * 32 < p.parts ? PartialOf<E>(held.record[i], scale) : Partial{-INFINITY, 0.0f, 0};
    base = fmaxf(base, part[i].base);
  }
#pragma unroll 1
  for (int at = lane + kHeldRecords * 32; at < p.parts; at += 32) {
    base = fmaxf(base, PartialOf<E>(LoadNow(records + at), scale).base);
  }
  base = WarpMaxOf(base);
  float sum = 0;
  int32_t count = 0;
#pragma unroll
  for (int i = 0; i < kHeldRecords; ++i) {
    sum += Rebased(part[i], base);
    count += part[i].count;
  }
#pragma unroll 1
  for (int at = lane + kHeldRecords * 32; at < p.parts; at += 32) {
    const Partial further = PartialOf<E>(LoadNow(records + at), scale);
    sum += Rebased(further, base);
    count += further.count;
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    sum += __shfl_xor_sync(kAllLanes, sum, offset);
  }
  count = __reduce_add_sync(kAllLanes, count);
  const Normaliser normaliser{scale, base, LogOfSum(sum)};
  if (lane != 0) return;
  row.scratch.normaliser = normaliser;
  row.scratch.first = held.first;
  const Threshold threshold = ThresholdOf<E>(token, raw, p.vocab, p.rank_mode);
  p.logprob[output] = normaliser.Logprob(threshold.sampled);
  p.rank[output] = RankOf(p, threshold.flags, count);
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_ROW_PARTS_CUH_
