// One or two rows quantised by a block for itself, with the bits of quantise.cuh. Every block that
// multiplies a row makes all of it, while the weight's first bytes are on their way: of 12,288
// columns that takes as long as those, so it has few instructions.
#ifndef BATON_OPS_ROW_QUANTISE_CUH_
#define BATON_OPS_ROW_QUANTISE_CUH_

#include "baton_ops/mma.cuh"
#include "baton_ops/quantise.cuh"
#include "baton_ops/values.cuh"

namespace baton_ops::cuda {

constexpr int kRowQuad = 4;  // columns of a range that a lane quantises

// What __fdiv_rn(value, scale) is where `reciprocal` is __fdiv_rn(1, scale), but for a zero's sign:
// an estimate that is corrected twice, as a division does it, by what it leaves.
__device__ __forceinline__ float Quotient(float value, float scale, float reciprocal) {
  float quotient = __fmul_rn(value, reciprocal);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    quotient = __fmaf_rn(__fmaf_rn(-quotient, scale, value), reciprocal, quotient);
  }
  return quotient;
}

// A power of two that makes of a scale one with a normal reciprocal, and of a value what leaves no
// less than fp32 can tell: but of values so small that their quotient is none.
__device__ __forceinline__ float FactorFor(float scale) {
  const float up = scale < 0x1p-90f ? 0x1p100f : 1.0f;
  return scale > 0x1p90f ? 0x1p-100f : up;
}

// A lane's numbers of a group, of which it returns the scale. Where that is infinite or NaN the
// numbers do not count.
template <class E>
__device__ __forceinline__ float QuantiseQuad(const Packed<E, kRowQuad>& quad, uint32_t& numbers) {
  float values[kRowQuad];
  uint32_t largest = 0;  // as numbers without a sign are ordered, NaN last
#pragma unroll
  for (int j = 0; j < kRowQuad; ++j) {
    values[j] = ToFloat(quad.at[j]);
    largest = max(largest, __float_as_uint(values[j]) & 0x7fffffffu);
  }
  largest = __reduce_max_sync(kEveryLane, largest);
  const float scale = __fdiv_rn(__uint_as_float(largest), kLargestE4m3), factor = FactorFor(scale);
  const float divisor = __fmul_rn(scale, factor), reciprocal = __fdiv_rn(1.0f, divisor);
#pragma unroll
  for (int j = 0; j < kRowQuad; ++j) {
    values[j] = Quotient(__fmul_rn(values[j], factor), divisor, reciprocal);
  }
  numbers = E4m3PairOf(values[0], values[1]) | E4m3PairOf(values[2], values[3]) << 16;
  if (!(scale > 0.0f)) numbers = 0;
  return scale;
}

// Rows and their scales, by a block of kWarps: `count` ranges, of which those from `ranges` on are
// of the row `next`. `place(range, column)`: where four columns' numbers go. Loads come before what
// is made of them.
template <int kWarps, int kMostRanges, class E, class Place>
__device__ __forceinline__ void QuantiseRows(const E* x, const E* next, int ranges, int count,
                                             float* scales, const Place& place) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  Packed<E, kRowQuad> quads[kMostRanges] = {};
#pragma unroll
  for (int i = 0; i < kMostRanges; ++i) {
    const int range = warp + i * kWarps;
    if (range < count) {
      const E* row = range < ranges ? x : next - ranges * kScaledRange;
      const E* from = row + range * kScaledRange + lane * kRowQuad;
      quads[i] = *reinterpret_cast<const Packed<E, kRowQuad>*>(from);
    }
  }
#pragma unroll
  for (int i = 0; i < kMostRanges; ++i) {
    const int range = warp + i * kWarps;
    if (range >= count) break;
    uint32_t numbers;
    const float scale = QuantiseQuad(quads[i], numbers);
    *reinterpret_cast<uint32_t*>(place(range, lane * kRowQuad)) = numbers;
    if (lane == 0) scales[range] = scale;
  }
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_ROW_QUANTISE_CUH_
