// Causal attention of n queries at the end of each of many paged contexts, whose bits do not depend
// on n: the order is attention_order.cuh's. What lies behind a query adds exact zeros, so it does
// not matter which queries share a block.
//
// A block has one warp that loads and two warpgroups of 64 queries each, which take turns with the
// tensor cores: while one multiplies, the other has its softmax. It stays, and takes one piece of
// 128 queries of a head after the other, the longest first. What earlier splits made waits in
// shared memory.
#ifndef BATON_OPS_PROMPT_ATTENTION_CUH_
#define BATON_OPS_PROMPT_ATTENTION_CUH_

#include "baton_ops/attention_order.cuh"

namespace baton_ops::cuda {

constexpr int kPiece = 128, kPromptStages = 2;
constexpr int kPromptConsumers = 256, kPromptThreads = 384;
constexpr int kFirstTurn = 1;     // the named barrier at which group 0 waits; the next is group 1's
constexpr int kGroupBarrier = 3;  // and those at which a group meets, one each

struct PromptShared {
  uint8_t q[kTileBytes], k[kPromptStages][kTileBytes], v[kPromptStages][kTileBytes];
  float total[64][kPromptConsumers];
  uint64_t q_full, q_empty;
  uint64_t k_full[kPromptStages], k_empty[kPromptStages];
  uint64_t v_full[kPromptStages], v_empty[kPromptStages];
};

struct PromptShape {
  int rows, queries, heads, heads_a_kv;
  float scale_log2;
  __device__ int Pieces() const { return (queries + kPiece - 1) / kPiece; }
  __device__ int Works() const { return Pieces() * rows * heads; }
};

// One piece of one head's queries in one row; last pieces first, which are the longest.
struct PromptWork {
  int row, head, first_query, context, position, tiles;
  __device__ PromptWork(const PromptShape& shape, const PagedKeys& keys, int index) {
    head = index % shape.heads;
    row = index / shape.heads % shape.rows;
    first_query = (shape.Pieces() - 1 - index / shape.heads / shape.rows) * kPiece;
    context = keys.Context(row);
    position = context - shape.queries + first_query;
    tiles = max(0, min(context - 1, position + kPiece - 1)) / kTile + 1;
  }
};

// Calls `take` with each work of this block whose row is there: to and fro, so that every block has
// long and short ones.
template <class Take>
__device__ __forceinline__ void ForEachWork(const PromptShape& shape, const PagedKeys& keys,
                                            Take take) {
  const int blocks = gridDim.x, mine = blockIdx.x, all = shape.Works();
  for (int turn = 0; turn * blocks < all; ++turn) {
    const int index = turn * blocks + (turn & 1 ? blocks - 1 - mine : mine);
    if (index >= all) continue;
    const PromptWork work(shape, keys, index);
    if (work.context > 0) take(work, index);
  }
}

__device__ __forceinline__ void PromptProduce(PromptShared& shared, const CUtensorMap* map_q,
                                              const CUtensorMap* map_kv, const PagedKeys& keys,
                                              const PromptShape& shape) {
  const int lane = threadIdx.x, half = lane & 1, parts = kTile / keys.page;
  const int at = half * kHalfBytes + lane / 2 * keys.page * 128;
  int tile = 0, works = 0;
  ForEachWork(shape, keys, [&](const PromptWork& work, int) {
    const int32_t* table = keys.tables + static_cast<size_t>(work.row) * keys.width;
    const int last = (work.context - 1) / keys.page;
    if (lane == 0) {
      Await(&shared.q_empty, works & 1 ^ 1);
      ExpectBytes(&shared.q_full, kTileBytes);
      for (int i = 0; i < 2; ++i) {
        LoadBox(shared.q + i * kHalfBytes, map_q, work.head * kHeadDim + i * 64,
                work.row * shape.queries + work.first_query, &shared.q_full);
      }
    }
    ++works;
    for (int j = 0; j < work.tiles; ++j, ++tile) {
      const int s = tile % kPromptStages, parity = tile / kPromptStages & 1 ^ 1;
      const int block = __ldg(table + min(j * parts + lane / 2 % parts, last));
      const int row = keys.FirstRow(block, work.head / shape.heads_a_kv);
      if (lane == 0) {
        Await(&shared.k_empty[s], parity);
        ExpectBytes(&shared.k_full[s], kTileBytes);
      }
      __syncwarp();
      if (lane / 2 < parts) {
        LoadBox(shared.k[s] + at, map_kv, half * 64, row + keys.key_row, &shared.k_full[s]);
      }
      if (lane == 0) {
        Await(&shared.v_empty[s], parity);
        ExpectBytes(&shared.v_full[s], kTileBytes);
      }
      __syncwarp();
      if (lane / 2 < parts) {
        LoadBox(shared.v[s] + at, map_kv, half * 64, row + keys.value_row, &shared.v_full[s]);
      }
    }
  });
}

// A warpgroup's share of a piece: scores of a tile, what the split has made, and probabilities.
class PromptConsumer {
 public:
  __device__ PromptConsumer(PromptShared& shared, const PagedKeys& keys, const PromptShape& shape)
      : shared_(shared),
        keys_(keys),
        shape_(shape),
        group_(threadIdx.x / 128 - 1),
        thread_(threadIdx.x % 128),
        quad_(threadIdx.x % 4),
        row_(group_ * 64 + thread_ / 32 * 16 + thread_ % 32 / 4),
        total_(&shared.total[0][threadIdx.x - 128]) {}

  __device__ __forceinline__ void Compute(__nv_bfloat16* out) {
    int works = 0;
    ForEachWork(shape_, keys_, [&](const PromptWork& work, int index) {
      Await(&shared_.q_full, works & 1);
      Attend(work.position, work.tiles, index, works == 0);
      Store(Again(index), out);
      ++works;
    });
    if (group_ == 0 && works > 0) TakeTurn();  // hears the other's last word
  }

 private:
  __device__ __forceinline__ void TakeTurn() {
    asm volatile("bar.sync %0, %1;" ::"r"(kFirstTurn + group_), "n"(kPromptConsumers) : "memory");
  }
  __device__ __forceinline__ void GiveTurn() {
    asm volatile("bar.arrive %0, %1;" ::"r"(kFirstTurn + 1 - group_), "n"(kPromptConsumers)
                 : "memory");
  }
  __device__ __forceinline__ void Release(uint64_t* barrier) {
    if (thread_ == 0) Arrive(barrier);
  }

  // The same work computed anew: what of it no tile needs would cost registers meanwhile.
  __device__ __forceinline__ PromptWork Again(int index) const {
    asm volatile("" : "+r"(index));
    return PromptWork(shape_, keys_, index);
  }

  __device__ __forceinline__ void Attend(int position, int tiles, int index, bool is_first_work) {
    SoftmaxRow rows[2];
    all_[0] = all_[1] = SoftmaxRow();
#pragma unroll
    for (float& value : made_) value = 0.f;
    if (group_ == 1 || !is_first_work) TakeTurn();
    Score();
    GiveTurn();
    AwaitProducts<0>();
    Hold(scores_);
    Scored(position, tiles, 0);
    float alpha[2];
    Softmax(rows, alpha);
    Pack();
    for (int j = 1; j < tiles; ++j) {
      TakeTurn();
      const uint64_t values = ValuesOf(tile_ - 1);
      Score();
      Weigh(tile_ - 2, values);
      GiveTurn();
      AwaitProducts<1>();
      Hold(scores_);
      Scored(position, tiles, j);
      const bool begins_split = j % kSplitTiles == 0;
      const SoftmaxRow before[2] = {rows[0], rows[1]};
      if (begins_split) rows[0] = rows[1] = SoftmaxRow();
      Softmax(rows, alpha);
      AwaitProducts<0>();
      Hold(made_);
      Release(&shared_.v_empty[(tile_ - 2) % kPromptStages]);
      if (begins_split) {
        MergeSplit(before, j == kSplitTiles, false);
      } else {
#pragma unroll
        for (int i = 0; i < 64; ++i) made_[i] *= alpha[i >> 1 & 1];
      }
      Pack();
    }
    ClearLastValues(Again(index));
    const uint64_t values = ValuesOf(tile_ - 1);
    Settle();
    Weigh(tile_ - 1, values);
    AwaitProducts<0>();
    Hold(made_);
    Release(&shared_.v_empty[(tile_ - 1) % kPromptStages]);
    MergeSplit(rows, tiles <= kSplitTiles, true);
  }

  // Each group does it for itself: zeros may be written over zeros.
  __device__ __forceinline__ void ClearLastValues(const PromptWork& work) {
    const int there = work.context - (work.tiles - 1) * kTile;
    if (there >= kTile) return;
    const int s = (tile_ - 1) % kPromptStages;
    Await(&shared_.v_full[s], (tile_ - 1) / kPromptStages & 1);
    ClearValues(shared_.v[s], there);
    asm volatile("bar.sync %0, 128;" ::"r"(kGroupBarrier + group_) : "memory");
  }

  // Whatever products read or add to is made before the first of them begins: else each would wait
  // for the one before.
  __device__ __forceinline__ void Settle() {
    Hold(scores_);
    Hold(made_);
    Hold(weights_);
    FenceProducts();
  }

  // Begins the products of the queries and the next tile's keys.
  __device__ __forceinline__ void Score() {
    const int s = tile_ % kPromptStages;
    Await(&shared_.k_full[s], tile_ / kPromptStages & 1);
    const uint64_t q = Descriptor(shared_.q + group_ * 64 * 128), k = Descriptor(shared_.k[s]);
    Settle();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int at = i / 4 * (kHalfBytes >> 4) + i % 4 * 2;
      Wgmma<kTile>::Multiply(scores_, q + at, k + at, i != 0);
    }
    CommitProducts();
    ++tile_;
  }

  // The tile is no longer needed; hides what a query must not see.
  __device__ __forceinline__ void Scored(int position, int tiles, int j) {
    Release(&shared_.k_empty[(tile_ - 1) % kPromptStages]);
    if (j == tiles - 1) Release(&shared_.q_empty);
    if ((j + 1) * kTile - 1 <= position + group_ * 64) return;
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      const int key = j * kTile + i / 4 * 8 + quad_ * 2 + (i & 1);
      if (key > position + row_ + (i >> 1 & 1) * 8) scores_[i] = -INFINITY;
    }
  }

  __device__ __forceinline__ uint64_t ValuesOf(int tile) const {
    return Descriptor(shared_.v[tile % kPromptStages], kHalfBytes);
  }

  // Begins to add the weighted values of a tile.
  __device__ __forceinline__ void Weigh(int tile, uint64_t values) {
    Await(&shared_.v_full[tile % kPromptStages], tile / kPromptStages & 1);
#pragma unroll
    for (int i = 0; i < 8; ++i) AddProduct(made_, weights_ + i * 4, values + i * (2048 >> 4));
    CommitProducts();
  }

  __device__ __forceinline__ void Softmax(SoftmaxRow (&rows)[2], float (&alpha)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) alpha[h] = Soften(rows[h], scores_, h, shape_.scale_log2);
  }

  // Rounds probabilities to bf16, once no product reads the last ones.
  __device__ __forceinline__ void Pack() {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      weights_[i] = PackedPair(scores_[i * 2], scores_[i * 2 + 1]);
    }
  }

  // Adds a split to those before it. The first has nothing before it, the last stays in registers.
  __device__ __forceinline__ void MergeSplit(const SoftmaxRow (&split)[2], bool is_first,
                                             bool is_last) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const Merge merged(all_[h], split[h]);
      if (is_first && is_last) continue;
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        const int at = i / 2 * 4 + h * 2 + (i & 1);
        const float sum = merged.Sum(is_first ? 0.f : total_[at * kPromptConsumers], made_[at]);
        if (!is_last) total_[at * kPromptConsumers] = sum;
        made_[at] = is_last ? sum : 0.f;
      }
    }
  }

  __device__ __forceinline__ void Store(const PromptWork& work, __nv_bfloat16* out) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float share = ShareOf(all_[h].sum);
      const int query = work.first_query + row_ + h * 8;
      const size_t flat = static_cast<size_t>(work.row) * shape_.queries + query;
      __nv_bfloat16* to = out + (flat * shape_.heads + work.head) * kHeadDim;
#pragma unroll
      for (int j = 0; j < 16; j += 4) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = (j + i) * 4 + h * 2;
          words[i] = PackedPair(made_[at] * share, made_[at + 1] * share);
        }
        TransposeQuad(words, quad_);
        if (query < shape_.queries) {
          *reinterpret_cast<uint4*>(to + (j + quad_) * 8) =
              make_uint4(words[0], words[1], words[2], words[3]);
        }
      }
    }
  }

  PromptShared& shared_;
  const PagedKeys& keys_;
  const PromptShape& shape_;
  const int group_, thread_, quad_, row_;
  float* const total_;
  int tile_ = 0;
  SoftmaxRow all_[2];
  float scores_[64], made_[64];
  uint32_t weights_[32];
};

// A template, so that only who launches it has it compiled.
template <class Output>
__global__ __launch_bounds__(kPromptThreads, 1) void PromptAttentionKernel(
    const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_kv,
    Output* out, const PagedKeys keys, const PromptShape shape) {
#if BATON_HAS_WGMMA
  extern __shared__ __align__(1024) uint8_t bytes[];
  PromptShared& shared = *reinterpret_cast<PromptShared*>(bytes);
  LetNextGridStart();
  if (threadIdx.x == 0) {
    PrefetchMap(&map_q);
    PrefetchMap(&map_kv);
    InitBarrier(&shared.q_full, 1);
    InitBarrier(&shared.q_empty, 2);
    for (int s = 0; s < kPromptStages; ++s) {
      InitBarrier(&shared.k_full[s], 1);
      InitBarrier(&shared.v_full[s], 1);
      InitBarrier(&shared.k_empty[s], 2);
      InitBarrier(&shared.v_empty[s], 2);
    }
    PublishBarriers();
  }
  WaitForEarlierGrids();
  __syncthreads();
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x < 32) PromptProduce(shared, &map_q, &map_kv, keys, shape);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    PromptConsumer(shared, keys, shape).Compute(out);
  }
#endif
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_PROMPT_ATTENTION_CUH_
