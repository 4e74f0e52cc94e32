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

template <int kBlocks>
__global__ void __launch_bounds__(kArgmaxThreads) ArgmaxKernel(ArgmaxParams p) {
  using Group = RowGroup<kBlocks>;
  __shared__ GroupMaxShared shared;
  WaitForEarlierGrids();
  LetNextGridStart();
  const int64_t row = Group::Row();
  const float* logits = p.logits + row * p.vocab;
  const Interval mine = IntervalOf(p.vocab, kBlocks, Group::Rank());
  LargestLogit best;
  if (p.by_vectors) {
    const auto* vectors = reinterpret_cast<const float4*>(logits + mine.first);
    ForVectors<kArgmaxThreads, kArgmaxUnroll>(
        vectors, mine.count / 4,
        [&](const float4& x, uint32_t at) { best.See(x, mine.first + 4 * at); });
  } else {
    for (uint32_t i = threadIdx.x; i < mine.count; i += kArgmaxThreads) {
      best.See(logits[mine.first + i], mine.first + i);
    }
  }
  const uint64_t key = GroupMax<kBlocks>(best.Key(), shared);
  if (Group::Rank() == 0 && threadIdx.x == 0) {
    p.token[row] = static_cast<int32_t>(IdOfKey(key));
    if (IsBrokenMaximum(key)) p.broken[row] |= 1;
  }
  Group::Sync();
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_ARGMAX_CUH_
