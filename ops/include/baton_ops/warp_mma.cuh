// A warp's tensor-core instructions from sm_80 on: fragments of 8 x 8 matrices of bf16 out of
// shared memory, the product of 16 x 16 and 16 x 8 that is added in fp32, and copies into shared
// memory that go on beside them.
#ifndef BATON_OPS_WARP_MMA_CUH_
#define BATON_OPS_WARP_MMA_CUH_

#include <cstdint>

namespace baton_ops::cuda {

// Four matrices, whose rows of 16 bytes lanes 0-7, 8-15, 16-23 and 24-31 name. A lane gets of each
// the elements 2c and 2c + 1 of row r, for r = lane / 4 and c = lane % 4.
__device__ __forceinline__ void LoadMatrices(const void* row, uint32_t (&to)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(row)))
               : "memory");
}

// The same of the matrices turned: elements r of rows 2c and 2c + 1.
__device__ __forceinline__ void LoadTurnedMatrices(const void* row, uint32_t (&to)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(row)))
               : "memory");
}

// Adds a [16, 16] times b [16, 8] to sum [16, 8]. Of a, matrices of rows 0-7, then 8-15, of columns
// 0-7, then those of 8-15; of b, turned, those of rows 0-7 and 8-15. A lane has elements 2c and
// 2c + 1 of the sum's rows r, then r + 8.
__device__ __forceinline__ void MultiplyAdd(const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                            float (&sum)[4]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Begins to copy 16 bytes into shared memory.
__device__ __forceinline__ void BeginCopy(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(to))),
               "l"(from)
               : "memory");
}

// Waits for all copies that the thread has begun; others see them once the block has met.
__device__ __forceinline__ void WaitForCopies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_WARP_MMA_CUH_
