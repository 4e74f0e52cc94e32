// Stands for baton_ops/mma.cuh: a product adds its depth in order, lane by lane.
#ifndef BATON_OPS_MMA_CUH_
#define BATON_OPS_MMA_CUH_

#include "baton_ops/e4m3.cuh"

namespace baton_ops::cuda {

constexpr int kScaledRange = 128, kScaledHalf = 64;

// Every e4m3 number is a half that has a leading one, or 0: a half's exponent is 112 smaller than a
// float's, and 10 bits of its mantissa are kept.
inline uint32_t HalfOf(uint32_t e4m3) {
  const uint32_t sign = (e4m3 & 0x80u) << 8, size = e4m3 & 0x7fu;
  if (size == 0x7fu) return 0x7fffu;
  const uint32_t bits = __float_as_uint(ToFloat(E4m3{static_cast<uint8_t>(size)}));
  return bits == 0 ? sign : sign | ((bits >> 13) - (112u << 10));
}

inline uint32_t HalvesOf(uint32_t pair) {
  return HalfOf(pair & 0xffu) | HalfOf(pair >> 8 & 0xffu) << 16;
}

inline uint32_t E4m3PairOf(float low, float high) {
  return ToE4m3(low).bits | uint32_t{ToE4m3(high).bits} << 8;
}

inline void HalvesOfFour(uint32_t four, uint32_t (&halves)[2]) {
  halves[0] = HalvesOf(four);
  halves[1] = HalvesOf(four >> 16);
}

inline float NumberOf(uint32_t pair, int nth) {
  const uint32_t half = pair >> 16 * nth, size = half & 0x7fffu;
  if (size >= 0x7c00u) return NAN;
  const float number = size == 0 ? 0.0f : __uint_as_float((size << 13) + (112u << 23));
  return half & 0x8000u ? -number : number;
}

inline void AddProduct(float (&sum)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  const int lane = static_cast<int>(host_cuda::Lane()), quad = lane / 4 * 4;
  for (int each = 0; each < 4; ++each) {  // lanes that have parts of the depth
    uint32_t mine[4], theirs[2][2];
    for (int i = 0; i < 4; ++i) mine[i] = __shfl_sync(0xffffffffu, a[i], quad + each);
    for (int column = 0; column < 2; ++column) {
      for (int i = 0; i < 2; ++i) {
        theirs[column][i] = __shfl_sync(0xffffffffu, b[i], (lane % 4 * 2 + column) * 4 + each);
      }
    }
    for (int i = 0; i < 4; ++i) {
      const int row = i / 2, column = i % 2;
      for (int k = 0; k < 4; ++k) {
        sum[i] += NumberOf(mine[row + k / 2 * 2], k % 2) * NumberOf(theirs[column][k / 2], k % 2);
      }
    }
  }
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_MMA_CUH_
