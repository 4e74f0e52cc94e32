// Stands for baton_ops/mma.cuh: a product adds its depth in order, lane by lane.
#ifndef BATON_OPS_MMA_CUH_
#define BATON_OPS_MMA_CUH_

#include "baton_ops/e4m3.cuh"

namespace baton_ops::cuda {

constexpr int kScaledHalf = kScaledRange / 2;

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

// Of halves of the depth, none too small for a leading one.
__attribute__((optimize("O3"))) inline void NumbersOf(const uint16_t (&halves)[16],
                                                      float (&numbers)[16]) {
  uint32_t bits[16];
  for (int i = 0; i < 16; ++i) {
    const uint32_t half = halves[i], size = half & 0x7fffu;
    const uint32_t number = (size << 13) + (112u << 23) | (half & 0x8000u) << 16;
    bits[i] = size >= 0x7c00u ? 0x7fc00000u : size == 0 ? half << 16 : number;
  }
  memcpy(numbers, bits, sizeof bits);
}

// Each element adds its 16 products to what there was: by lanes that have parts of the depth.
inline void AddProduct(float (&sum)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  uint64_t words[3][32];  // of all lanes
  const uint64_t mine[3] = {a[0] | uint64_t{a[2]} << 32, a[1] | uint64_t{a[3]} << 32,
                            b[0] | uint64_t{b[1]} << 32};
  for (int i = 0; i < 3; ++i) {
    memcpy(words[i], host_cuda::Exchange(0xffffffffu, mine[i], __LINE__), sizeof words[i]);
  }
  const unsigned lane = host_cuda::Lane(), columns_lane = lane % 4 * 8;
  const uint64_t* of[4] = {words[0] + lane / 4 * 4, words[1] + lane / 4 * 4,
                           words[2] + columns_lane, words[2] + columns_lane + 4};
  float numbers[4][16];  // of two rows and of two columns
  for (int i = 0; i < 4; ++i) {
    uint16_t halves[16];
    memcpy(halves, of[i], sizeof halves);
    NumbersOf(halves, numbers[i]);
  }
  for (int i = 0; i < 4; ++i) {
    float added = sum[i];
    for (int k = 0; k < 16; ++k) added += numbers[i / 2][k] * numbers[2 + i % 2][k];
    sum[i] = added;
  }
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_MMA_CUH_
