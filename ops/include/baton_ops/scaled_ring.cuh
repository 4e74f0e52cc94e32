// The tiles of scaled_turned.cuh and its rings in shared memory.
//
// A range of the weight, and one of x, is a stage of rows of 128 bytes, swizzled as wgmma reads it;
// with x's come the scales of its rows and of the weight's. Of a gated tile's rows of the weight
// eight are gates' and the next eight their ups'.
#ifndef BATON_OPS_SCALED_RING_CUH_
#define BATON_OPS_SCALED_RING_CUH_

#include "baton_ops/e4m3.cuh"
#include "baton_ops/matmul_grouped.cuh"

namespace baton_ops::cuda {

constexpr int kScaleWarps = 2;  // that bring scales where rows of x follow each other
constexpr int kTurnedGroup = 128, kTurnedRowBytes = 128, kTurnedHeadBytes = 6 * 1024;
constexpr int kTurnedPart = 8;         // rows of gates, then of ups, of a gated tile
constexpr int kTurnedBandRows = 2048;  // of x, whose tiles are all computed before the next ones'

// Rows of the output, its column, and the expert; behind the last one what is beside experts.
struct TurnedPlace {
  int row, end_row, column, expert;
};

// What scales a stage has: of rows of x, and of the weight's, which may be one, or one of gates and
// one of ups; or of x's times such: where nobody copies them one by one.
enum class ScaleKind { kOfRows, kOfBlocks, kMade };

struct TurnedInput {
  const uint8_t* x;
  const float *x_scales, *weight_scales;
  const int32_t *row, *starts;  // as in ScaledParams
  int experts, in, groups;
  // Beside experts: rows behind their `pairs`, of rows of x behind those or, where they are named,
  // of all that there are; and the scales of a weight of its own, as large as an expert's.
  int beside_rows, pairs;
  const float* beside_scales;
  int scale_shift;  // as in ScaledParams
  __device__ __forceinline__ ScaleKind Kind() const {
    if (scale_shift == 0) return ScaleKind::kOfRows;
    return row == nullptr ? ScaleKind::kMade : ScaleKind::kOfBlocks;
  }
  __device__ __forceinline__ bool HasBeside() const { return beside_rows > 0; }
  __device__ __forceinline__ int Parts() const { return experts + (HasBeside() ? 1 : 0); }
  __device__ __forceinline__ bool IsBeside(const TurnedPlace& place) const {
    return HasBeside() && place.expert == experts;
  }
  // Of rows of a tile; those behind the last are as it is.
  __device__ __forceinline__ int64_t RowOfX(const TurnedPlace& place, int nth) const {
    const int at = min(place.row + nth, place.end_row - 1);
    if (row == nullptr) return at;
    return IsBeside(place) ? at - pairs : row[at];
  }
  __device__ __forceinline__ const float* ScalesOfX(const TurnedPlace& place, int nth) const {
    return x_scales + RowOfX(place, nth) * groups;
  }
  template <bool kGated>
  __device__ __forceinline__ const float* ScalesOfWeight(const TurnedPlace& place, int n,
                                                         int nth) const {
    const int behind = kGated ? nth / 16 * 8 + nth % 8 : nth;
    const int column = min(place.column + behind, n - 1);
    const bool is_beside = IsBeside(place);
    const int expert = is_beside ? 0 : place.expert;
    const int64_t part = kGated ? expert * 2 + nth / 8 % 2 : expert;
    return (is_beside ? beside_scales : weight_scales) +
           ((part * n + column) >> scale_shift) * groups;
  }
};

// How many of the two warpgroups that multiply have rows of the weight of their own - else they
// share them and each has columns of its own -, the columns of each, and whether it is gated.
template <int kWeightGroupsOf, int kColumnsOf, bool kGatedOf>
struct TurnedTile {
  static constexpr bool kHaveRanges = false, kIsTurned = true, kGated = kGatedOf;
  static constexpr int kGroups = 2, kColumns = kColumnsOf;
  static constexpr int kFewRegisters = 72, kManyRegisters = 216;
  static constexpr int kWeightGroups = kWeightGroupsOf, kReaders = kGroups;
  static constexpr int kTileX = kColumns * kGroups / kWeightGroups,
                       kTileWeight = 64 * kWeightGroups;
  static constexpr int kTotalBytes = 0;
};

// Tiles that are not turned, of many rows of x: each of two warpgroups has 64 of them, all of a
// tile's rows of the weight are columns. So a lane has sums of two of x's rows, and where scales of
// the weight are of blocks two scales, or two of gates and two of ups.
template <int kGroupsOf, int kColumnsOf, bool kGatedOf>
struct StraightTile {
  static constexpr bool kHaveRanges = false, kIsTurned = false, kGated = kGatedOf;
  static constexpr int kGroups = kGroupsOf, kColumns = kColumnsOf;
  static constexpr int kFewRegisters = 56, kManyRegisters = 224;
  static constexpr int kReaders = kGroups, kTileX = 64 * kGroups, kTileWeight = kColumns;
  static constexpr int kTotalBytes = 0;
};

// Turned tiles where each of some warpgroups has ranges of its own, of all of a tile: see
// scaled_ranges.cuh.
template <int kGroupsOf, int kColumnsOf, bool kGatedOf>
struct RangesTile {
  static constexpr bool kHaveRanges = true, kIsTurned = true, kGated = kGatedOf;
  static constexpr int kGroups = kGroupsOf, kColumns = kColumnsOf;
  static constexpr int kFewRegisters = 56, kManyRegisters = 104;
  static constexpr int kReaders = 1;
  static constexpr int kTileX = kColumns, kTileWeight = 64;
  static constexpr int kTotalBytes = kTurnedGroup * kColumns / 2 * int{sizeof(float)};
};

// What follows of that. A stage has so many warpgroups that read it.
template <class Tile>
struct TurnedWay : Tile {
  using Tile::kColumns, Tile::kFewRegisters, Tile::kGated, Tile::kGroups, Tile::kHaveRanges,
      Tile::kManyRegisters, Tile::kReaders, Tile::kTileWeight, Tile::kTileX, Tile::kTotalBytes;
  static constexpr int kThreads = (kGroups + 1) * kTurnedGroup;
  static constexpr int kOutN = kGated ? kTileWeight / 2 : kTileWeight;
  static constexpr int kXBytes = kTileX * kScaledRange;
  static constexpr int kWeightBytes = kTileWeight * kScaledRange;
  static constexpr int kScales = kTileX + (kTileX > kTileWeight ? kTileX : kTileWeight);
  static constexpr int kUnderWay = kHaveRanges ? kGroups : 0;  // of who has ranges
  // More ranges of x are in stages where one is over sooner.
  static constexpr int kXStages = kTileX < 64 ? 8 : kTileX == 64 ? 6 : 5;
  static constexpr int kOtherBytes =
      kTurnedHeadBytes + kXStages * (kXBytes + kScales * int{sizeof(float)}) + kTotalBytes;
  static constexpr int kFit = (kFewSharedBytes - kOtherBytes) / kWeightBytes;
  static constexpr int kWeightStages = kFit < 16 ? kFit : 16;
  static constexpr int kSharedBytes = kOtherBytes + kWeightStages * kWeightBytes;
  static_assert(kWeightStages >= kXStages);
  static_assert(kTileX <= kTurnedGroup && kTileWeight <= kTurnedGroup, "a thread has a row");
  // Who waits for a stage must know that what it held before had come, which of all before its last
  // turn it does.
  static_assert(kXStages >= kUnderWay);
  // What a block is launched with is all there is to give.
  static_assert(kTurnedGroup * (kFewRegisters + kGroups * kManyRegisters) <=
                kThreads * (65536 / kThreads / 8 * 8));
};

template <class Way>
struct TurnedRing {
  uint64_t *weight_full, *x_full, *x_empty;
  int *before, *begins;  // of experts: see matmul_grouped.cuh
  uint8_t *weight, *x;
  float *scales, *total;
  __device__ explicit TurnedRing(uint8_t* shared)
      : weight_full(reinterpret_cast<uint64_t*>(shared)),
        x_full(weight_full + Way::kWeightStages),
        x_empty(x_full + Way::kXStages),
        before(reinterpret_cast<int*>(shared + kFewHeadBytes)),
        begins(before + kMostGroups + 1),
        weight(shared + kTurnedHeadBytes),
        x(weight + Way::kWeightStages * Way::kWeightBytes),
        scales(reinterpret_cast<float*>(x + Way::kXStages * Way::kXBytes)),
        total(scales + Way::kXStages * Way::kScales) {}
  // Makes the barriers, by one thread. Where rows of x are named each thread that loads arrives
  // behind its copies, else the warps that bring scales and who asks for the weight do, and one
  // once more; of who multiplies warps do.
  __device__ void Init(bool is_named) const {
    for (int s = 0; s < Way::kWeightStages; ++s) InitBarrier(weight_full + s, 1);
    for (int s = 0; s < Way::kXStages; ++s) {
      InitBarrier(x_full + s, (is_named ? kTurnedGroup : kScaleWarps + 1) + 1);
      InitBarrier(x_empty + s, Way::kReaders * kTurnedGroup / 32);
    }
    PublishBarriers();
  }
  // Gives a stage back, by a warp that has multiplied it.
  __device__ __forceinline__ void Release(int s, int lane) const {
    if (lane == 0) Arrive(x_empty + s);
  }
};

template <int kStages>
using TurnedStage = RingStage<kStages>;

// Tiles of the same columns follow each other, so that their weight is read once; of many rows
// without experts, all tiles of so many rows that they stay in the L2 cache come first.
template <class Way>
struct TurnedShare {
  const int *before, *begins;
  int experts, row_tiles, height, columns, steps, m, n;
  int first, stride;  // of the block's tiles
  __device__ TurnedShare(const TurnedInput& in, const MatmulOutput& out,
                         const TurnedRing<Way>& ring)
      : before(ring.before),
        begins(ring.begins),
        experts(in.starts == nullptr ? 0 : in.Parts()),
        row_tiles(experts > 0 ? before[experts] : (out.m + Way::kTileX - 1) / Way::kTileX),
        height(experts > 0 ? Way::kTileX : ((out.m + row_tiles - 1) / row_tiles + 7) / 8 * 8),
        columns((out.n + Way::kOutN - 1) / Way::kOutN),
        steps((in.in + kScaledRange - 1) / kScaledRange),
        m(out.m),
        n(out.n),
        first(blockIdx.x),
        stride(gridDim.x) {}
  __device__ int Count() const { return row_tiles * columns; }
  __device__ int Mine() const { return TilesOfBlock(Count()); }
  __device__ TurnedPlace Place(int tile) const {
    if (experts == 0) {
      constexpr int kBand = kTurnedBandRows / Way::kTileX;
      const int first = tile / (kBand * columns) * kBand, band = min(kBand, row_tiles - first);
      const int at = tile - first * columns, column = at / band;
      const int row = (first + at - column * band) * height;
      return {row, min(m, row + height), column * Way::kOutN, 0};
    }
    const int column = tile / row_tiles, nth = tile - column * row_tiles;
    int expert = 0, end = experts;  // before[expert] <= nth < before[end]
#pragma unroll 1
    while (end - expert > 1) {
      const int middle = (expert + end) / 2;
      (before[middle] <= nth ? expert : end) = middle;
    }
    const int row = begins[expert] + (nth - before[expert]) * Way::kTileX;
    return {row, min(begins[expert + 1], row + Way::kTileX), column * Way::kOutN, expert};
  }
};

// Where in its tiles a load is.
template <class Way>
struct TurnedTurn {
  const TurnedShare<Way>& share;
  int tile, k = 0;
  TurnedPlace place{};
  __device__ explicit TurnedTurn(const TurnedShare<Way>& share) : share(share), tile(share.first) {
    Find();
  }
  __device__ bool IsOver() const { return tile >= share.Count(); }
  __device__ void Find() {
    if (!IsOver()) place = share.Place(tile);
  }
  __device__ void Advance() {
    if (++k < share.steps) return;
    k = 0;
    tile += share.stride;
    Find();
  }
};

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_SCALED_RING_CUH_
