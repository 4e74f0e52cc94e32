// Causal attention over rows that all heads of a token share, of DeepSeek-V3's sizes, for Hopper,
// in the order of latent_order.cuh.
//
// A block keeps one token's queries of 64 heads in shared memory and reads tiles of rows through a
// ring of two, which serve as keys and as values. Two warpgroups take tiles in turns: one makes
// weights of a tile's scores while the other multiplies. A list's splits are merged in order
// through a place in memory of the block's own, which stays in the L2 cache. Where lists are cut,
// other parts than a list's first are left split by split, and a second kernel merges them.
#ifndef BATON_OPS_LATENT_WGMMA_CUH_
#define BATON_OPS_LATENT_WGMMA_CUH_

#include "baton_ops/latent_consumer.cuh"

namespace baton_ops::cuda {

constexpr int kLatentBlockThreads = 3 * 128;
// A block begins with 168 a thread, and has no others.
constexpr int kManyRegisters = 224, kFewRegisters = 56;
static_assert(2 * kManyRegisters + kFewRegisters <= 3 * 168);

// Brings queries and tiles, by one warp.
class LatentProducer {
 public:
  __device__ LatentProducer(LatentShared& shared, const LatentKeys& keys, int heads)
      : shared_(shared),
        keys_(keys),
        heads_(heads),
        lane_(threadIdx.x % 32),
        pieces_(max(1, kLatentTile / keys.page)) {}

  __device__ __forceinline__ void Run(const CUtensorMap* query, const CUtensorMap* pool) {
    int phase = 1;
    shared_.runs.ForEachRun(keys_, [&](const LatentRun& run) {
      BringQueries(run, query, phase);
      phase ^= 1;
      const int token = run.list / keys_.head_tiles;
      const int32_t* table = keys_.tables + static_cast<size_t>(token / keys_.q_len) * keys_.width;
      const int first = run.first * kLatentSplitTiles;
      const int end = min(run.last * kLatentSplitTiles, (run.keys + kLatentTile - 1) / kLatentTile);
      int next = RowOf(table, run.keys, first);
#pragma unroll 1
      for (int tile = first; tile < end; ++tile) {
        const int row = next;
        next = RowOf(table, run.keys, tile + 1);
        BringPart(pool, row, 0, 0, kHalfBoxes);
        BringPart(pool, row, 1, kHalfBoxes, 2 * kHalfBoxes);
        BringPart(pool, row, 2, 2 * kHalfBoxes, kLatentBoxes);
        turn_.Advance();
      }
    });
  }

 private:
  __device__ __forceinline__ void BringQueries(const LatentRun& run, const CUtensorMap* map,
                                               int phase) {
    const int tile = run.list % keys_.head_tiles, token = run.list / keys_.head_tiles;
    if (lane_ == 0) {
      Await(&shared_.query_empty, phase);
      ExpectBytes(&shared_.query_full, kLatentBoxes * min(heads_, kLatentHeads) * 128);
    }
    __syncwarp();
    if (lane_ < kLatentBoxes) {
      LoadBox(shared_.query + lane_ * kLatentBoxBytes, map, lane_ * 64,
              token * heads_ + tile * kLatentHeads, &shared_.query_full);
    }
  }

  // The pool's row where a lane's piece of a tile begins; behind the last key, of its block.
  __device__ __forceinline__ int RowOf(const int32_t* table, int keys, int tile) const {
    const int key = min(tile * kLatentTile + lane_ % pieces_ * keys_.page, keys - 1);
    const int within = keys_.page > kLatentTile ? key % keys_.page / kLatentTile * kLatentTile : 0;
    return __ldg(table + key / keys_.page) * keys_.block_rows + keys_.layer_row + within;
  }

  __device__ __forceinline__ void BringPart(const CUtensorMap* map, int row, int part, int begin,
                                            int end) {
    uint64_t* full = &shared_.full[turn_.s][part];
    if (lane_ == 0) {
      Await(&shared_.empty[turn_.s][part], turn_.phase ^ 1);
      ExpectBytes(full, (end - begin) * kLatentBoxBytes);
    }
    __syncwarp();
    const int bytes = kLatentBoxBytes / pieces_;
    for (int i = begin * pieces_ + lane_; i < end * pieces_; i += 32) {
      LoadBox(shared_.ring[turn_.s] + i * bytes, map, i / pieces_ * 64, row, full);
    }
  }

  LatentShared& shared_;
  const LatentKeys& keys_;
  const int heads_, lane_, pieces_;
  LatentTurn turn_;
};

// A warpgroup of two, which take tiles in turns: each scores its own, makes weights of the scores
// and tells them, and adds its half of every tile's values, in order. So one multiplies while the
// other makes weights. Of the softmax each has all, told or its own.
template <int kGroup>
class LatentConsumer {
 public:
  __device__ LatentConsumer(LatentShared& shared, const LatentKeys& keys, const LatentLeft& left,
                            float scale_log2)
      : shared_(shared), keys_(keys), left_(left), scale_log2_(scale_log2) {}

  __device__ __forceinline__ void Compute(__nv_bfloat16* out, int heads) {
    shared_.runs.ForEachRun(keys_, [&](const LatentRun& run) {
      if (threadIdx.x == 0 && run.first == 0 && keys_.tokens <= kMostCutTokens && run.splits > 1) {
        left_.records[run.list] = make_int2(run.item, run.IsWhole() ? 0 : run.last);
      }
      SoftmaxRow all[2];
      Await(&shared_.query_full, query_phase_);
      query_phase_ ^= 1;
#pragma unroll 1
      for (int split = run.first; split < run.last; ++split) {
        rows_[0] = rows_[1] = SoftmaxRow();
        Attend(run.Tiles(split), run.keys - split * kLatentSplit);
        if (split + 1 == run.last) ArriveWarp(&shared_.query_empty);
        End(run, split, all, out, heads);
      }
    });
  }

 private:
  __device__ __forceinline__ static void Sync() {
    asm volatile("bar.sync %0, %1;" ::"r"(kGroup + 1), "n"(128) : "memory");
  }
  __device__ __forceinline__ uint8_t* Values(int s) const {
    return shared_.ring[s] + kGroup * kHalfBoxes * kLatentBoxBytes;
  }
  // Where a tile's weights are told: its box that holds no values, once it was scored.
  __device__ __forceinline__ uint4* Weights(int s) const {
    uint8_t* box = shared_.ring[s] + 2 * kHalfBoxes * kLatentBoxBytes;
    return reinterpret_cast<uint4*>(box) + threadIdx.x % 128;
  }

  // Attends to the tiles of a split, in which, from its first on, so many keys are there. Each turn
  // is a tile of its own, of which the second warpgroup's first turn has none, and the other's
  // next.
  __device__ __forceinline__ void Attend(int tiles, int there) {
    made_.Clear();
    Settle();
    if (kGroup == 0) Score(0);
    int tile = -kGroup;
    asm volatile("" : "+r"(tile));  // else the first warpgroup's state ends up in local memory
#pragma unroll 1
    for (;; tile += 2) {
      if (tile >= 0) AddOwn(there - tile * kLatentTile);
      if (tile + 1 == tiles) return;
      Hear();
      ClearBehind(there - (tile + 1) * kLatentTile);
      Settle();
      Add();
      if (tile + 2 == tiles) {
        AwaitProducts<0>();
        made_.Settle();
        Added();
        return;
      }
      Score(1);
      AwaitProducts<1>();
      Added();
    }
  }

  // Whatever products read or add to is made before the first of them begins: else each would wait
  // for the one before.
  __device__ __forceinline__ void Settle() {
    Hold(scores_);
    Hold(weights_);
    made_.Settle();
    FenceProducts();
  }

  // Begins to score the tile that is so many ahead in the ring.
  __device__ __forceinline__ void Score(int ahead) {
    const int s = turn_.s ^ ahead, phase = turn_.phase ^ (turn_.s & ahead);
#pragma unroll
    for (int part = 0; part < kLatentParts; ++part) Await(&shared_.full[s][part], phase);
    uint64_t q = Descriptor(shared_.query), k = Descriptor(shared_.ring[s]);
#pragma unroll
    for (int box = 0; box < kLatentBoxes; ++box) {
      // Else what is known of all boxes at once takes the registers.
      asm volatile("" : "+l"(q), "+l"(k));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        Wgmma<kLatentTile>::Multiply(scores_, q + i * 2, k + i * 2, (box | i) != 0);
      }
      q += kLatentBoxBytes >> 4;
      k += kLatentBoxBytes >> 4;
    }
    CommitProducts();
  }

  // Begins to add a tile's values.
  __device__ __forceinline__ void Add() {
    made_.Add(weights_, Values(turn_.s));
    CommitProducts();
  }
  __device__ __forceinline__ void Added() {
    ArriveWarp(&shared_.empty[turn_.s][kGroup]);
    turn_.Advance();
  }

  // Makes and tells weights of the tile that was scored, of which so many keys are there, and adds
  // its values.
  __device__ __forceinline__ void AddOwn(int there) {
    AwaitProducts<0>();
    Hold(scores_);
    made_.Settle();
    Hide(there);
    const float low = Soften(rows_[0], scores_, 0, scale_log2_);
    const float high = Soften(rows_[1], scores_, 1, scale_log2_);
#pragma unroll
    for (int i = 0; i < 16; ++i) weights_[i] = PackedPair(scores_[i * 2], scores_[i * 2 + 1]);
    Tell();
    made_.Scale(low, high);
    ClearBehind(there);
    Settle();
    Add();
    AwaitProducts<0>();
    made_.Settle();
    Added();
  }

  // Hides what is no key.
  __device__ __forceinline__ void Hide(int there) {
    if (there >= kLatentTile) return;
    const int quad = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      if (i / 4 * 8 + quad * 2 + i % 2 >= there) scores_[i] = -INFINITY;
    }
  }

  // Makes zeros of the warpgroup's values from a key on, where a context has ended: what lies there
  // may be anything, and a weight of zero does not make zero of it.
  __device__ __forceinline__ void ClearBehind(int there) const {
    if (there >= kLatentTile) return;
    for (int key = there + threadIdx.x % 128 / 32; key < kLatentTile; key += 4) {
      uint8_t* at = Values(turn_.s) + threadIdx.x % 32 / 8 * kLatentBoxBytes + key * 128;
      reinterpret_cast<uint4*>(at)[threadIdx.x % 8] = uint4{};
    }
    PublishShared();
    Sync();
  }

  // Tells the other warpgroup the weights and the softmax so far; all products that read where the
  // weights lie are over.
  __device__ __forceinline__ void Tell() {
    Sync();
    uint4* to = Weights(turn_.s);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      to[i * 128] = make_uint4(weights_[i * 4], weights_[i * 4 + 1], weights_[i * 4 + 2],
                               weights_[i * 4 + 3]);
    }
    shared_.rows[kGroup][threadIdx.x % 128] =
        make_float4(rows_[0].top, rows_[1].top, rows_[0].sum, rows_[1].sum);
    PublishShared();
    ArriveWarp(&shared_.told[kGroup]);
  }

  // Hears of the other's tile, and scales what was made before.
  __device__ __forceinline__ void Hear() {
    Await(&shared_.told[1 - kGroup], told_phase_);
    told_phase_ ^= 1;
    Await(&shared_.full[turn_.s][kGroup], turn_.phase);
    const uint4* from = Weights(turn_.s);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 four = from[i * 128];
      weights_[i * 4] = four.x;
      weights_[i * 4 + 1] = four.y;
      weights_[i * 4 + 2] = four.z;
      weights_[i * 4 + 3] = four.w;
    }
    const float4 told = shared_.rows[1 - kGroup][threadIdx.x % 128];
    ArriveWarp(&shared_.empty[turn_.s][2]);
    const float low = Exp2(__fsub_rn(rows_[0].top, BaseOf(told.x)));
    const float high = Exp2(__fsub_rn(rows_[1].top, BaseOf(told.y)));
    rows_[0] = {told.x, told.z};
    rows_[1] = {told.y, told.w};
    made_.Scale(low, high);
  }

  // Merges a split with those before it, or leaves it for others.
  __device__ __forceinline__ void End(const LatentRun& run, int split, SoftmaxRow (&all)[2],
                                      __nv_bfloat16* out, int heads) {
    // Made anew: what only a split's end needs would cost registers meanwhile.
    int thread = threadIdx.x, list = run.list;
    asm volatile("" : "+r"(thread), "+r"(list));
    const bool is_last = split + 1 == run.last;
    if (split == run.first || run.first > 0) {
      all[0] = rows_[0];
      all[1] = rows_[1];
    } else {
      const Merge low(all[0], rows_[0]), high(all[1], rows_[1]);
      const float before[2] = {low.before, high.before}, next[2] = {low.next, high.next};
      made_.Join(LatentLeft::Of(left_.totals, blockIdx.x, thread), before, next, [] { Sync(); });
    }
    if (is_last && run.IsWhole()) {
      const int tile = list % keys_.head_tiles, token = list / keys_.head_tiles;
      const int64_t head = static_cast<int64_t>(token) * heads + tile * kLatentHeads;
      const float share[2] = {ShareOf(all[0].sum), ShareOf(all[1].sum)};
      made_.Store(out + head * kLatentValue + kGroup * (kLatentValue / 2),
                  heads - tile * kLatentHeads, share, thread);
      return;
    }
    const bool is_left = run.first > 0 || is_last;
    float4* base = is_left ? left_.made : left_.totals;
    const int place = is_left ? run.PlaceOf(split) : static_cast<int>(blockIdx.x);
    made_.Leave(LatentLeft::Of(base, place, thread));
    if (kGroup == 0 && is_left) {
      left_.rows[static_cast<size_t>(place) * 128 + thread] =
          make_float4(all[0].top, all[1].top, all[0].sum, all[1].sum);
    }
  }

  LatentShared& shared_;
  const LatentKeys& keys_;
  const LatentLeft& left_;
  const float scale_log2_;
  int query_phase_ = 0, told_phase_ = 0;
  LatentTurn turn_;
  SoftmaxRow rows_[2];
  float scores_[32];
  uint32_t weights_[16];
  LatentMade made_;
};

// Makes barriers, by one thread: all but those that bytes complete are arrived at by warps.
__device__ __forceinline__ void InitLatent(LatentShared& shared) {
#pragma unroll 1
  for (int s = 0; s < kLatentStages; ++s) {
#pragma unroll 1
    for (int part = 0; part < kLatentParts; ++part) {
      InitBarrier(&shared.full[s][part], 1);
      InitBarrier(&shared.empty[s][part], 4);
    }
  }
  InitBarrier(&shared.query_full, 1);
  InitBarrier(&shared.query_empty, 8);
  InitBarrier(&shared.told[0], 4);
  InitBarrier(&shared.told[1], 4);
  PublishBarriers();
}

// A template, so that only who launches it has it compiled.
template <class Output>
__global__ __launch_bounds__(kLatentBlockThreads, 1) void LatentAttentionKernel(
    const __grid_constant__ CUtensorMap query, const __grid_constant__ CUtensorMap pool,
    const LatentKeys keys, const LatentLeft left, Output* out, int heads, float scale_log2) {
#if BATON_HAS_WGMMA
  extern __shared__ __align__(1024) uint8_t bytes[];
  LatentShared& shared = *reinterpret_cast<LatentShared*>(bytes);
  if (threadIdx.x == 256) {
    PrefetchMap(&query);
    PrefetchMap(&pool);
  }
  if (threadIdx.x == 32) InitLatent(shared);
  if (heads < kLatentHeads) {  // rows that nobody loads
    for (int i = threadIdx.x; i < kLatentStageBytes / 16; i += kLatentBlockThreads) {
      reinterpret_cast<uint4*>(shared.query)[i] = uint4{};
    }
    PublishShared();
  }
  WaitForEarlierGrids();
  LetNextGridStart();
  if (threadIdx.x < 32) shared.runs.Read(keys, left.places);
  __syncthreads();
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kManyRegisters));
    LatentConsumer<0>(shared, keys, left, scale_log2).Compute(out, heads);
  } else if (threadIdx.x < 256) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kManyRegisters));
    LatentConsumer<1>(shared, keys, left, scale_log2).Compute(out, heads);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kFewRegisters));
    if (threadIdx.x < 288) LatentProducer(shared, keys, heads).Run(&query, &pool);
  }
#endif
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_LATENT_WGMMA_CUH_
