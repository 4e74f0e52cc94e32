// The one order in which Hopper's kernel attends to rows that all heads share, and who computes
// what: tiles of 64 keys from position 0 on, in splits of 16; a score is one wgmma chain along the
// row, an output one along a split's keys; online softmax as attention_order.cuh has it; splits
// merged in order, the first as it is.
//
// A list is what one token's queries of 64 heads attend to, as splits. Lists follow from contexts
// alone; which block takes which of a list's splits does not matter to any bit.
#ifndef BATON_OPS_LATENT_ORDER_CUH_
#define BATON_OPS_LATENT_ORDER_CUH_

#include "baton_ops/attention_order.cuh"

namespace baton_ops::cuda {

constexpr int kLatentRow = 576, kLatentValue = 512;
constexpr int kLatentTile = 64, kLatentHeads = 64, kLatentSplitTiles = 16;
constexpr int kLatentSplit = kLatentTile * kLatentSplitTiles;
constexpr int kMostCutTokens = 256;  // of a launch whose lists may be cut

// Where rows lie in the pool, seen as a matrix of them, and how many a token attends to.
struct LatentKeys {
  const int32_t* tables;    // [sequences, width]
  const int32_t* contexts;  // [sequences]
  int width, page;          // page: keys in a block of the pool, 16 to 128
  int block_rows;           // from one block to the next
  int layer_row;            // of the layer, in a block
  int tokens, q_len, head_tiles;

  // None of a token that is not there; tables end before any others.
  __device__ __forceinline__ int Of(int token) const {
    const int context = min(__ldg(contexts + token / q_len), width * page);
    return context > 0 ? max(0, context - q_len + token % q_len + 1) : 0;
  }
  __device__ __forceinline__ int Lists() const { return tokens * head_tiles; }
};

__host__ __device__ __forceinline__ int LatentSplits(int keys) {
  return (keys + kLatentSplit - 1) / kLatentSplit;
}

// Splits [first, last) of a list of `splits`; `item` is number `first` of those of all lists.
struct LatentRun {
  int list, first, last, splits, keys, item;
  __device__ bool IsWhole() const { return first == 0 && last == splits; }
  // Where a split is left; those from a list's first on are left merged, in the first's.
  __device__ int PlaceOf(int split) const { return first > 0 ? item + split - first : item; }
  __device__ int Tiles(int split) const {
    return min(kLatentSplitTiles,
               (keys + kLatentTile - 1) / kLatentTile - split * kLatentSplitTiles);
  }
};

// Which runs are a block's; in shared memory. Lists are cut where all their splits have a place to
// be left in: into runs of one length, as many as there are blocks. Else a block takes every
// gridDim.x-th list.
class LatentRuns {
 public:
  // Counts splits; by the first warp, before anybody asks.
  __device__ void Read(const LatentKeys& keys, int places) {
    length_ = 0;
    if (keys.tokens > kMostCutTokens) return;
    int before = 0;
#pragma unroll 1
    for (int from = 0; from < keys.tokens; from += 32) {
      const int token = from + threadIdx.x;
      int count = token < keys.tokens ? LatentSplits(keys.Of(token)) : 0;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, count, step);
        if (static_cast<int>(threadIdx.x) >= step) count += other;
      }
      if (token < keys.tokens) before_[token + 1] = before + count;
      before += __shfl_sync(~0u, count, 31);
    }
    if (threadIdx.x > 0) return;
    before_[0] = 0;
    all_ = before * keys.head_tiles;
    const int blocks = gridDim.x;
    if (all_ <= places) length_ = max(1, (all_ + blocks - 1) / blocks);
  }

  // Calls `take` with every run of this block, in order.
  template <class Take>
  __device__ __forceinline__ void ForEachRun(const LatentKeys& keys, Take take) const {
    const int lists = keys.Lists(), block = blockIdx.x;
    const int end = min((block + 1) * length_, all_);
    int item = block * length_;
    int list = length_ ? FirstList(item, keys) : block;
#pragma unroll 1
    while (length_ ? item < end : list < lists) {
      const int count = keys.Of(list / keys.head_tiles), splits = LatentSplits(count);
      const int begin = length_ ? Begin(list, splits, keys) : 0;
      const int first = length_ ? item - begin : 0;
      const int last = length_ ? min(splits, first + end - item) : splits;
      if (first < last) take(LatentRun{list, first, last, splits, count, begin + first});
      if (length_) item += max(0, last - first);
      list += length_ ? last == splits : static_cast<int>(gridDim.x);
    }
  }

 private:
  __device__ __forceinline__ int Begin(int list, int splits, const LatentKeys& keys) const {
    const int token = list / keys.head_tiles;
    return before_[token] * keys.head_tiles + list % keys.head_tiles * splits;
  }
  // The list of an item; of tokens whose splits begin there, the last's.
  __device__ __forceinline__ int FirstList(int item, const LatentKeys& keys) const {
    int token = 0, above = keys.tokens;
#pragma unroll 1
    while (above - token > 1) {
      const int middle = (token + above) / 2;
      (before_[middle] * keys.head_tiles <= item ? token : above) = middle;
    }
    const int splits = max(1, before_[token + 1] - before_[token]);
    const int tile = (item - before_[token] * keys.head_tiles) / splits;
    return token * keys.head_tiles + min(tile, keys.head_tiles - 1);
  }

  int all_, length_;                // splits; those of a run, 0 where lists are whole
  int before_[kMostCutTokens + 1];  // splits of a tile of heads before a token
};

// What blocks leave in memory: of 64 heads, as the threads of two warpgroups have them, each of
// which has 256 of the values.
struct LatentLeft {
  static constexpr int kVectors = 32;  // of four floats, of each thread
  static constexpr int kFloats = kLatentHeads * kLatentValue;
  float4* totals;  // [blocks] of a list's splits so far
  float4* made;    // [places]
  float4* rows;    // [places][128]: tops and sums of two heads a thread of the first warpgroup
  int2* records;   // [lists]: a list's first item, and how many splits its first run has merged
  int places;

  // A thread's first vector, from which each next is 128 further.
  __device__ __forceinline__ static float4* Of(float4* base, int place, int thread) {
    return base + static_cast<size_t>(place) * (kFloats / 4) + thread / 128 * (kVectors * 128) +
           thread % 128;
  }
};

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_LATENT_ORDER_CUH_
