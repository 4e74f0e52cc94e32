// The streaming pass over one part of a row, by one warp in registers: group maxima, sum of
// exponentials, rank count.
#ifndef BATON_OPS_PART_SCAN_CUH_
#define BATON_OPS_PART_SCAN_CUH_

#include "baton_ops/element.cuh"
#include "baton_ops/logprob_params.cuh"

namespace baton_ops::cuda {

constexpr unsigned kAllLanes = 0xffffffffu;

__device__ __forceinline__ float Exp2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

__device__ __forceinline__ uint32_t& Word(uint4& vector, int index) {
  return reinterpret_cast<uint32_t*>(&vector)[index];
}

// The 16 bytes that start `bytes` (0 < bytes < 16, even) into the 32 bytes of a and b.
__device__ __forceinline__ uint4 Shifted(const uint4& a, const uint4& b, int bytes) {
  uint32_t w[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
  for (int i = 0; i < 6; ++i) w[i] = (bytes & 8) ? w[i + 2] : w[i];
#pragma unroll
  for (int i = 0; i < 5; ++i) w[i] = (bytes & 4) ? w[i + 1] : w[i];
  const int bits = (bytes & 3) * 8;
  return make_uint4(__funnelshift_r(w[0], w[1], bits), __funnelshift_r(w[1], w[2], bits),
                    __funnelshift_r(w[2], w[3], bits), __funnelshift_r(w[3], w[4], bits));
}

// How the row's first byte lies to the 16-byte blocks of memory.
__device__ __forceinline__ int Misalignment(const char* row) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(row) % kVectorBytes);
}

// What base-2 exponents are logits times: an inverse temperature times log2 e.
__device__ __forceinline__ float ScaleOf(float inv_temp) {
  return EffectiveInvTemp(inv_temp) * 1.44269504088896340736f;
}

// A row's vector of elements from `first` on, element by element; -inf past the row's end.
template <class E>
__device__ __forceinline__ uint4 LoadElements(const char* row, uint32_t first, uint32_t vocab) {
  using Raw = typename E::Raw;
  const Raw* elements = reinterpret_cast<const Raw*>(row);
  uint4 vector = make_uint4(E::kNegInfWord, E::kNegInfWord, E::kNegInfWord, E::kNegInfWord);
#pragma unroll
  for (int i = 0; i < E::kPerVector; ++i) {
    if (first + i >= vocab) break;
    uint32_t& word = Word(vector, i / E::kPerWord);
    const uint32_t raw = __ldcg(elements + first + i);
    if (E::kPerWord == 1) {
      word = raw;
    } else {
      word = i % 2 == 0 ? (word & 0xffff0000u) | raw : (word & 0xffffu) | (raw << 16);
    }
  }
  return vector;
}

// The same for a row that need not be aligned. Memory is read in whole 16-byte blocks where those
// lie before the row's end; the block of the row's first byte may begin before it.
template <class E>
__device__ __forceinline__ uint4 LoadRagged(const char* row, uint32_t first, uint32_t vocab) {
  const int misaligned = Misalignment(row);
  const char* block = row - misaligned + static_cast<uint64_t>(first) * E::kBytes;
  const char* end = row + static_cast<uint64_t>(vocab) * E::kBytes;
  const char* last = block + (misaligned ? 2 : 1) * kVectorBytes;
  if (last > end) return LoadElements<E>(row, first, vocab);
  const uint4 low = *reinterpret_cast<const uint4*>(block);
  if (!misaligned) return low;
  return Shifted(low, *reinterpret_cast<const uint4*>(block + kVectorBytes), misaligned);
}

template <class E>
__device__ __forceinline__ uint32_t VectorMax(const uint4& v) {
  return E::Max(E::Max(v.x, v.y), E::Max(v.z, v.w));
}

template <class E>
constexpr uint32_t kPartLogits = kPartBytes / E::kBytes;

// The place of a lane's first element of a strip of a part.
template <class E>
__device__ __forceinline__ uint32_t FirstOfStrip(uint32_t part, int strip, int lane) {
  return part * kPartLogits<E> + (strip * 32 + lane) * E::kPerVector;
}

// Adds 2^(x * scale - base) of a vector's elements x to four sums, so that additions do not wait
// for each other.
template <class E>
__device__ __forceinline__ void AddExp2(uint4& vector, float scale, float base, float (&sum)[4]) {
#pragma unroll
  for (int i = 0; i < kVectorWords; ++i) {
    const uint32_t word = Word(vector, i);
    sum[i] += Exp2(fmaf(E::template Get<0>(word), scale, -base));
    if (E::kPerWord == 2) {
      sum[i] += Exp2(fmaf(E::template Get<E::kPerWord - 1>(word), scale, -base));
    }
  }
}

__device__ __forceinline__ float WarpSum(const float (&sum)[4]) {
  float total = (sum[0] + sum[1]) + (sum[2] + sum[3]);
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    total += __shfl_xor_sync(kAllLanes, total, offset);
  }
  return total;
}

// Adds how many of a vector's elements reach the threshold.
template <class E>
__device__ __forceinline__ void CountVector(uint4& vector, const Threshold& threshold,
                                            typename E::Counter& count) {
  const bool nan_only = threshold.flags & kCountNanOnly;
#pragma unroll
  for (int i = 0; i < kVectorWords; ++i) {
    const uint32_t word = Word(vector, i);
    count = nan_only ? E::CountNan(count, word) : E::CountReaching(count, word, threshold.word);
  }
}

// From the sampled logit's raw bits, which matter for a token of the vocabulary only.
template <class E>
__device__ __forceinline__ Threshold ThresholdOf(int32_t token, typename E::Raw raw, int32_t vocab,
                                                 RankMode mode) {
  constexpr int kNever = 0x7fffffff;
  if (token < 0 || token >= vocab) return {NAN, 0, kNever, kBadToken | kCountNone};
  const bool above = mode == RankMode::kAbovePlusOne;
  const uint32_t word = E::Splat(above ? E::NextUp(raw) : raw);
  Threshold threshold{E::FromRaw(raw), word, SignedOrder(word), 0};
  if (threshold.order == 0) threshold.order = SignedOrder(E::kNegZeroWord);
  if (!above && threshold.sampled == -INFINITY) threshold.flags = kCountsPadding;
  if (isnan(threshold.sampled) || (above && threshold.sampled == INFINITY)) {
    threshold.order = SignedOrder(E::kInfWord) + 1;
    threshold.flags = kCountNanOnly;
    if (above && isnan(threshold.sampled)) threshold.flags |= kCountNone;
  }
  return threshold;
}

template <class E>
constexpr int kPartGroups = kPartBytes / (kGroupLogits * E::kBytes);

// What a part's sum is relative to, from the order of its maximum: a whole number, so that partial
// sums combine exactly; -inf when there is nothing to sum.
template <class E>
__device__ __forceinline__ float BaseOf(int highest, float scale) {
  return rintf(E::ValueOfOrder(highest) * scale);
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_PART_SCAN_CUH_
