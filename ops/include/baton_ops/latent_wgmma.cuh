// Causal attention over rows that all heads of a token share, of DeepSeek-V3's sizes, for Hopper, in
// the order of latent_order.cuh.
//
// A block keeps one token's queries of 64 heads in shared memory and reads tiles of rows through a
// ring of two, which serve as keys and as values. One warpgroup scores a tile and makes weights of
// the scores; both add the tile's values by these, 256 of the 512 each, while the first already
// scores the next tile. A list's splits are merged in order through a place in memory of the
// block's own, which stays in the L2 cache. Where lists are cut, other parts than a list's first are
// left split by split, and a second kernel merges them.
#ifndef BATON_OPS_LATENT_WGMMA_CUH_
#define BATON_OPS_LATENT_WGMMA_CUH_

#include "baton_ops/latent_consumer.cuh"

namespace baton_ops::cuda {

constexpr int kLatentBlockThreads = 3 * 128;
// A block begins with 168 a thread, and has no others.
constexpr int kScorerRegisters = 240, kAdderRegisters = 208, kProducerRegisters = 56;
static_assert(kScorerRegisters + kAdderRegisters + kProducerRegisters <= 3 * 168);

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

// The first warpgroup: scores, weights of them, and half of the values.
class LatentScorer {
 public:
  __device__ LatentScorer(LatentShared& shared, const LatentKeys& keys, const LatentLeft& left,
                          float scale_log2)
      : me_(shared, keys, left), scale_log2_(scale_log2) {}

  __device__ __forceinline__ void Compute(__nv_bfloat16* out, int heads) {
    me_.shared.runs.ForEachRun(me_.keys, [&](const LatentRun& run) {
      if (run.first == 0 && threadIdx.x == 0 && run.splits > 1) {
        const int merged = run.IsWhole() ? 0 : run.last;
        if (me_.keys.tokens <= kMostCutTokens) {
          me_.left.records[run.list] = make_int2(run.item, merged);
        }
      }
      SoftmaxRow all[2];
      Await(&me_.shared.query_full, query_phase_);
      query_phase_ ^= 1;
#pragma unroll 1
      for (int split = run.first; split < run.last; ++split) {
        SoftmaxRow rows[2];
        Attend(run, split, rows);
        if (split + 1 == run.last) ArriveWarp(&me_.shared.query_empty);
        End(run, split, all, rows, out, heads);
      }
    });
  }

 private:
  // Whatever products read or add to is made before the first of them begins: else each would wait
  // for the one before.
  __device__ __forceinline__ void Settle() {
    Hold(scores_);
    Hold(weights_);
    made_.Settle();
    FenceProducts();
  }

  // Begins to score the ring's next tile.
  __device__ __forceinline__ void Score() {
    LatentShared& shared = me_.shared;
#pragma unroll
    for (int part = 0; part < kLatentParts; ++part) {
      Await(&shared.full[score_.s][part], score_.phase);
    }
    uint64_t q = Descriptor(shared.query), k = Descriptor(shared.ring[score_.s]);
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

  // Begins to add the values of the tile that was scored.
  __device__ __forceinline__ void Add() {
    made_.Add(weights_, me_.Values(add_.s));
    CommitProducts();
  }
  __device__ __forceinline__ void Added() {
    ArriveWarp(&me_.shared.empty[add_.s][0]);
    add_.Advance();
  }

  __device__ __forceinline__ void Attend(const LatentRun& run, int split, SoftmaxRow (&rows)[2]) {
    const int last = run.Tiles(split) - 1;
    made_.Clear();
    Settle();
    Score();
#pragma unroll 1
    for (int tile = 0; tile < last; ++tile) {
      Scored();
      Weigh(rows);
      Settle();
      Add();
      Score();
      AwaitProducts<1>();
      Added();
    }
    Scored();
    const int there = run.keys - (split * kLatentSplitTiles + last) * kLatentTile;
    Hide(there);
    Weigh(rows);
    me_.ClearBehind(add_.s, there);
    Settle();
    Add();
    AwaitProducts<0>();
    made_.Settle();
    Added();
  }

  // Waits for the scores, and all products before them.
  __device__ __forceinline__ void Scored() {
    AwaitProducts<0>();
    Hold(scores_);
    made_.Settle();
    ArriveWarp(&me_.shared.empty[score_.s][2]);
    score_.Advance();
  }

  // Hides what is no key.
  __device__ __forceinline__ void Hide(int there) {
    if (there >= kLatentTile) return;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      if (i / 4 * 8 + me_.quad * 2 + i % 2 >= there) scores_[i] = -INFINITY;
    }
  }

  // Makes weights of a tile's scores, and tells them.
  __device__ __forceinline__ void Weigh(SoftmaxRow (&rows)[2]) {
    const float low = Soften(rows[0], scores_, 0, scale_log2_);
    const float high = Soften(rows[1], scores_, 1, scale_log2_);
#pragma unroll
    for (int i = 0; i < 16; ++i) weights_[i] = Packed(scores_[i * 2], scores_[i * 2 + 1]);
    Tell(0, low, high, [&] {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        me_.shared.weights[i][threadIdx.x] = make_uint4(weights_[i * 4], weights_[i * 4 + 1],
                                                        weights_[i * 4 + 2], weights_[i * 4 + 3]);
      }
    });
    made_.Scale(low, high);
  }

  // Tells the other warpgroup a factor of both rows, and what `more` writes.
  template <class More>
  __device__ __forceinline__ void Tell(int which, float low, float high, More more) {
    LatentShared& shared = me_.shared;
    Await(&shared.heard, heard_phase_ ^ 1);
    heard_phase_ ^= 1;
    if (me_.quad == 0) {
      shared.factors[which][me_.row] = low;
      shared.factors[which][me_.row + 8] = high;
    }
    more();
    ArriveWarp(&shared.told);
  }

  __device__ __forceinline__ void End(const LatentRun& run, int split, SoftmaxRow (&all)[2],
                                      const SoftmaxRow (&rows)[2], __nv_bfloat16* out, int heads) {
    float before[2] = {0.f, 0.f}, next[2] = {1.f, 1.f}, share[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (split == run.first || run.first > 0) {
        all[h] = rows[h];
      } else {
        const Merge merged(all[h], rows[h]);
        before[h] = merged.before;
        next[h] = merged.next;
      }
      share[h] = ShareOf(all[h].sum);
    }
    Tell(0, before[0], before[1], [&] {
      if (me_.quad != 0) return;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        me_.shared.factors[1][me_.row + h * 8] = next[h];
        me_.shared.factors[2][me_.row + h * 8] = share[h];
      }
    });
    const bool is_left = run.first > 0 || (split + 1 == run.last && !run.IsWhole());
    if (is_left) {
      me_.left.rows[static_cast<size_t>(run.PlaceOf(split)) * 128 + threadIdx.x] =
          make_float4(all[0].top, all[1].top, all[0].sum, all[1].sum);
    }
    me_.EndSplit(run, split, made_, before, next, share, out, heads);
  }

  const LatentMember<0> me_;
  const float scale_log2_;
  int query_phase_ = 0, heard_phase_ = 0;
  LatentTurn score_, add_;
  float scores_[32];
  uint32_t weights_[16];
  LatentMade made_;
};

// The second warpgroup: the other half of the values.
class LatentAdder {
 public:
  __device__ LatentAdder(LatentShared& shared, const LatentKeys& keys, const LatentLeft& left)
      : me_(shared, keys, left) {}

  __device__ __forceinline__ void Compute(__nv_bfloat16* out, int heads) {
    me_.shared.runs.ForEachRun(me_.keys, [&](const LatentRun& run) {
#pragma unroll 1
      for (int split = run.first; split < run.last; ++split) {
        made_.Clear();
        const int tiles = run.Tiles(split);
#pragma unroll 1
        for (int tile = 0; tile < tiles; ++tile) {
          Add(run.keys - (split * kLatentSplitTiles + tile) * kLatentTile);
        }
        float factors[3][2];
        Hear([&] {
#pragma unroll
          for (int i = 0; i < 3; ++i) Factors(i, factors[i]);
        });
        me_.EndSplit(run, split, made_, factors[0], factors[1], factors[2], out, heads);
      }
    });
  }

 private:
  template <class Read>
  __device__ __forceinline__ void Hear(Read read) {
    Await(&me_.shared.told, told_phase_);
    told_phase_ ^= 1;
    read();
    ArriveWarp(&me_.shared.heard);
  }
  __device__ __forceinline__ void Factors(int which, float (&of)[2]) const {
    of[0] = me_.shared.factors[which][me_.row];
    of[1] = me_.shared.factors[which][me_.row + 8];
  }

  __device__ __forceinline__ void Add(int there) {
    float alpha[2];
    uint32_t weights[16];
    Hear([&] {
      Factors(0, alpha);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint4 four = me_.shared.weights[i][threadIdx.x - 128];
        weights[i * 4] = four.x;
        weights[i * 4 + 1] = four.y;
        weights[i * 4 + 2] = four.z;
        weights[i * 4 + 3] = four.w;
      }
    });
    made_.Scale(alpha[0], alpha[1]);
    Await(&me_.shared.full[turn_.s][1], turn_.phase);
    me_.ClearBehind(turn_.s, there);
    Hold(weights);
    made_.Settle();
    FenceProducts();
    made_.Add(weights, me_.Values(turn_.s));
    CommitProducts();
    AwaitProducts<0>();
    Hold(weights);
    made_.Settle();
    ArriveWarp(&me_.shared.empty[turn_.s][1]);
    turn_.Advance();
  }

  const LatentMember<1> me_;
  int told_phase_ = 0;
  LatentTurn turn_;
  LatentMade made_;
};

// Makes barriers, by one thread: all but those that bytes complete are arrived at by four warps.
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
  InitBarrier(&shared.query_empty, 4);
  InitBarrier(&shared.told, 4);
  InitBarrier(&shared.heard, 4);
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
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kScorerRegisters));
    LatentScorer(shared, keys, left, scale_log2).Compute(out, heads);
  } else if (threadIdx.x < 256) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kAdderRegisters));
    LatentAdder(shared, keys, left).Compute(out, heads);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kProducerRegisters));
    if (threadIdx.x < 288) LatentProducer(shared, keys, heads).Run(&query, &pool);
  }
#endif
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_LATENT_WGMMA_CUH_
