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

  // Writes to block `rank`'s place where this block has `mine`, in shared memory; all have met.
  static __device__ __forceinline__ void Write(float* mine, uint32_t rank, float value) {
#if BATON_HAS_CLUSTERS
    if (kBlocks > 1) {
      asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(Place(mine, rank)), "f"(value)
                   : "memory");
      return;
    }
#endif
    *mine = value;
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

constexpr uint32_t kFullWarp = 0xffffffffu;

struct MaxShared {
  uint32_t warp[32];
  uint32_t block;
};

// All threads of a block: the largest value, which is also left in `shared.block`.
__device__ __forceinline__ uint32_t BlockMax(uint32_t value, MaxShared& shared) {
  const uint32_t lane = threadIdx.x % 32;
  value = __reduce_max_sync(kFullWarp, value);
  if (lane == 0) shared.warp[threadIdx.x / 32] = value;
  __syncthreads();
  value = __reduce_max_sync(kFullWarp, lane < blockDim.x / 32 ? shared.warp[lane] : 0);
  if (threadIdx.x == 0) shared.block = value;
  return value;
}

// All threads of a row's blocks: the largest value. A block must not end before the others have
// read its own: some Sync has to follow.
template <int kBlocks>
__device__ __forceinline__ uint32_t GroupMax(uint32_t value, MaxShared& shared) {
  value = BlockMax(value, shared);
  RowGroup<kBlocks>::Sync();
  const uint32_t rank = min(threadIdx.x % 32, kBlocks - 1u);
  return __reduce_max_sync(kFullWarp, RowGroup<kBlocks>::Read(&shared.block, rank));
}

// The larger of two logits, or NaN if one of them is.
__device__ __forceinline__ float MaxOrNan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

__device__ __forceinline__ float MaxOrNan(const float4& x) {
  return MaxOrNan(MaxOrNan(x.x, x.y), MaxOrNan(x.z, x.w));
}

// A thread's share of `count` vectors, kUnroll at a time, in ascending order: f(vectors, place of
// the first). The others are kThreads apart; behind the end the last vector is repeated. The loads
// are on their way at once, which a compiler that fears aliases would not do.
template <int kThreads, int kUnroll, class Function>
__device__ __forceinline__ void ForBatches(const float4* vectors, uint32_t count,
                                           const Function& f) {
  for (uint32_t first = threadIdx.x; first < count; first += kThreads * kUnroll) {
    float4 loaded[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) loaded[i] = vectors[min(first + i * kThreads, count - 1)];
    f(loaded, first);
  }
}

__device__ __forceinline__ bool IsBrokenMaximum(uint32_t ordered) {
  return !isfinite(ValueOfOrdered(ordered));
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_ROW_GROUP_CUH_
