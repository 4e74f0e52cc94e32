// What the two warpgroups of Hopper's attention to compressed rows share: half of the values' sums
// each, how these are scaled, added to, merged with those of splits before, and stored.
#ifndef BATON_OPS_LATENT_CONSUMER_CUH_
#define BATON_OPS_LATENT_CONSUMER_CUH_

#include "baton_ops/latent_order.cuh"

namespace baton_ops::cuda {

constexpr int kLatentStages = 2, kLatentBoxes = kLatentRow / 64, kLatentParts = 3;
constexpr int kLatentBoxBytes = kLatentTile * 128;
constexpr int kLatentStageBytes = kLatentBoxes * kLatentBoxBytes;
constexpr int kHalfBoxes = kLatentValue / 64 / 2;  // of the values, a warpgroup's

// A stage has three parts: the boxes of either warpgroup's values, and that which is none, where
// the tile's weights are told; who has last read a part gives it back.
struct LatentShared {
  uint8_t query[kLatentStageBytes], ring[kLatentStages][kLatentStageBytes];
  float4 rows[2][128];  // tops and sums of two heads a thread, as either warpgroup tells them
  uint64_t full[kLatentStages][kLatentParts], empty[kLatentStages][kLatentParts];
  uint64_t query_full, query_empty, told[2];
  LatentRuns runs;
};
static_assert(sizeof(LatentShared) <= 227 * 1024);

// A place in the ring.
struct LatentTurn {
  int s = 0, phase = 0;
  __device__ void Advance() {
    if (++s == kLatentStages) {
      s = 0;
      phase ^= 1;
    }
  }
};

// One arrival of a warp, whose reads and writes are over.
__device__ __forceinline__ void ArriveWarp(uint64_t* barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) Arrive(barrier);
}

__device__ __forceinline__ bool AreOnes(float a, float b) {
  return __all_sync(~0u, a == 1.f && b == 1.f);
}

// A warpgroup's sums of its 256 values of 64 heads: a thread has rows r and r + 8.
class LatentMade {
 public:
  __device__ __forceinline__ void Clear() {
#pragma unroll
    for (int i = 0; i < 64; ++i) left_[i] = right_[i] = 0.f;
  }

  // Nothing is done where nothing would change.
  __device__ __forceinline__ void Scale(float low, float high) {
    if (AreOnes(low, high)) return;
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      left_[i] = __fmul_rn(left_[i], i / 2 % 2 ? high : low);
      right_[i] = __fmul_rn(right_[i], i / 2 % 2 ? high : low);
    }
  }

  __device__ __forceinline__ void Settle() {
    Hold(left_);
    Hold(right_);
  }

  // Begins to add a tile's values by their weights; `values`: the first of the warpgroup's boxes.
  __device__ __forceinline__ void Add(const uint32_t (&weights)[16], const uint8_t* values) {
    const uint64_t low = Descriptor(values, kLatentBoxBytes);
    const uint64_t high = Descriptor(values + 2 * kLatentBoxBytes, kLatentBoxBytes);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      AddProduct(left_, weights + i * 4, low + i * (2048 >> 4));
      AddProduct(right_, weights + i * 4, high + i * (2048 >> 4));
    }
  }

  // Adds them to what is there, by two factors a row. The warpgroup meets in between: more loads at
  // once would have no registers.
  template <class Sync>
  __device__ __forceinline__ void Join(const float4* from, const float (&before)[2],
                                       const float (&next)[2], Sync sync) {
    Scale(next[0], next[1]);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if (i % 4 == 0) sync();
      const float4 all = __ldcg(from + i * 128);
      left_[i * 4] = fmaf(all.x, before[0], left_[i * 4]);
      left_[i * 4 + 1] = fmaf(all.y, before[0], left_[i * 4 + 1]);
      left_[i * 4 + 2] = fmaf(all.z, before[1], left_[i * 4 + 2]);
      left_[i * 4 + 3] = fmaf(all.w, before[1], left_[i * 4 + 3]);
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if (i % 4 == 0) sync();
      const float4 all = __ldcg(from + (i + 16) * 128);
      right_[i * 4] = fmaf(all.x, before[0], right_[i * 4]);
      right_[i * 4 + 1] = fmaf(all.y, before[0], right_[i * 4 + 1]);
      right_[i * 4 + 2] = fmaf(all.z, before[1], right_[i * 4 + 2]);
      right_[i * 4 + 3] = fmaf(all.w, before[1], right_[i * 4 + 3]);
    }
  }

  __device__ __forceinline__ void Leave(float4* to) const {
#pragma unroll
    for (int i = 0; i < LatentLeft::kVectors; ++i) {
      __stcg(to + i * 128, make_float4(At(i, 0), At(i, 1), At(i, 2), At(i, 3)));
    }
  }

  // Stores rows of `out` as far as there are heads, times their shares.
  __device__ __forceinline__ void Store(__nv_bfloat16* out, int heads, const float (&share)[2],
                                        int thread) const {
    const int row = thread % 128 / 32 * 16 + thread % 32 / 4, quad = thread % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < LatentLeft::kVectors; j += 4) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          words[i] = PackedPair(__fmul_rn(At(j + i, half * 2), share[half]),
                                __fmul_rn(At(j + i, half * 2 + 1), share[half]));
        }
        TransposeQuad(words, quad);
        if (row + half * 8 < heads) {
          __nv_bfloat16* to = out + (row + half * 8) * kLatentValue + (j + quad) * 8;
          *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
        }
      }
    }
  }

 private:
  // Of the i-th eight columns: two of row r, two of row r + 8.
  __device__ __forceinline__ float At(int i, int j) const {
    return i < 16 ? left_[i * 4 + j] : right_[i * 4 - 64 + j];
  }

  float left_[64], right_[64];
};

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_LATENT_CONSUMER_CUH_
