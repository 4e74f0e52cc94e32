// out[m, n] = x[m, k] weight[n, k]^T for many rows, in the order of matmul_tile.cuh.
//
// A block has one warpgroup that loads and two or three that multiply, 64 rows of a tile each; it
// stays and takes one tile after the other. The rows of a tile are x's. Where the tile is turned
// they are the weight's, and x's are its columns: so 160 or 192 rows of x are one tile, for which
// the weight is read once. The weight does not depend on the kernel before, so a launch that
// overlaps that one fills its ring with it first.
#ifndef BATON_OPS_MATMUL_MANY_CUH_
#define BATON_OPS_MATMUL_MANY_CUH_

#include "baton_ops/gated_tile.cuh"
#include "baton_ops/matmul_turned.cuh"

namespace baton_ops::cuda {

constexpr int kGroupThreads = 128, kGroupRows = 64, kManySharedBytes = 227 * 1024;
// Rows of x whose tiles are all computed before the next ones': so many stay in the L2 cache.
constexpr int kBandRows = 2048;

// How many warpgroups multiply, the columns of their tile, whether it is turned, and whether it is
// gated: then it has half as many columns of the output as rows of the weight.
template <int kGroupsOf, int kColumnsOf, bool kTurnedOf, bool kGatedOf>
struct ManyWay {
  static constexpr int kGroups = kGroupsOf, kColumns = kColumnsOf, kRows = kGroups * kGroupRows;
  static constexpr bool kTurned = kTurnedOf, kGated = kGatedOf;
  static constexpr int kThreads = (kGroups + 1) * kGroupThreads;
  // Of the warpgroup that loads, and of one that multiplies.
  static constexpr int kFewRegisters = kGroups == 2 ? 40 : 32;
  static constexpr int kManyRegisters = kGroups == 2 ? 232 : 160;
  static constexpr int kTileX = kTurned ? kColumns : kRows,
                       kTileWeight = kTurned ? kRows : kColumns;
  static constexpr int kOutN = kGated ? kTileWeight / 2 : kTileWeight;
  static constexpr int kBytesX = kTileX * kBoxColumns * 2;
  static constexpr int kBytesWeight = kTileWeight * kBoxColumns * 2;
  static constexpr int kStageBytes = kBytesX + kBytesWeight + 2 * sizeof(uint64_t);
  static constexpr int kFit = kManySharedBytes / kStageBytes, kStages = kFit < 11 ? kFit : 11;
  static constexpr int kSharedBytes = kStages * kStageBytes;
  // Gates and ups are a box each, or where the tile is turned one, in which they take turns.
  static constexpr int kBoxesWeight = kGated && !kTurned ? 2 : 1;
  static constexpr int kBoxWeight = kTileWeight / kBoxesWeight;
};

struct ManyPlace {
  int row, column;
};

// Which tile a block takes as its t-th: neighbours in time share rows or columns of tiles. Tiles
// are of equal height, so that those of the same columns go in step and their weight is read once:
// of each only the rows that exist are loaded, what lies behind them makes rows that nobody stores.
template <class Way>
struct ManyTiles {
  static constexpr int kBand = kBandRows / Way::kTileX;
  int rows, height, columns;
  __host__ __device__ ManyTiles(int m, int n)
      : rows((m + Way::kTileX - 1) / Way::kTileX),
        height(((m + rows - 1) / rows + 7) / 8 * 8),
        columns((n + Way::kOutN - 1) / Way::kOutN) {}
  __host__ __device__ int Count() const { return rows * columns; }
  __device__ ManyPlace Place(int t) const {
    const int first = t / (kBand * columns) * kBand, band = min(kBand, rows - first);
    const int at = t - first * columns, column = at / band, row = first + at - column * band;
    return {row * height, column * Way::kOutN};
  }
};

struct ManyRing {
  uint8_t *x, *weight;
  uint64_t *full, *empty;
};

// Where in its tiles, and in the ring, a block's producer is.
template <class Way>
struct ManyTurn {
  const ManyTiles<Way>& tiles;
  int steps, k = 0, tile = blockIdx.x;
  ManyPlace place = tiles.Place(tile);
  RingStage<Way::kStages> stage{};
  __device__ bool IsOver() const { return tile >= tiles.Count(); }
  __device__ void Advance() {
    stage.Advance();
    if (++k < steps) return;
    k = 0;
    tile += gridDim.x;
    if (!IsOver()) place = tiles.Place(tile);
  }
};

template <class Way>
__device__ void ManyProduce(const ManyRing& ring, const CUtensorMap* map_x,
                            const CUtensorMap* map_weight, const ManyTiles<Way>& tiles, int steps,
                            int n) {
  const bool is_read_once = tiles.rows == 1;
  const auto load_weight = [&](const ManyTurn<Way>& t) {
    uint64_t* full = ring.full + t.stage.s;
    uint8_t* to = ring.weight + t.stage.s * Way::kBytesWeight;
    const int column = t.k * kBoxColumns, row = t.place.column;
    ExpectBytes(full, tiles.height * kBoxColumns * 2 + Way::kBytesWeight);
    if constexpr (Way::kGated && Way::kTurned) {
      LoadPairs(to, map_weight, column, row / kPairRows, full);
    } else {
#pragma unroll
      for (int i = 0; i < Way::kBoxesWeight; ++i, to += Way::kBytesWeight / 2) {
        if (is_read_once) {
          LoadBoxOnce(to, map_weight, column, row + i * n, full);
        } else {
          LoadBox(to, map_weight, column, row + i * n, full);
        }
      }
    }
  };
  const auto load_x = [&](const ManyTurn<Way>& t) {
    LoadBox(ring.x + t.stage.s * Way::kBytesX, map_x, t.k * kBoxColumns, t.place.row,
            ring.full + t.stage.s);
  };
  ManyTurn<Way> turn{tiles, steps}, behind{tiles, steps};
  int ahead = 0;
  for (; ahead < Way::kStages && !turn.IsOver(); ++ahead, turn.Advance()) load_weight(turn);
  WaitForEarlierGrids();
  for (int i = 0; i < ahead; ++i, behind.Advance()) load_x(behind);
  for (; !turn.IsOver(); turn.Advance()) {
    Await(ring.empty + turn.stage.s, turn.stage.phase ^ 1);
    load_weight(turn);
    load_x(turn);
  }
}

// A gated tile costs as much arithmetic as some steps' products take: it is kept, rounded, and
// finished in parts behind the first products of the next tile, while these are under way.
template <class Way>
struct ManyKept {
  static constexpr int kParts = 2 * kBoxesAStep;
  GatedTile<Way::kColumns> tile;
  int row = 0, column = 0;
  MatmulOutput out;  // as far as the tile's rows go; none at first
  __device__ explicit ManyKept(const MatmulOutput& out) : out(out) { this->out.m = 0; }

  template <int kPart>
  __device__ __forceinline__ void FinishIf(int part, int q) const {
    if (part == kPart) tile.template Store<kPart, kParts>(out, row, column, q);
  }
  // Behind step k: a part, or two where there are no more than kBoxesAStep steps.
  __device__ __forceinline__ void FinishBehind(int k, int steps, int q) const {
    const int each = steps < kParts ? 2 : 1;
    for (int part = k * each; part < min(k * each + each, kParts); ++part) {
      FinishIf<0>(part, q);
      FinishIf<1>(part, q);
      FinishIf<2>(part, q);
      FinishIf<3>(part, q);
      FinishIf<4>(part, q);
      FinishIf<5>(part, q);
      FinishIf<6>(part, q);
      FinishIf<7>(part, q);
    }
  }
};

template <class Way>
__device__ void ManyConsume(const ManyRing& ring, const ManyTiles<Way>& tiles, int steps,
                            const MatmulOutput& out) {
  constexpr bool kKeeps = Way::kGated && !Way::kTurned;
  constexpr int kBytesRows = Way::kTurned ? Way::kBytesWeight : Way::kBytesX;
  constexpr int kBytesColumns = Way::kTurned ? Way::kBytesX : Way::kBytesWeight;
  const int group = threadIdx.x / kGroupThreads - 1, thread = threadIdx.x % kGroupThreads;
  const int lane = thread % 32, warp_row = group * kGroupRows + thread / 32 * 16;
  const uint8_t* of_rows =
      (Way::kTurned ? ring.weight : ring.x) + group * (kGroupRows * kBoxColumns * 2);
  const uint8_t* of_columns = Way::kTurned ? ring.x : ring.weight;
  const auto release = [&](int s) {
    if (thread == 0) Arrive(ring.empty + s);
  };
  ManyKept<Way> kept(out);
  RingStage<Way::kStages> stage;
  for (int t = blockIdx.x; t < tiles.Count(); t += gridDim.x) {
    float sums[Way::kColumns / 2];
    int last = 0;
    for (int k = 0; k < steps; ++k) {
      Await(ring.full + stage.s, stage.phase);
      const uint64_t rows = Descriptor(of_rows + stage.s * kBytesRows);
      const uint64_t columns = Descriptor(of_columns + stage.s * kBytesColumns);
      Hold(sums);
      FenceProducts();
#pragma unroll
      for (int i = 0; i < kBoxColumns / 16; ++i) {
        Wgmma<Way::kColumns>::Multiply(sums, rows + i * 2, columns + i * 2, (k | i) != 0);
      }
      CommitProducts();
      if constexpr (kKeeps) {
        if (k < kept.kParts) kept.FinishBehind(k, steps, lane % 4);
      }
      // One product stays under way; what the one before read may be overwritten.
      AwaitProducts<1>();
      if (k > 0) release(last);
      last = stage.s;
      stage.Advance();
    }
    AwaitProducts<0>();
    Hold(sums);
    release(last);
    const ManyPlace place = tiles.Place(t);
    MatmulOutput part = out;
    part.m = min(out.m, place.row + tiles.height);
    if constexpr (kKeeps) {
      kept.tile.Keep(sums);
      kept.out.m = part.m;
      kept.row = place.row + warp_row + lane / 4;
      kept.column = place.column;
    } else if constexpr (Way::kGated) {
      StoreTurnedGated<Way::kColumns>(sums, part, place.row, place.column + warp_row / 2, lane);
    } else if constexpr (Way::kTurned) {
      StoreTurnedTile<Way::kColumns>(sums, part, place.row, place.column + warp_row, lane);
    } else {
      StoreTile<Way::kColumns>(sums, part, place.row + warp_row + lane / 4, place.column, lane % 4);
    }
  }
  if constexpr (kKeeps) kept.tile.template Store<0, 1>(kept.out, kept.row, kept.column, lane % 4);
}

template <class Way>
__global__ __launch_bounds__(Way::kThreads, 1) void MatmulManyKernel(
    const __grid_constant__ CUtensorMap map_x, const __grid_constant__ CUtensorMap map_weight,
    const MatmulOutput out, int k) {
#if BATON_HAS_WGMMA
  extern __shared__ __align__(1024) uint8_t shared[];
  uint8_t* weight = shared + Way::kStages * Way::kBytesX;
  auto* full = reinterpret_cast<uint64_t*>(weight + Way::kStages * Way::kBytesWeight);
  const ManyRing ring{shared, weight, full, full + Way::kStages};
  if (threadIdx.x == 0) {
    PrefetchMap(&map_x);
    PrefetchMap(&map_weight);
    for (int s = 0; s < Way::kStages; ++s) {
      InitBarrier(ring.full + s, 1);
      InitBarrier(ring.empty + s, Way::kGroups);
    }
    PublishBarriers();
  }
  LetNextGridStart();
  __syncthreads();
  const ManyTiles<Way> tiles(out.m, out.n);
  if (threadIdx.x < kGroupThreads) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Way::kFewRegisters));
    if (threadIdx.x == 0) ManyProduce(ring, &map_x, &map_weight, tiles, BoxesAlong(k), out.n);
    __syncwarp();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Way::kManyRegisters));
    ManyConsume(ring, tiles, BoxesAlong(k), out);
  }
#endif
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_MATMUL_MANY_CUH_
