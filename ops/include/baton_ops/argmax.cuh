// The most likely token of each row, and whether the row's maximum is a number, in one read.
#ifndef BATON_OPS_ARGMAX_CUH_
#define BATON_OPS_ARGMAX_CUH_

#include "baton_ops/grid_order.cuh"
#include "baton_ops/row_group.cuh"

namespace baton_ops::cuda {

constexpr int kArgmaxThreads = 256;
constexpr int kArgmaxUnroll = 8;

struct ArgmaxParams {
  const float* logits;  // [rows, vocab]
  uint32_t vocab;
  bool by_vectors;  // every row begins at a multiple of 16 bytes
  int32_t* token;
  uint8_t* broken;
};

// A thread's largest logit, and the place where the batch begins that had it first: what a batch
// has is looked at anew at the end, and by few threads.
struct LargestBatch {
  float value = -INFINITY;
  uint32_t place = threadIdx.x;

  __device__ __forceinline__ void See(float largest, uint32_t at) {
    if (largest <= value || isnan(value)) return;
    value = largest;
    place = at;
  }
};

struct ArgmaxShared {
  MaxShared value;
  MaxShared id;
  uint64_t key;
};

// One block's part of a row.
struct ArgmaxPart {
  const float* logits;
  Interval ids;
  bool by_vectors;

  __device__ __forceinline__ const float4* Vectors() const {
    return reinterpret_cast<const float4*>(logits);
  }

  __device__ __forceinline__ LargestBatch Largest() const {
    LargestBatch best;
    if (!by_vectors) {
      for (uint32_t i = threadIdx.x; i < ids.count; i += kArgmaxThreads) best.See(logits[i], i);
      return best;
    }
    ForBatches<kArgmaxThreads, kArgmaxUnroll>(Vectors(), ids.count / 4,
                                              [&](const float4(&x)[kArgmaxUnroll], uint32_t first) {
                                                float largest = MaxOrNan(x[0]);
#pragma unroll
                                                for (int i = 1; i < kArgmaxUnroll; ++i)
                                                  largest = MaxOrNan(largest, MaxOrNan(x[i]));
                                                best.See(largest, first);
                                              });
    return best;
  }

  __device__ __forceinline__ bool Has(float logit, uint32_t ordered) const {
    return OrderedValue(logit) == ordered;
  }

  // The thread's lowest id of this value, given where its batch begins.
  __device__ __forceinline__ uint32_t IdOf(uint32_t ordered, uint32_t place) const {
    if (!by_vectors) return ids.first + place;
    for (int i = 0; i < kArgmaxUnroll; ++i) {
      const uint32_t at = place + i * kArgmaxThreads;
      if (at >= ids.count / 4) break;
      const float4 x = Vectors()[at];
      const uint32_t id = ids.first + 4 * at;
      if (Has(x.x, ordered)) return id;
      if (Has(x.y, ordered)) return id + 1;
      if (Has(x.z, ordered)) return id + 2;
      if (Has(x.w, ordered)) return id + 3;
    }
    return 0xffffffffu;
  }
};

template <int kBlocks>
__global__ void __launch_bounds__(kArgmaxThreads) ArgmaxKernel(ArgmaxParams p) {
  using Group = RowGroup<kBlocks>;
  __shared__ ArgmaxShared shared;
  WaitForEarlierGrids();
  LetNextGridStart();
  const int64_t row = Group::Row();
  const Interval ids = IntervalOf(p.vocab, kBlocks, Group::Rank());
  const ArgmaxPart part{p.logits + row * p.vocab + ids.first, ids, p.by_vectors};
  const LargestBatch mine = part.Largest();
  const uint32_t ordered = OrderedValue(mine.value);
  const uint32_t largest = BlockMax(ordered, shared.value);
  const uint32_t id = ordered == largest ? part.IdOf(largest, mine.place) : 0xffffffffu;
  const uint32_t lowest = ~BlockMax(~id, shared.id);
  if (threadIdx.x == 0) shared.key = ids.count == 0 ? 0 : OrderedKey(largest, lowest);
  Group::Sync();
  if (Group::Rank() == 0 && threadIdx.x == 0) {
    uint64_t key = 0;
#pragma unroll
    for (uint32_t rank = 0; rank < kBlocks; ++rank) key = max(key, Group::Read(&shared.key, rank));
    p.token[row] = static_cast<int32_t>(IdOfKey(key));
    if (IsBrokenMaximum(OrderedOfKey(key))) p.broken[row] |= 1;
  }
  Group::Sync();
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_ARGMAX_CUH_
