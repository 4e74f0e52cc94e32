// bf16 as kernels use it: rounded from fp32, singly or two at a time, and back.
#ifndef BATON_TESTS_CUDA_ON_HOST_CUDA_BF16_H_
#define BATON_TESTS_CUDA_ON_HOST_CUDA_BF16_H_

#include "device_language.h"

struct __nv_bfloat16 {
  uint16_t bits;
};
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};

// To nearest, ties to even; every NaN becomes one.
inline __nv_bfloat16 host_cuda_bf16(float value) {
  const uint32_t bits = __float_as_uint(value);
  if (value != value) return {0x7fff};
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
inline __nv_bfloat16 __float2bfloat16_rn(float value) { return host_cuda_bf16(value); }
inline float __bfloat162float(__nv_bfloat16 value) {
  return __uint_as_float(static_cast<uint32_t>(value.bits) << 16);
}
inline __nv_bfloat162 __floats2bfloat162_rn(float low, float high) {
  return {host_cuda_bf16(low), host_cuda_bf16(high)};
}

#endif  // BATON_TESTS_CUDA_ON_HOST_CUDA_BF16_H_
