// Attention of the last few queries of many paged contexts, with the bits of prompt_attention.cuh
// for the same queries: the order is attention_order.cuh's.
//
// The work is the list of splits of all contexts and heads of keys and values, cut into as many
// equal runs as there are multiprocessors: which block takes a split, and what its neighbours are,
// does not matter to its bits. A block reads tiles of keys and values through one ring (one warp)
// and multiplies them by the queries of all heads that share them, or of a part (one warpgroup): at
// most 32 rows, of which a lane has one (wgmma's rows r + 8 are zeros that nobody stores). Splits
// from a context's first on are merged in registers. Where a context does not lie whole in one
// block, these, merged, and each of the others are left in memory, and the block that brings the
// last of them merges them, in order.
//
// What the kernel before adds to the pool are the queries' own keys and values, at a context's end;
// those before them lie there since an earlier step. So a launch that overlaps that kernel looks up
// its splits and loads their first tiles meanwhile.
#ifndef BATON_OPS_DECODE_ATTENTION_CUH_
#define BATON_OPS_DECODE_ATTENTION_CUH_

#include "baton_ops/decode_left.cuh"

namespace baton_ops::cuda {

constexpr int kDecodeConsumers = 128, kDecodeThreads = kDecodeConsumers + 32;
constexpr int kDecodeStages = 6, kQueryHalfBytes = 64 * 128;

struct DecodeShared {
  uint8_t ring[kDecodeStages][kTileBytes], q[2 * kQueryHalfBytes];
  uint64_t full[kDecodeStages], empty[kDecodeStages];
  Contexts contexts;
  int is_last;
};

// A place in the ring.
struct DecodeTurn {
  int s = 0, phase = 0;
  __device__ void Advance() {
    if (++s == kDecodeStages) {
      s = 0;
      phase ^= 1;
    }
  }
};

// Of a split's blocks of the pool, at most 32, a lane's; behind the context's last, that one again.
__device__ __forceinline__ int ReadBlock(const int32_t* table, const PagedKeys& keys, int split,
                                         int last) {
  return __ldg(table +
               min(split * (kSplitKeys / keys.page) + static_cast<int>(threadIdx.x % 32), last));
}

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
#pragma unroll 1
      for (int tile = 0; tile < run.Tiles(split); ++tile) {
        const int block = __shfl_sync(~0u, blocks, tile * parts + part % parts);
        const int row = keys.FirstRow(block, run.head);
        const int end = (split * kSplitTiles + tile + 1) * kTile;
        if (end > run.context - shape.queries) wait();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (lane % 32 == 0) {
            Await(shared.empty + turn.s, turn.phase ^ 1);
            ExpectBytes(shared.full + turn.s, kTileBytes);
          }
          __syncwarp();
          if (part < parts) {
            LoadBoxOnce(shared.ring[turn.s] + at, map, half * 64,
                        row + (i ? keys.value_row : keys.key_row), shared.full + turn.s);
          }
          turn.Advance();
        }
      }
    }
  });
  wait();
}

// The warpgroup's state: scores, what a split has made and probabilities, of which rows r + 8 stay
// zero, and what splits before it have made.
class DecodeConsumer {
 public:
  __device__ DecodeConsumer(DecodeShared& shared, const PagedKeys& keys, const DecodeShape& shape,
                            const DecodeLeft& left)
      : shared_(shared),
        keys_(keys),
        shape_(shape),
        left_(left),
        quad_(threadIdx.x % 4),
        row_(threadIdx.x / 32 * 8 + threadIdx.x % 32 / 4) {}

  __device__ __forceinline__ void Compute(const __nv_bfloat16* q, __nv_bfloat16* out) {
    for (int i = threadIdx.x; i < 2 * kQueryHalfBytes / 16; i += kDecodeConsumers) {
      reinterpret_cast<uint4*>(shared_.q)[i] = uint4{};
    }
    WaitForEarlierGrids();
    shared_.contexts.ForEachRun(shape_.rows, keys_.kv_heads, [&](const Run& run) {
      LoadQueries(run, q);
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
        Bring(run, out);
      }
    });
  }

 private:
  __device__ __forceinline__ void Sync() {
    asm volatile("bar.sync 1, %0;" ::"n"(kDecodeConsumers) : "memory");
  }

  // Where a row of a run begins among queries or outputs.
  __device__ __forceinline__ size_t Element(const Run& run, int row) const {
    const int query = run.row * shape_.queries + row / shape_.heads_a_kv;
    const int head = run.head * shape_.heads_a_kv + row % shape_.heads_a_kv;
    return (static_cast<size_t>(query) * keys_.kv_heads * shape_.heads_a_kv + head) * kHeadDim;
  }

  // Row r of the queries is the product's row r / 8 * 16 + r % 8.
  __device__ __forceinline__ void LoadQueries(const Run& run, const __nv_bfloat16* q) {
    Sync();
    // Not unrolled: a step's weights drive the code out of the caches, and few rows are one round.
#pragma unroll 1
    for (int i = threadIdx.x; i < shape_.UsedRows() * 16; i += kDecodeConsumers) {
      const int row = i / 16, to = row / 8 * 16 + row % 8, chunk = i % 16;
      uint8_t* at = shared_.q + chunk / 8 * kQueryHalfBytes + to * 128;
      *reinterpret_cast<uint4*>(at + ((chunk ^ row) % 8) * 16) =
          *reinterpret_cast<const uint4*>(q + Element(run, row) + chunk * 8);
    }
    PublishShared();
    Sync();
  }

  // Waits for the ring's next tile, and returns it.
  __device__ __forceinline__ uint8_t* NextTile() {
    Await(shared_.full + turn_.s, turn_.phase);
    return shared_.ring[turn_.s];
  }
  __device__ __forceinline__ void ReleaseTile() {
    if (threadIdx.x == 0) Arrive(shared_.empty + turn_.s);
    turn_.Advance();
  }
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
      for (int j = 0; j < 16; ++j) weights_[j * 2] = Packed(scores_[j * 4], scores_[j * 4 + 1]);
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
        words[i] = Packed(total_[(j + i) * 2] * share, total_[(j + i) * 2 + 1] * share);
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

  // Says that the splits of a run are there; who brings the last ones merges them all.
  __device__ __forceinline__ void Bring(const Run& run, __nv_bfloat16* out) {
    __threadfence();
    Sync();
    if (threadIdx.x == 0) {
      int* brought = left_.brought + run.row * keys_.kv_heads + run.head;
      const int count = run.last - run.first;
      shared_.is_last = atomicAdd(brought, count) + count == run.splits;
      if (shared_.is_last) *brought = 0;
    }
    Sync();
    if (!shared_.is_last) return;
    __threadfence();
    DecodeMerge(left_, shape_, shared_.contexts, run)
        .ForEachRow([&](int row, int lane, uint2 four) {
          *reinterpret_cast<uint2*>(out + Element(run, row) + lane * 4) = four;
        });
  }

  DecodeShared& shared_;
  const PagedKeys& keys_;
  const DecodeShape& shape_;
  const DecodeLeft& left_;
  const int quad_, row_;
  int position_ = 0;
  DecodeTurn turn_;
  float scores_[64], made_[64], total_[32];
  uint32_t weights_[32];
};

// A template, so that only who launches it has it compiled.
template <class Output>
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
    DecodeConsumer(shared, keys, shape, left).Compute(q, out);
  } else {
    DecodeProduce(shared, &map, keys, shape);
  }
#endif
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_DECODE_ATTENTION_CUH_
