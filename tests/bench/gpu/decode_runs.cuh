// Which splits of which contexts a program of decode's attention computes.
//
// The list of the splits of all contexts and heads of keys and values, context by context and head
// by head, is cut into runs of one length, or one less: as many as there are programs, or some
// fewer where all can be as long as the longest must be, which leaves more contexts whole.
#pragma once

#include "attention_order.cuh"

constexpr int kMaxContexts = 1024;

// Splits [first, last) of one context and head, of `splits` in all; `item` is number `first` of the
// whole list.
struct Run {
  int row, head, first, last, splits, context, item;
  __device__ bool is_whole() const { return first == 0 && last == splits; }
  __device__ int tiles(int split) const {
    return min(kSplitTiles, (context + kTile - 1) / kTile - split * kSplitTiles);
  }
};

// The contexts of a launch; in shared memory.
class Contexts {
 public:
  // Counts the splits; by the first warp, before anybody asks.
  __device__ void read(const int* contexts, int rows, int kv_heads) {
    int before = 0;
    for (int from = 0; from < rows; from += 32) {
      const int row = from + threadIdx.x, context = row < rows ? contexts[row] : 0;
      int count = (context + kSplitTiles * kTile - 1) / (kSplitTiles * kTile);
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
    all_ = before * kv_heads;
    const uint32_t programs = gridDim.x, longest = max(1u, (all_ + programs - 1) / programs);
    const uint32_t used = (all_ + longest - 1) / longest;
    length_ = longest == 1 || used * 10 >= programs * 9 ? longest : 0;
  }

  // Calls `take` with every run of this program, in order.
  template <class Take>
  __device__ __forceinline__ void for_each_run(int rows, int kv_heads, Take take) const {
    int item = first_of(blockIdx.x);
    const int end = first_of(blockIdx.x + 1);
    int row = row_of(item, rows, kv_heads);
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

  // How many splits of a run's context and head lie in the program that has the first of them.
  __device__ __forceinline__ int in_first_run(const Run& run) const {
    const uint32_t item = run.item - run.first, programs = gridDim.x;
    const uint32_t program = length_ ? item / length_ : ((item + 1) * programs - 1) / all_;
    return min(run.splits, first_of(program + 1) - static_cast<int>(item));
  }

 private:
  // The first split of a program.
  __device__ __forceinline__ int first_of(uint32_t program) const {
    return length_ ? min(program * length_, all_) : all_ * program / gridDim.x;
  }

  // The row of a split; of rows that begin there, the last.
  __device__ __forceinline__ int row_of(int item, int rows, int kv_heads) const {
    int row = 0, above = rows;
    while (above - row > 1) {
      const int middle = (row + above) / 2;
      (before_[middle] * kv_heads <= item ? row : above) = middle;
    }
    return row;
  }

  uint32_t all_, length_;  // splits, and those of each run; 0 where lengths differ
  int before_[kMaxContexts + 1], tokens_[kMaxContexts];  // splits of one head before a row
};
