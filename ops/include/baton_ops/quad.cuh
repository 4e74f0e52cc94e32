// What four lanes with neighbouring columns of a row exchange so that each can store 16 bytes.
#ifndef BATON_OPS_QUAD_CUH_
#define BATON_OPS_QUAD_CUH_

#include <cstdint>

namespace baton_ops::cuda {

// Gives lane q of four what all of them had as words[q], so that it can store 16 bytes at once.
__device__ __forceinline__ void TransposeQuad(uint32_t (&words)[4], int q) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool upper = q & bit;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int low = bit == 1 ? 2 * i : i, high = low + bit;
      const uint32_t got = __shfl_xor_sync(~0u, upper ? words[low] : words[high], bit);
      (upper ? words[low] : words[high]) = got;
    }
  }
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_QUAD_CUH_
