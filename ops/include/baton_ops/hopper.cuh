// What kernels for Hopper GPUs (sm_90a) share: barriers, loads, descriptors of wgmma. Of other
// architectures' machine code their bodies are left out: the host never launches them there.
#ifndef BATON_OPS_HOPPER_CUH_
#define BATON_OPS_HOPPER_CUH_

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "baton_ops/async_copy.cuh"
#include "baton_ops/grid_order.cuh"
#include "baton_ops/quad.cuh"
#include "baton_ops/wgmma.cuh"

namespace baton_ops::cuda {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)
#define BATON_HAS_WGMMA 1
#else
#define BATON_HAS_WGMMA 0
#endif

__device__ __forceinline__ void InitBarrier(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(SharedAddress(barrier)),
               "r"(arrivals)
               : "memory");
}

// Lets the copy engine see barriers that this thread made.
__device__ __forceinline__ void PublishBarriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async;" ::: "memory");
}

// Lets the copy engine and the tensor cores see what this thread wrote to shared memory.
__device__ __forceinline__ void PublishShared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void ExpectBytes(uint64_t* barrier, int bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(SharedAddress(barrier)),
      "r"(bytes)
      : "memory");
}

// By a barrier's address in shared memory, or by itself.
__device__ __forceinline__ void AwaitAt(uint32_t barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
__device__ __forceinline__ void Await(uint64_t* barrier, int parity) {
  AwaitAt(SharedAddress(barrier), parity);
}

// Whether there is nothing to wait for.
__device__ __forceinline__ bool HasComeAt(uint32_t barrier, int parity) {
  uint32_t has_come;
  asm volatile(
      "{\n.reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.b32 %0, 1, 0, done;\n}\n"
      : "=r"(has_come)
      : "r"(barrier), "r"(parity)
      : "memory");
  return has_come != 0;
}

__device__ __forceinline__ void ArriveAt(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void Arrive(uint64_t* barrier) { ArriveAt(SharedAddress(barrier)); }

// Where in a ring of stages someone is, and the parity of its barriers' phase there.
template <int kStages>
struct RingStage {
  int s = 0, phase = 0;
  __device__ __forceinline__ void Advance() {
    if (++s < kStages) return;
    s = 0;
    phase ^= 1;
  }
  // By so many, of no more than there are.
  __device__ __forceinline__ void Advance(int by) {
    s += by;
    if (s < kStages) return;
    s -= kStages;
    phase ^= 1;
  }
};

// Says that a description is needed soon.
__device__ __forceinline__ void PrefetchMap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Loads a box of a matrix, 128 bytes wide, into shared memory.
__device__ __forceinline__ void LoadBox(void* to, const CUtensorMap* map, int column, int row,
                                        uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3}], [%4];" ::"r"(SharedAddress(to)),
      "l"(map), "r"(column), "r"(row), "r"(SharedAddress(barrier))
      : "memory");
}

// The same of what is read once: it need not stay in the L2 cache.
__device__ __forceinline__ void LoadBoxOnce(void* to, const CUtensorMap* map, int column, int row,
                                            uint64_t* barrier) {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(SharedAddress(to)),
      "l"(map), "r"(column), "r"(row), "r"(SharedAddress(barrier)), "l"(policy)
      : "memory");
}

// Loads a box of a matrix that is described as pairs of blocks of kPairRows rows: from the pair of
// that number on, one of each block after the other.
constexpr int kPairRows = 8;
__device__ __forceinline__ void LoadPairs(void* to, const CUtensorMap* map, int column, int pair,
                                          uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %4, %4, %3}], [%5];" ::"r"(SharedAddress(to)),
      "l"(map), "r"(column), "r"(pair), "r"(0), "r"(SharedAddress(barrier))
      : "memory");
}

// Loads a box of a stack of matrices that are described by blocks of kPairRows rows.
__device__ __forceinline__ void LoadOfStack(void* to, const CUtensorMap* map, int column, int row,
                                            int nth, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %3, %4, %5}], [%6];" ::"r"(SharedAddress(to)),
      "l"(map), "r"(column), "r"(0), "r"(row / kPairRows), "r"(nth), "r"(SharedAddress(barrier))
      : "memory");
}

// Describes rows of 128 bytes, swizzled by 128 bytes, groups of 8 rows 1,024 bytes apart. Where the
// operand is transposed, `next_bytes` lie between blocks of 64 columns.
__device__ __forceinline__ uint64_t Descriptor(const void* p, int next_bytes = 16) {
  return static_cast<uint64_t>((SharedAddress(p) & 0x3FFFF) >> 4) |
         static_cast<uint64_t>(next_bytes >> 4) << 16 | uint64_t{1024 >> 4} << 32 |
         uint64_t{1} << 62;
}

// The same of a place that all lanes agree on, from which others are told by their distance. What
// the compiler knows to be uniform stays in the registers that a product's descriptors are read
// from; else it is moved there before each product, which then take twice as long.
class UniformDescriptor {
 public:
  __device__ __forceinline__ explicit UniformDescriptor(const void* p)
      : low_(__shfl_sync(~0u, static_cast<uint32_t>(Descriptor(p)), 0)) {}
  __device__ __forceinline__ uint64_t Behind(int bytes) const { return BehindVectors(bytes >> 4); }
  // By how many times 16 bytes: what is added to that is added where it is uniform.
  __device__ __forceinline__ uint64_t BehindVectors(int count) const {
    constexpr uint64_t kHigh = uint64_t{1024 >> 4} << 32 | uint64_t{1} << 62;
    return kHigh | (low_ + static_cast<uint32_t>(count));
  }
  // That of the place so many bytes behind, a multiple of 16.
  __device__ __forceinline__ UniformDescriptor Stage(int bytes) const {
    return UniformDescriptor(low_ + static_cast<uint32_t>(bytes >> 4));
  }

 private:
  __device__ __forceinline__ explicit UniformDescriptor(uint32_t low) : low_(low) {}
  uint32_t low_;
};

// Describes eight rows of 16 bytes that follow each other, each time so many bytes further in
// depth: not swizzled, on 16 bytes. All lanes agree on the place.
class PlainDescriptor {
 public:
  __device__ __forceinline__ PlainDescriptor(const void* p, int next_bytes)
      : low_(__shfl_sync(~0u, (SharedAddress(p) & 0x3FFFF) >> 4 | (next_bytes >> 4) << 16, 0)) {}
  __device__ __forceinline__ uint64_t Behind(int bytes) const {
    return uint64_t{128 >> 4} << 32 | (low_ + static_cast<uint32_t>(bytes >> 4));
  }

 private:
  uint32_t low_;
};

// Keeps the compiler from moving reads or writes of these over a product that is under way.
template <int kCount>
__device__ __forceinline__ void Hold(float (&values)[kCount]) {
#pragma unroll
  for (float& value : values) asm volatile("" : "+f"(value)::"memory");
}

template <int kCount>
__device__ __forceinline__ void Hold(uint32_t (&values)[kCount]) {
#pragma unroll
  for (uint32_t& value : values) asm volatile("" : "+r"(value)::"memory");
}

__device__ __forceinline__ void FenceProducts() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void CommitProducts() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most so many groups of products are under way.
template <int kGroups>
__device__ __forceinline__ void AwaitProducts() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kGroups) : "memory");
}

__device__ __forceinline__ uint32_t PackedPair(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_HOPPER_CUH_
