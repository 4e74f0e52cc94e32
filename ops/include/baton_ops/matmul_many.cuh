// out[m, n] = x[m, k] weight[n, k]^T for many rows, in the order of matmul_tile.cuh.
//
// A block has one warpgroup that loads and two that multiply, 64 rows each; it stays and takes one
// tile after the other. Two blocks of a cluster may share a tile of x or of the weight, of which
// each loads half for both. The weight does not depend on the kernel before, so a launch that
// overlaps that one fills its ring with it first.
#ifndef BATON_OPS_MATMUL_MANY_CUH_
#define BATON_OPS_MATMUL_MANY_CUH_

#include "baton_ops/matmul_tile.cuh"

namespace baton_ops::cuda {

constexpr int kManyTileM = 128, kManyThreads = 384, kGroupThreads = 128, kGroupRows = 64;

// A width of tile, how many blocks share, and what they share.
template <int kTileNOf, int kClusterOf, bool kSharesXOf>
struct ManyWay {
  static constexpr int kTileN = kTileNOf, kCluster = kClusterOf;
  static constexpr bool kSharesX = kSharesXOf;
  static constexpr int kBytesX = kManyTileM * kBoxColumns * 2;
  static constexpr int kBytesWeight = kTileN * kBoxColumns * 2;
  static constexpr int kStageBytes = kBytesX + kBytesWeight + 2 * sizeof(uint64_t);
  static constexpr int kStages = 227 * 1024 / kStageBytes < 11 ? 227 * 1024 / kStageBytes : 11;
  static constexpr int kSharedBytes = kStages * kStageBytes;
  // Rows of a box: a part each of what is shared.
  static constexpr int kRowsX = kSharesX ? kManyTileM / kCluster : kManyTileM;
  static constexpr int kRowsWeight = kSharesX ? kTileN : kTileN / kCluster;
};

// Which tile a block takes as its t-th: neighbours in time share a row or column of tiles.
template <class Way>
struct ManyTiles {
  int rows, columns;
  __host__ __device__ ManyTiles(int m, int n) {
    rows = (m + kManyTileM - 1) / kManyTileM;
    columns = (n + Way::kTileN - 1) / Way::kTileN;
    if constexpr (Way::kCluster > 1) {
      int& shared = Way::kSharesX ? columns : rows;
      shared = (shared + Way::kCluster - 1) / Way::kCluster;
    }
  }
  __host__ __device__ int Count() const { return rows * columns; }
  __device__ int Row(int t, int rank) const {
    return Way::kSharesX ? t % rows : t % rows * Way::kCluster + rank;
  }
  __device__ int Column(int t, int rank) const {
    return Way::kSharesX ? t / rows * Way::kCluster + rank : t / rows;
  }
};

struct ManyRing {
  uint8_t *x, *weight;
  uint64_t *full, *empty;
};

// Loads a box of a matrix; with kBlocks > 1 into the same place of each block of the cluster.
template <int kBlocks>
__device__ __forceinline__ void LoadFor(void* to, const CUtensorMap* map, int k, int row,
                                        uint64_t* barrier) {
  if constexpr (kBlocks == 1) {
    LoadBox(to, map, k, row, barrier);
  } else {
    LoadBoxFor(kBlocks, to, map, k, row, barrier);
  }
}

// Where in its tiles, and in the ring, a block's producer is.
template <class Way>
struct ManyTurn {
  int tile = blockIdx.x / Way::kCluster, k = 0, turn = 0;
  __device__ void Advance(int steps) {
    ++turn;
    if (++k < steps) return;
    k = 0;
    tile += gridDim.x / Way::kCluster;
  }
  __device__ int Stage() const { return turn % Way::kStages; }
};

template <class Way>
__device__ void ManyProduce(const ManyRing& ring, const CUtensorMap* map_x,
                            const CUtensorMap* map_weight, const ManyTiles<Way>& tiles, int rank,
                            int steps) {
  constexpr int kPartsX = Way::kSharesX ? Way::kCluster : 1;
  constexpr int kPartsWeight = Way::kSharesX ? 1 : Way::kCluster;
  const auto load_weight = [&](const ManyTurn<Way>& t) {
    const int s = t.Stage(), part = kPartsWeight > 1 ? rank : 0;
    ExpectBytes(ring.full + s, Way::kBytesX + Way::kBytesWeight);
    LoadFor<kPartsWeight>(
        ring.weight + s * Way::kBytesWeight + part * (Way::kBytesWeight / kPartsWeight), map_weight,
        t.k * kBoxColumns, tiles.Column(t.tile, rank) * Way::kTileN + part * Way::kRowsWeight,
        ring.full + s);
  };
  const auto load_x = [&](const ManyTurn<Way>& t) {
    const int s = t.Stage(), part = kPartsX > 1 ? rank : 0;
    LoadFor<kPartsX>(ring.x + s * Way::kBytesX + part * (Way::kBytesX / kPartsX), map_x,
                     t.k * kBoxColumns, tiles.Row(t.tile, rank) * kManyTileM + part * Way::kRowsX,
                     ring.full + s);
  };
  ManyTurn<Way> turn, behind;
  const int last = tiles.Count();
  for (; turn.turn < Way::kStages && turn.tile < last; turn.Advance(steps)) load_weight(turn);
  WaitForEarlierGrids();
  for (; behind.turn < turn.turn; behind.Advance(steps)) load_x(behind);
  for (; turn.tile < last; turn.Advance(steps)) {
    Await(ring.empty + turn.Stage(), turn.turn / Way::kStages & 1 ^ 1);
    load_weight(turn);
    load_x(turn);
  }
}

template <class Way>
__device__ __forceinline__ void ManyRelease(const ManyRing& ring, int turn, int thread) {
  if (thread < Way::kCluster) ArriveAt(ring.empty + turn % Way::kStages, thread);
}

template <class Way>
__device__ void ManyConsume(const ManyRing& ring, const ManyTiles<Way>& tiles, int rank, int steps,
                            const MatmulOutput& out) {
  const int group = threadIdx.x / kGroupThreads - 1, thread = threadIdx.x % kGroupThreads;
  const int lane = thread % 32;
  int turn = 0;
  for (int t = blockIdx.x / Way::kCluster; t < tiles.Count(); t += gridDim.x / Way::kCluster) {
    float sums[Way::kTileN / 2];
    for (int k = 0; k < steps; ++k, ++turn) {
      const int s = turn % Way::kStages;
      Await(ring.full + s, turn / Way::kStages & 1);
      const uint64_t x =
          Descriptor(ring.x + s * Way::kBytesX + group * kGroupRows * kBoxColumns * 2);
      const uint64_t weight = Descriptor(ring.weight + s * Way::kBytesWeight);
      Hold(sums);
      FenceProducts();
#pragma unroll
      for (int i = 0; i < kBoxColumns / 16; ++i) {
        Wgmma<Way::kTileN>::Multiply(sums, x + i * 2, weight + i * 2, (k | i) != 0);
      }
      CommitProducts();
      // One product stays under way; what the one before read may be overwritten.
      AwaitProducts<1>();
      if (k > 0) ManyRelease<Way>(ring, turn - 1, thread);
    }
    AwaitProducts<0>();
    Hold(sums);
    ManyRelease<Way>(ring, turn - 1, thread);
    const int row =
        tiles.Row(t, rank) * kManyTileM + group * kGroupRows + thread / 32 * 16 + lane / 4;
    StoreTile<Way::kTileN>(sums, out, row, tiles.Column(t, rank) * Way::kTileN, lane % 4);
  }
}

template <class Way>
__global__ __launch_bounds__(kManyThreads, 1) void MatmulManyKernel(
    const __grid_constant__ CUtensorMap map_x, const __grid_constant__ CUtensorMap map_weight,
    const MatmulOutput out, int k) {
#if BATON_HAS_WGMMA
  extern __shared__ __align__(1024) uint8_t shared[];
  uint8_t* weight = shared + Way::kStages * Way::kBytesX;
  auto* full = reinterpret_cast<uint64_t*>(weight + Way::kStages * Way::kBytesWeight);
  const ManyRing ring{shared, weight, full, full + Way::kStages};
  int rank = 0;
  if constexpr (Way::kCluster > 1) asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  if (threadIdx.x == 0) {
    PrefetchMap(&map_x);
    PrefetchMap(&map_weight);
    for (int s = 0; s < Way::kStages; ++s) {
      InitBarrier(ring.full + s, 1);
      InitBarrier(ring.empty + s, 2 * Way::kCluster);
    }
    PublishBarriers();
  }
  LetNextGridStart();
  SyncBlocks<Way::kCluster>();
  const ManyTiles<Way> tiles(out.m, out.n);
  if (threadIdx.x < kGroupThreads) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) ManyProduce(ring, &map_x, &map_weight, tiles, rank, BoxesAlong(k));
    __syncwarp();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    ManyConsume(ring, tiles, rank, BoxesAlong(k), out);
  }
  SyncBlocks<Way::kCluster>();  // who ends first leaves barriers at which the others still arrive
#endif
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_MATMUL_MANY_CUH_
