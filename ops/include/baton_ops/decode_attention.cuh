// Attention of the last few queries of many paged contexts, with the bits of prompt_attention.cuh
// for the same queries: the order is attention_order.cuh's.
//
// The work is the list of splits of all contexts and heads of keys and values, cut into as many
// equal runs as there are multiprocessors: which block takes a split, and what its neighbours are,
// does not matter to its bits. A block reads tiles of keys and values through one ring (one warp)
// and multiplies them by the queries of all heads that share them, or of a part (one warpgroup): at
// most 32 rows, of which a lane has one (wgmma's rows r + 8 are zeros that nobody stores); up to
// eight rows are multiplied the other way around, see decode_few.cuh. Splits
// from a context's first on are merged in registers. Where a context does not lie whole in one
// block, these, merged, and each of the others are left in memory, and the block that brings the
// last of them merges them, in order.
//
// What the kernel before adds to the pool are the queries' own keys and values, at a context's end;
// those before them lie there since an earlier step. So a launch that overlaps that kernel looks up
// its splits and loads their first tiles meanwhile.
#ifndef BATON_OPS_DECODE_ATTENTION_CUH_
#define BATON_OPS_DECODE_ATTENTION_CUH_

#include <type_traits>

#include "baton_ops/decode_few.cuh"

namespace baton_ops::cuda {

// Of a split's blocks of the pool, at most 32, a lane's; behind the context's last, that one again.
__device__ __forceinline__ int ReadBlock(const int32_t* table, const PagedKeys& keys, int split,
                                         int last) {
  return __ldg(table +
               min(split * (kSplitKeys / keys.page) + static_cast<int>(threadIdx.x % 32), last));
}

// Few rows' tiles of a split are all multiplied before the first is weighed: keys, then values.
template <bool kIsFew>
__device__ __forceinline__ void DecodeProduce(DecodeShared& shared, const CUtensorMap* map,
                                              const PagedKeys& keys, const DecodeShape& shape) {
  const int lane = threadIdx.x, part = lane % 32 / 2, half = lane % 2;
  const int at = half * kHalfBytes + part * keys.page * 128, parts = kTile / keys.page;
  DecodeTurn turn;
  bool has_waited = false;
  const auto wait = [&] {
    if (!has_waited) WaitForEarlierGrids();
    has_waited = true;
  };
  shared.contexts.ForEachRun(shape.rows, keys.kv_heads, [&](const Run& run) {
    const int32_t* table = keys.tables + static_cast<size_t>(run.row) * keys.width;
    const int last = (run.context - 1) / keys.page;
    int next = ReadBlock(table, keys, run.first, last);
#pragma unroll 1
    for (int split = run.first; split < run.last; ++split) {
      const int blocks = next;
      next = ReadBlock(table, keys, split + 1, last);
      const int tiles = run.Tiles(split);
#pragma unroll 1
      for (int i = 0; i < 2 * tiles; ++i) {
        const int tile = kIsFew ? i % tiles : i / 2;
        const bool are_values = kIsFew ? i >= tiles : i % 2;
        const int block = __shfl_sync(~0u, blocks, tile * parts + part % parts);
        const int row = keys.FirstRow(block, run.head);
        const int end = (split * kSplitTiles + tile + 1) * kTile;
        if (end > run.context - shape.queries) wait();
        if (lane % 32 == 0) {
          Await(shared.empty + turn.s, turn.phase ^ 1);
          ExpectBytes(shared.full + turn.s, kTileBytes);
        }
        __syncwarp();
        if (part < parts) {
          LoadBoxOnce(shared.ring[turn.s] + at, map, half * 64,
                      row + (are_values ? keys.value_row : keys.key_row), shared.full + turn.s);
        }
        turn.Advance();
      }
    }
  });
  wait();
}

// The warpgroup's state: scores, what a split has made and probabilities, of which rows r + 8 stay
// zero, and what splits before it have made.
class DecodeConsumer : DecodeWork {
 public:
  __device__ DecodeConsumer(DecodeShared& shared, const PagedKeys& keys, const DecodeShape& shape,
                            const DecodeLeft& left)
      : DecodeWork(shared, keys, shape, left), row_(threadIdx.x / 32 * 8 + threadIdx.x % 32 / 4) {}

  __device__ __forceinline__ void Compute(const __nv_bfloat16* q, __nv_bfloat16* out) {
    ClearQueries<2 * kQueryHalfBytes>();
    shared_.contexts.ForEachRun(shape_.rows, keys_.kv_heads, [&](const Run& run) {
      const DecodeMerge merge(left_, shape_, shared_.contexts, run);
      LoadQueries<kQueryHalfBytes>(run, q);
      position_ = run.context - shape_.queries + row_ / shape_.heads_a_kv;
      SoftmaxRow all;
#pragma unroll
      for (float& value : total_) value = 0.f;
#pragma unroll 1
      for (int split = run.first; split < run.last; ++split) {
        const SoftmaxRow row = Attend(run, split);
        if (run.first == 0) {
          MergeSplit(all, row);
        } else {
          Leave(row, [&](int j) { return MadeOf(j); }, split - run.first);
        }
      }
      if (run.IsWhole()) {
        Store(run, all, out);
      } else {
        if (run.first == 0) Leave(all, [&](int j) { return total_[j]; }, left_.slots - 1);
        Bring(run, merge, out);
      }
    });
  }

 private:
  __device__ __forceinline__ void Settle() {
    Hold(scores_);
    Hold(made_);
    Hold(weights_);
    FenceProducts();
  }

  __device__ __forceinline__ SoftmaxRow Attend(const Run& run, int split) {
    SoftmaxRow row;
#pragma unroll
    for (int i = 0; i < 64; ++i) scores_[i] = made_[i] = 0.f;
#pragma unroll
    for (int i = 0; i < 32; ++i) weights_[i] = 0;
    const int tiles = run.Tiles(split);
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      const int first_key = (split * kSplitTiles + tile) * kTile;
      Score();
      Hide(first_key);
      const float alpha = Soften(row, scores_, 0, shape_.scale_log2);
#pragma unroll
      for (int j = 0; j < 32; ++j) MadeOf(j) *= alpha;
#pragma unroll
      for (int j = 0; j < 16; ++j) weights_[j * 2] = PackedPair(scores_[j * 4], scores_[j * 4 + 1]);
      Weigh(run.context - first_key);
    }
    return row;
  }

  __device__ __forceinline__ void Score() {
    const uint64_t q = Descriptor(shared_.q), k = Descriptor(NextTile());
    Settle();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      Wgmma<kTile>::Multiply(scores_, q + i / 4 * (kQueryHalfBytes >> 4) + i % 4 * 2,
                             k + i / 4 * (kHalfBytes >> 4) + i % 4 * 2, i != 0);
    }
    CommitProducts();
    AwaitProducts<0>();
    Hold(scores_);
    ReleaseTile();
  }

  // Hides what a query must not see.
  __device__ __forceinline__ void Hide(int first_key) {
    if (first_key + kTile - 1 <= position_) return;
#pragma unroll
    for (int j = 0; j < 32; ++j) {
      const int i = j / 2 * 4 + j % 2;
      if (first_key + i / 4 * 8 + quad_ * 2 + i % 4 > position_) scores_[i] = -INFINITY;
    }
  }

  // Adds the weighted values of a tile, of which so many are there.
  __device__ __forceinline__ void Weigh(int there) {
    uint8_t* tile = NextTile();
    if (there < kTile) {
      ClearValues(tile, there);
      Sync();
    }
    const uint64_t values = Descriptor(tile, kHalfBytes);
    Settle();
#pragma unroll
    for (int i = 0; i < 8; ++i) AddProduct(made_, weights_ + i * 4, values + i * (2048 >> 4));
    CommitProducts();
    AwaitProducts<0>();
    Hold(made_);
    ReleaseTile();
  }

  // The j-th of this lane's 32 elements of its row, column j / 2 * 8 + quad * 2 + j % 2.
  __device__ __forceinline__ float& MadeOf(int j) { return made_[j / 2 * 4 + j % 2]; }

  __device__ __forceinline__ void MergeSplit(SoftmaxRow& all, const SoftmaxRow& row) {
    const Merge merged(all, row);
#pragma unroll
    for (int j = 0; j < 32; ++j) {
      total_[j] = merged.Sum(total_[j], MadeOf(j));
    }
  }

  __device__ __forceinline__ void Store(const Run& run, const SoftmaxRow& all, __nv_bfloat16* out) {
    const float share = ShareOf(all.sum);
#pragma unroll
    for (int j = 0; j < 16; j += 4) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        words[i] = PackedPair(total_[(j + i) * 2] * share, total_[(j + i) * 2 + 1] * share);
      }
      TransposeQuad(words, quad_);
      if (row_ < shape_.UsedRows()) {
        *reinterpret_cast<uint4*>(out + Element(run, row_) + (j + quad_) * 8) =
            make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }

  template <class Made>
  __device__ __forceinline__ void Leave(const SoftmaxRow& row, Made made, int slot) {
    if (row_ >= shape_.UsedRows()) return;
    const uint32_t at = left_.Place(blockIdx.x, slot, shape_.UsedRows(), row_);
    left_.sums[at * 4 + quad_] = row.sum;
    if (quad_ == 0) left_.tops[at] = row.top;
#pragma unroll
    for (int j = 0; j < 32; j += 2) {
      *reinterpret_cast<float2*>(left_.made + static_cast<size_t>(at) * kHeadDim + j * 4 +
                                 quad_ * 2) = make_float2(made(j), made(j + 1));
    }
  }

  const int row_;
  int position_ = 0;
  float scores_[64], made_[64], total_[32];
  uint32_t weights_[32];
};

// A template, so that only who launches it has it compiled.
template <class Output, bool kIsFew>
__global__ __launch_bounds__(kDecodeThreads, 1) void DecodeAttentionKernel(
    const __grid_constant__ CUtensorMap map, const Output* q, Output* out, const PagedKeys keys,
    const DecodeLeft left, const DecodeShape shape) {
#if BATON_HAS_WGMMA
  extern __shared__ __align__(1024) uint8_t bytes[];
  DecodeShared& shared = *reinterpret_cast<DecodeShared*>(bytes);
  LetNextGridStart();
  if (threadIdx.x == kDecodeConsumers) PrefetchMap(&map);
  if (threadIdx.x < 32) {
    shared.contexts.Read(keys, shape.rows);
  } else if (threadIdx.x == 32) {
    for (int s = 0; s < kDecodeStages; ++s) {
      InitBarrier(shared.full + s, 1);
      InitBarrier(shared.empty + s, 1);
    }
    PublishBarriers();
  }
  __syncthreads();
  if (threadIdx.x < kDecodeConsumers) {
    using Consumer = std::conditional_t<kIsFew, DecodeFewConsumer, DecodeConsumer>;
    Consumer(shared, keys, shape, left).Compute(q, out);
  } else {
    DecodeProduce<kIsFew>(shared, &map, keys, shape);
  }
#endif
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_DECODE_ATTENTION_CUH_
