// Which splits of which contexts a block of decode's attention computes.
//
// The list of the splits of all contexts and heads of keys and values, context by context and head
// by head, is cut into runs of one length, or one less: as many as there are blocks, or some fewer
// where all can be as long as the longest must be, which leaves more contexts whole.
#ifndef BATON_OPS_DECODE_RUNS_CUH_
#define BATON_OPS_DECODE_RUNS_CUH_

#include "baton_ops/attention_order.cuh"

namespace baton_ops::cuda {

constexpr int kMaxContexts = 1024;
constexpr uint32_t kMostSplitsTimesBlocks = 1u << 31;  // of all contexts and heads

// Splits [first, last) of one context and head, of `splits` in all; `item` is number `first` of the
// whole list.
struct Run {
  int row, head, first, last, splits, context, item;
  __device__ bool IsWhole() const { return first == 0 && last == splits; }
  __device__ int Tiles(int split) const {
    return min(kSplitTiles, (context + kTile - 1) / kTile - split * kSplitTiles);
  }
};

// The contexts of a launch; in shared memory.
class Contexts {
 public:
  // Counts the splits; by the first warp, before anybody asks.
  __device__ void Read(const PagedKeys& keys, int rows) {
    int before = 0;
#pragma unroll 1
    for (int from = 0; from < rows; from += 32) {
      const int row = from + threadIdx.x, context = row < rows ? keys.Context(row) : 0;
      int count = (context + kSplitKeys - 1) / kSplitKeys;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, count, step);
        if (static_cast<int>(threadIdx.x) >= step) count += other;
      }
      if (row < rows) {
        tokens_[row] = context;
        before_[row + 1] = before + count;
      }
      before += __shfl_sync(~0u, count, 31);
    }
    if (threadIdx.x > 0) return;
    before_[0] = 0;
    all_ = before * keys.kv_heads;
    const uint32_t blocks = gridDim.x, longest = max(1u, (all_ + blocks - 1) / blocks);
    const uint32_t used = (all_ + longest - 1) / longest;
    length_ = longest == 1 || used * 10 >= blocks * 9 ? longest : 0;
  }

  // Calls `take` with every run of this block, in order.
  template <class Take>
  __device__ __forceinline__ void ForEachRun(int rows, int kv_heads, Take take) const {
    int item = FirstOf(blockIdx.x);
    const int end = FirstOf(blockIdx.x + 1);
    int row = RowOf(item, rows, kv_heads);
#pragma unroll 1
    while (item < end) {
      const int begin = before_[row] * kv_heads, splits = before_[row + 1] - before_[row];
      if (item >= begin + splits * kv_heads) {
        ++row;
        continue;
      }
      const int head = (item - begin) / splits, first = (item - begin) % splits;
      const int last = min(splits, first + end - item);
      take(Run{row, head, first, last, splits, tokens_[row], item});
      item += last - first;
    }
  }

  // The block that computes a split.
  __device__ __forceinline__ int BlockOf(uint32_t item) const {
    return length_ ? item / length_ : ((item + 1) * gridDim.x - 1) / all_;
  }

  // The first split of a block.
  __device__ __forceinline__ int FirstOf(uint32_t block) const {
    return length_ ? min(block * length_, all_) : all_ * block / gridDim.x;
  }

  // How many splits of a run's context and head lie in the block that has the first of them.
  __device__ __forceinline__ int InFirstRun(const Run& run) const {
    const int item = run.item - run.first;
    return min(run.splits, FirstOf(BlockOf(item) + 1) - item);
  }

 private:
  // The row of a split; of rows that begin there, the last.
  __device__ __forceinline__ int RowOf(int item, int rows, int kv_heads) const {
    int row = 0, above = rows;
#pragma unroll 1
    while (above - row > 1) {
      const int middle = (row + above) / 2;
      (before_[middle] * kv_heads <= item ? row : above) = middle;
    }
    return row;
  }

  uint32_t all_, length_;  // splits, and those of each run; 0 where lengths differ
  int before_[kMaxContexts + 1], tokens_[kMaxContexts];  // splits of one head before a row
};

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_DECODE_RUNS_CUH_
