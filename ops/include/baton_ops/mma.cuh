// The tensor cores' product of a warp, and e4m3 numbers as it takes them. Halves hold every e4m3
// number, and fp32 the product of any two, exactly; what the hardware rounds are the sums.
#ifndef BATON_OPS_MMA_CUH_
#define BATON_OPS_MMA_CUH_

#include "baton_ops/e4m3.cuh"

namespace baton_ops::cuda {

constexpr int kScaledHalf = kScaledRange / 2;  // what a lane has 16 of

// Two numbers, the one in the lower byte first, as halves.
__device__ __forceinline__ uint32_t HalvesOf(uint32_t pair) {
  uint32_t halves;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
  const float low = ToFloat(E4m3{static_cast<uint8_t>(pair)});
  const float high = ToFloat(E4m3{static_cast<uint8_t>(pair >> 8)});
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(halves) : "f"(high), "f"(low));
#else
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(pair)));
#endif
  return halves;
}

// Two numbers to e4m3 as ToE4m3 does, the first in the lower byte; NaN of whatever sign.
__device__ __forceinline__ uint32_t E4m3PairOf(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
  return ToE4m3(low).bits | static_cast<uint32_t>(ToE4m3(high).bits) << 8;
#else
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
#endif
}

// Adds the product of 16 rows and 8 columns over a depth of 16. Lane l has of rows l / 4 (a[0],
// a[2]) and l / 4 + 8 (a[1], a[3]), and of column l / 4 (b), the same four of the depth; of the
// sums columns l % 4 * 2 and the next one, of the one row and of the other.
__device__ __forceinline__ void AddProduct(float (&sum)[4], const uint32_t (&a)[4],
                                           const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_MMA_CUH_
