// A block of global memory on its way into a warp's own shared memory.
//
// From sm_90 on one lane asks the copy engine for all of it; before, each lane copies what it will
// itself read. Either way nothing but the warp waits for it.
#ifndef BATON_OPS_ASYNC_COPY_CUH_
#define BATON_OPS_ASYNC_COPY_CUH_

#include <cstdint>

namespace baton_ops::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define BATON_HAS_COPY_ENGINE 0
#else
#define BATON_HAS_COPY_ENGINE 1
#endif

__device__ __forceinline__ uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Begins to copy 16 bytes into shared memory, or, if there are none, to zero them.
__device__ __forceinline__ void BeginCopyOrZeros(void* to, const void* from, bool is_there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(SharedAddress(to)), "l"(from),
               "r"(is_there ? 16 : 0)
               : "memory");
}

// The same of four bytes, that are there.
__device__ __forceinline__ void BeginCopyOfFour(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(SharedAddress(to)), "l"(from)
               : "memory");
}

// Arrives at a barrier, which counts on it, once all that the thread has begun is there.
__device__ __forceinline__ void ArriveBehindCopies(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(SharedAddress(barrier))
               : "memory");
}

// In shared memory, one for each warp. All lanes call each function.
class WarpCopy {
 public:
  __device__ __forceinline__ void Init([[maybe_unused]] int lane) {
#if BATON_HAS_COPY_ENGINE
    if (lane == 0) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(SharedAddress(&arrived_))
                   : "memory");
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
#endif
  }

  // Starts the copy; lane l may read its 16-byte vectors l, l + 32, ... once it was awaited. Both
  // ends are 16-byte aligned.
  template <int kBytes>
  __device__ __forceinline__ void Start(void* to, const char* from, int lane) {
#if BATON_HAS_COPY_ENGINE
    if (lane == 0) {
      const uint32_t arrived = SharedAddress(&arrived_);
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(arrived),
                   "n"(kBytes)
                   : "memory");
      asm volatile(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
          "[%3];" ::"r"(SharedAddress(to)),
          "l"(from), "n"(kBytes), "r"(arrived)
          : "memory");
    }
    // Else the warp stays split: the copying lane and the others each go through what follows.
    __syncwarp();
#else
    const uint32_t mine = SharedAddress(to) + lane * 16;
#pragma unroll
    for (int at = 0; at < kBytes; at += 512) {
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(mine + at),
                   "l"(from + lane * 16 + at)
                   : "memory");
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
  }

  // `parity`: of the number of copies that were awaited before.
  __device__ __forceinline__ void Await([[maybe_unused]] uint32_t parity) {
#if BATON_HAS_COPY_ENGINE
    asm volatile(
        "{ .reg .pred done; again_%=: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;"
        " @!done bra again_%=; }" ::"r"(SharedAddress(&arrived_)),
        "r"(parity)
        : "memory");
#else
    asm volatile("cp.async.wait_group 0;" ::: "memory");
#endif
  }

  // Between ordinary writes to where a copy will go and the start of that copy.
  static __device__ __forceinline__ void OrderWrites() {
#if BATON_HAS_COPY_ENGINE
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
    __syncwarp();
  }

 private:
  uint64_t arrived_;
};

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_ASYNC_COPY_CUH_
