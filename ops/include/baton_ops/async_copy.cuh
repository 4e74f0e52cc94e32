// Copies from global into shared memory that a lane starts and awaits for itself alone.
#ifndef BATON_OPS_ASYNC_COPY_CUH_
#define BATON_OPS_ASYNC_COPY_CUH_

#include <cstdint>

namespace baton_ops::cuda {

__device__ __forceinline__ uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Starts copying 16 bytes to an address in shared memory; both ends are 16-byte aligned.
__device__ __forceinline__ void CopyAsync(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// Ends a group of copies, which may be empty.
__device__ __forceinline__ void EndCopies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Returns when no more than the kLeft groups that were ended last are under way. The lane then sees
// what its own earlier copies brought.
template <int kLeft>
__device__ __forceinline__ void AwaitCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_ASYNC_COPY_CUH_
