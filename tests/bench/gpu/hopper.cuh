// What kernels for Hopper GPUs share here: barriers, descriptors of wgmma, a transposition of a
// quad.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

__device__ __forceinline__ uint32_t address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void expect_bytes(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(barrier)),
               "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void wait(uint64_t* barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}\n" ::"r"(address(barrier)),
      "r"(parity)
      : "memory");
}

__device__ __forceinline__ void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(barrier)) : "memory");
}

__device__ __forceinline__ void init_barrier(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(barrier)), "r"(arrivals));
}

// Lets the copy engine and other programs see barriers that this thread made.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async;" ::: "memory");
}

// Loads a box of a matrix of 64 columns into shared memory.
__device__ __forceinline__ void load_box(void* to, const CUtensorMap* map, int column, int row,
                                         uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3}], [%4];" ::"r"(address(to)),
      "l"(map), "r"(column), "r"(row), "r"(address(barrier))
      : "memory");
}

// Describes rows of 128 bytes, swizzled by 128 bytes, groups of 8 rows 1,024 bytes apart. Where the
// operand is transposed, `next_bytes` lie between blocks of 64 columns.
__device__ __forceinline__ uint64_t descriptor(const void* p, int next_bytes = 16) {
  return static_cast<uint64_t>((address(p) & 0x3FFFF) >> 4) |
         static_cast<uint64_t>(next_bytes >> 4) << 16 | uint64_t{1024 >> 4} << 32 |
         uint64_t{1} << 62;
}

// Keeps the compiler from moving reads or writes of these over a wgmma that is under way.
template <int n>
__device__ __forceinline__ void hold(float (&values)[n]) {
#pragma unroll
  for (float& value : values) asm volatile("" : "+f"(value)::"memory");
}

template <int n>
__device__ __forceinline__ void hold(uint32_t (&values)[n]) {
#pragma unroll
  for (uint32_t& value : values) asm volatile("" : "+r"(value)::"memory");
}

__device__ __forceinline__ void fence_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most n groups of products are under way.
template <int n>
__device__ __forceinline__ void await_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(n) : "memory");
}

// Gives lane q of four what all of them had as words[q], so that it can store 16 bytes at once.
__device__ __forceinline__ void transpose_quad(uint32_t (&words)[4], int q) {
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

// A matrix of bf16, row-major, 16-byte aligned, of which boxes of 64 columns are loaded.
inline bool describe(CUtensorMap* map, const void* matrix, uint64_t rows, uint64_t columns,
                     uint32_t box_rows) {
  const cuuint64_t sizes[2] = {columns, rows};
  const cuuint64_t strides[1] = {columns * 2};
  const cuuint32_t box[2] = {64, box_rows}, ones[2] = {1, 1};
  return cuTensorMapEncodeTiled(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(matrix),
                                sizes, strides, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}
