// The blocks that share one row: a cluster where the device has them, a single block elsewhere.
// They read each other's shared memory. How a row is split depends on the vocabulary alone.
#ifndef BATON_OPS_ROW_GROUP_CUH_
#define BATON_OPS_ROW_GROUP_CUH_

#include <cstdint>

#include "baton_ops/order.h"

namespace baton_ops::cuda {

// Clusters are there from sm_90 on; kernels for more than one block are not launched before.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define BATON_HAS_CLUSTERS 0
#else
#define BATON_HAS_CLUSTERS 1
#endif

template <int kBlocks>
struct RowGroup {
  static __device__ __forceinline__ uint32_t Rank() {
    uint32_t rank = 0;
#if BATON_HAS_CLUSTERS
    if (kBlocks > 1) asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
    return rank;
  }

  static __device__ __forceinline__ int64_t Row() { return blockIdx.x / kBlocks; }

  // All threads of the row's blocks meet; what was written to shared memory before is seen after.
  static __device__ __forceinline__ void Sync() {
#if BATON_HAS_CLUSTERS
    if (kBlocks > 1) {
      asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
      return;
    }
#endif
    __syncthreads();
  }

  // What block `rank` has at the place where this block has `mine`, in shared memory.
  static __device__ __forceinline__ uint32_t Read(const uint32_t* mine, uint32_t rank) {
#if BATON_HAS_CLUSTERS
    if (kBlocks > 1) {
      uint32_t value;
      asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(Place(mine, rank)));
      return value;
    }
#endif
    return *mine;
  }

  static __device__ __forceinline__ uint64_t Read(const uint64_t* mine, uint32_t rank) {
#if BATON_HAS_CLUSTERS
    if (kBlocks > 1) {
      uint64_t value;
      asm volatile("ld.shared::cluster.u64 %0, [%1];" : "=l"(value) : "r"(Place(mine, rank)));
      return value;
    }
#endif
    return *mine;
  }

 private:
  static __device__ __forceinline__ uint32_t Place(const void* mine, uint32_t rank) {
    const auto here = static_cast<uint32_t>(__cvta_generic_to_shared(mine));
    uint32_t there = here;
#if BATON_HAS_CLUSTERS
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
#endif
    return there;
  }
};

// The ids of a row that one of its blocks looks after: intervals that follow each other, of a
// multiple of four but for the end.
struct Interval {
  uint32_t first;
  uint32_t count;
};

inline __host__ __device__ uint32_t IntervalSize(uint32_t vocab, uint32_t blocks) {
  return (vocab + 4 * blocks - 1) / (4 * blocks) * 4;
}

__device__ __forceinline__ Interval IntervalOf(uint32_t vocab, uint32_t blocks, uint32_t rank) {
  const uint32_t size = IntervalSize(vocab, blocks);
  const uint32_t first = min(rank * size, vocab);
  return {first, min(size, vocab - first)};
}

struct GroupMaxShared {
  uint64_t warp[32];
  uint64_t block;
};

// All threads of a row's blocks: the largest key. A block must not end before the others have read
// it: some Sync has to follow.
template <int kBlocks>
__device__ __forceinline__ uint64_t GroupMax(uint64_t key, GroupMaxShared& shared) {
  using Group = RowGroup<kBlocks>;
  for (int offset = 16; offset > 0; offset /= 2) {
    key = max(key, __shfl_xor_sync(0xffffffffu, key, offset));
  }
  if (threadIdx.x % 32 == 0) shared.warp[threadIdx.x / 32] = key;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (uint32_t w = 1; w < blockDim.x / 32; ++w) key = max(key, shared.warp[w]);
    shared.block = key;
  }
  Group::Sync();
  uint64_t best = 0;
  for (uint32_t rank = 0; rank < kBlocks; ++rank) {
    best = max(best, Group::Read(&shared.block, rank));
  }
  return best;
}

// The largest of the logits that a thread has seen, in ascending order of ids; NaN is the largest.
struct LargestLogit {
  float value = -INFINITY;
  uint32_t id = 0xffffffffu;

  __device__ __forceinline__ void See(float logit, uint32_t at) {
    if (logit <= value && id != 0xffffffffu) return;
    if (id == 0xffffffffu || OrderedValue(logit) > OrderedValue(value)) {
      value = logit;
      id = at;
    }
  }

  __device__ __forceinline__ void See(const float4& logits, uint32_t first) {
    See(logits.x, first);
    See(logits.y, first + 1);
    See(logits.z, first + 2);
    See(logits.w, first + 3);
  }

  __device__ __forceinline__ uint64_t Key() const {
    return id == 0xffffffffu ? 0 : OrderedKey(OrderedValue(value), id);
  }
};

// A thread's share of `count` vectors: f(vector, its place), in ascending order. Several loads are
// on their way at once, which a compiler that fears aliases would not do.
template <int kThreads, int kUnroll, class Function>
__device__ __forceinline__ void ForVectors(const float4* vectors, uint32_t count,
                                           const Function& f) {
  for (uint32_t first = threadIdx.x; first < count; first += kThreads * kUnroll) {
    float4 loaded[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) loaded[i] = vectors[min(first + i * kThreads, count - 1)];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const uint32_t at = first + i * kThreads;
      if (at < count) f(loaded[i], at);
    }
  }
}

__device__ __forceinline__ bool IsBrokenMaximum(uint64_t key) {
  return !isfinite(ValueOfOrdered(OrderedOfKey(key)));
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_ROW_GROUP_CUH_
