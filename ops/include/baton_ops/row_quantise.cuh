// One or two rows quantised by a block for itself, with the bits of quantise.cuh. Every block that
// multiplies a row makes all of it, while the weight's first bytes are on their way: of 12,288
// columns that takes as long as those, so it has few instructions.
#ifndef BATON_OPS_ROW_QUANTISE_CUH_
#define BATON_OPS_ROW_QUANTISE_CUH_

#include "baton_ops/mma.cuh"
#include "baton_ops/quantise.cuh"
#include "baton_ops/values.cuh"

namespace baton_ops::cuda {

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
