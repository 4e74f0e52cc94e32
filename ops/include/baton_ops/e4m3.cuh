// FP8 numbers: e4m3 without infinities (arXiv 2209.05433), a sign, 4 bits of exponent, 3 of
// mantissa. 0x7f and 0xff are NaN, 0x7e is 448, the smallest is 2^-9. In plain operations, so that
// every architecture has the same bits.
#ifndef BATON_OPS_E4M3_CUH_
#define BATON_OPS_E4M3_CUH_

#include <cuda_runtime.h>

#include <cstdint>

namespace baton_ops::cuda {

constexpr float kLargestE4m3 = 448.0f;
constexpr int kScaledRange = 128;  // of numbers with scales: what is summed before it is scaled

struct E4m3 {
  uint8_t bits;
};

// Exact. The bits are those of a float whose exponent is 120 too small, also below 2^-6, where
// neither has a leading one.
__device__ __forceinline__ float ToFloat(E4m3 value) {
  const uint32_t size = value.bits & 0x7fu;
  if (size == 0x7fu) return __uint_as_float(0x7fffffffu);
  const float scaled = __fmul_rn(__uint_as_float(size << 20), 0x1p120f);
  return value.bits & 0x80u ? -scaled : scaled;
}

// The nearest, even on ties; beyond 448 is 448, NaN stays NaN.
__device__ __forceinline__ E4m3 ToE4m3(float value) {
  const uint32_t sign = __float_as_uint(value) >> 24 & 0x80u;
  if (value != value) return {static_cast<uint8_t>(sign | 0x7fu)};
  const float size = fminf(fabsf(value), kLargestE4m3);
  uint32_t bits;
  if (size < 0x1p-6f) {  // multiples of 2^-9, which the last bits of this sum count
    bits = __float_as_uint(__fadd_rn(__fmul_rn(size, 0x1p9f), 0x1p23f)) & 0xfu;
  } else {
    bits = __float_as_uint(size);
    bits = ((bits + 0x7ffffu + (bits >> 20 & 1u)) >> 20) - (120u << 3);
  }
  return {static_cast<uint8_t>(sign | bits)};
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_E4M3_CUH_
