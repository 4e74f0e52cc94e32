// Merges what blocks of Hopper's attention to compressed rows have left, in the order of splits.
#ifndef BATON_OPS_LATENT_MERGE_CUH_
#define BATON_OPS_LATENT_MERGE_CUH_

#include "baton_ops/latent_order.cuh"

namespace baton_ops::cuda {

constexpr int kMergeThreads = 128, kMergeVectors = 2, kMergeAtOnce = 4;
constexpr int kMergeSlices = 2 * LatentLeft::kVectors / kMergeVectors;  // of a list

// A thread's rows and vectors of one part.
struct LeftPart {
  float4 rows, made[kMergeVectors];
  __device__ __forceinline__ LeftPart() {}
  __device__ __forceinline__ void Load(const LatentLeft& left, int item, int first) {
    rows = __ldcg(left.rows + static_cast<size_t>(item) * 128 + threadIdx.x);
    const float4* from = LatentLeft::Of(left.made, item, first / LatentLeft::kVectors * 128);
#pragma unroll
    for (int i = 0; i < kMergeVectors; ++i) {
      made[i] = __ldcg(from + threadIdx.x + (first % LatentLeft::kVectors + i) * 128);
    }
  }
};

// What was merged of a thread's two rows so far.
class LeftTotal {
 public:
  __device__ __forceinline__ void Add(const LeftPart& part, bool is_first) {
    const SoftmaxRow low{part.rows.x, part.rows.z}, high{part.rows.y, part.rows.w};
    if (is_first) {
      low_ = low;
      high_ = high;
#pragma unroll
      for (int i = 0; i < kMergeVectors; ++i) made_[i] = part.made[i];
      return;
    }
    const Merge a(low_, low), b(high_, high);
#pragma unroll
    for (int i = 0; i < kMergeVectors; ++i) {
      const float4 all = made_[i], more = part.made[i];
      made_[i] = make_float4(a.Sum(all.x, more.x), a.Sum(all.y, more.y), b.Sum(all.z, more.z),
                             b.Sum(all.w, more.w));
    }
  }

  // `out`: of the list's first head; `first`: of all vectors.
  __device__ __forceinline__ void Store(__nv_bfloat16* out, int heads, int first) const {
    const float share[2] = {ShareOf(low_.sum), ShareOf(high_.sum)};
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int i = 0; i < kMergeVectors; ++i) {
      const int column = (first + i) * 8 + threadIdx.x % 4 * 2;
      const float4 v = made_[i];
      if (row < heads) Pair(out + row * kLatentValue + column, v.x, v.y, share[0]);
      if (row + 8 < heads) Pair(out + (row + 8) * kLatentValue + column, v.z, v.w, share[1]);
    }
  }

 private:
  __device__ __forceinline__ static void Pair(__nv_bfloat16* to, float a, float b, float share) {
    *reinterpret_cast<uint32_t*>(to) = PackedPair(__fmul_rn(a, share), __fmul_rn(b, share));
  }

  SoftmaxRow low_, high_;
  float4 made_[kMergeVectors];
};

// Of all lists and slices of their values, a block's.
template <class Output>
__global__ __launch_bounds__(kMergeThreads) void LatentMergeKernel(const LatentKeys keys,
                                                                   const LatentLeft left,
                                                                   Output* out, int heads) {
  WaitForEarlierGrids();
  LetNextGridStart();
#pragma unroll 1
  for (int work = blockIdx.x; work < keys.Lists() * kMergeSlices; work += gridDim.x) {
    const int list = work / kMergeSlices, first = work % kMergeSlices * kMergeVectors;
    const int token = list / keys.head_tiles, tile = list % keys.head_tiles;
    const int splits = LatentSplits(keys.Of(token));
    if (splits < 2) continue;
    const int2 record = __ldcg(left.records + list);
    if (record.y == 0) continue;
    const int parts = splits - record.y + 1;
    LeftTotal total;
#pragma unroll 1
    for (int from = 0; from < parts; from += kMergeAtOnce) {
      LeftPart part[kMergeAtOnce];
#pragma unroll
      for (int i = 0; i < kMergeAtOnce; ++i) {
        const int at = min(from + i, parts - 1);
        part[i].Load(left, record.x + (at ? record.y + at - 1 : 0), first);
      }
#pragma unroll
      for (int i = 0; i < kMergeAtOnce; ++i) {
        if (from + i < parts) total.Add(part[i], from + i == 0);
      }
    }
    const int64_t head = static_cast<int64_t>(token) * heads + tile * kLatentHeads;
    total.Store(out + head * kLatentValue, heads - tile * kLatentHeads, first);
  }
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_LATENT_MERGE_CUH_
