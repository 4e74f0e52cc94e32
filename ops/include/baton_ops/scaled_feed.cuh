// What loads for scaled_turned.cuh: its tiles, its rings in shared memory, and the warpgroup that
// fills them.
//
// A range of the weight is a stage of rows of 128 bytes, swizzled. One of x is a stage of halves in
// two parts of 64, each as wgmma reads it, and the scales of its rows and of the weight's. The copy
// engine brings both, asked by a warp for each: asking takes some 200 cycles. Where rows of x are
// named one by one, threads copy these themselves. Scales are copied by threads always: a range's
// lie as far apart as rows do.
#ifndef BATON_OPS_SCALED_FEED_CUH_
#define BATON_OPS_SCALED_FEED_CUH_

#include "baton_ops/e4m3.cuh"
#include "baton_ops/matmul_grouped.cuh"
#include "baton_ops/mma.cuh"

namespace baton_ops::cuda {

constexpr int kTurnedGroup = 128, kTurnedRowBytes = 128, kTurnedHeadBytes = 6 * 1024;
constexpr int kTurnedBandRows = 2048;  // of x, whose tiles are all computed before the next ones'

// 16 e4m3 numbers.
struct alignas(16) Sixteen {
  uint32_t at[4];
};

struct TurnedInput {
  const uint8_t* halves;  // of x, rows `stride` bytes apart
  int64_t stride;
  const float *x_scales, *weight_scales;
  const int32_t *row, *starts;  // as in ScaledParams
  int experts, in, groups;
};

// How many of the two warpgroups that multiply have rows of the weight of their own - else they
// share them and each has columns of its own -, the columns of each, and whether it is gated.
template <int kWeightGroupsOf, int kColumnsOf, bool kGatedOf>
struct TurnedWay {
  static constexpr int kWeightGroups = kWeightGroupsOf, kColumns = kColumnsOf;
  static constexpr bool kGated = kGatedOf;
  static constexpr int kThreads = 3 * kTurnedGroup, kFewRegisters = 56, kManyRegisters = 224;
  static constexpr int kTileX = kColumns * 2 / kWeightGroups, kTileWeight = 64 * kWeightGroups;
  static constexpr int kOutN = kGated ? kTileWeight / 2 : kTileWeight;
  static constexpr int kXBytes = kTileX * kScaledRange * 2;
  static constexpr int kWeightBytes = kTileWeight * kScaledRange;
  static constexpr int kScales = kTileX + kTileWeight;
  // More ranges of x are under way where one is over sooner.
  static constexpr int kXStages = kTileX < 64 ? 8 : kTileX < 128 ? 5 : 3;
  static constexpr int kOtherBytes =
      kTurnedHeadBytes + kXStages * (kXBytes + kScales * int{sizeof(float)});
  static constexpr int kFit = (kFewSharedBytes - kOtherBytes) / kWeightBytes;
  static constexpr int kWeightStages = kFit < 16 ? kFit : 16;
  static constexpr int kSharedBytes = kOtherBytes + kWeightStages * kWeightBytes;
  static_assert(kWeightStages > kXStages);
  static_assert(kTileX <= kTurnedGroup && kTileWeight <= kTurnedGroup, "a thread has a row");
};

template <class Way>
struct TurnedRing {
  uint64_t *weight_full, *x_full, *x_empty;
  int *before, *begins;  // of experts: see matmul_grouped.cuh
  uint8_t *weight, *x;
  float* scales;
  __device__ explicit TurnedRing(uint8_t* shared)
      : weight_full(reinterpret_cast<uint64_t*>(shared)),
        x_full(weight_full + Way::kWeightStages),
        x_empty(x_full + Way::kXStages),
        before(reinterpret_cast<int*>(shared + kFewHeadBytes)),
        begins(before + kMostGroups + 1),
        weight(shared + kTurnedHeadBytes),
        x(weight + Way::kWeightStages * Way::kWeightBytes),
        scales(reinterpret_cast<float*>(x + Way::kXStages * Way::kXBytes)) {}
  // Makes the barriers, by one thread. Of who loads each thread arrives behind its copies, and one
  // once more; of who multiplies warps do.
  __device__ void Init() const {
    for (int s = 0; s < Way::kWeightStages; ++s) InitBarrier(weight_full + s, 1);
    for (int s = 0; s < Way::kXStages; ++s) {
      InitBarrier(x_full + s, kTurnedGroup + 1);
      InitBarrier(x_empty + s, 2 * kTurnedGroup / 32);
    }
    PublishBarriers();
  }
};

template <int kStages>
struct TurnedStage {
  int s = 0, phase = 0;
  __device__ __forceinline__ void Advance() {
    if (++s < kStages) return;
    s = 0;
    phase ^= 1;
  }
};

// Rows of the output, its column, and the expert.
struct TurnedPlace {
  int row, end_row, column, expert;
};

// Tiles of the same columns follow each other, so that their weight is read once; of many rows
// without experts, all tiles of so many rows that they stay in the L2 cache come first.
template <class Way>
struct TurnedShare {
  const int *before, *begins;
  int experts, row_tiles, height, columns, steps, m, n;
  __device__ TurnedShare(const TurnedInput& in, const MatmulOutput& out,
                         const TurnedRing<Way>& ring)
      : before(ring.before),
        begins(ring.begins),
        experts(in.starts == nullptr ? 0 : in.experts),
        row_tiles(experts > 0 ? before[experts] : (out.m + Way::kTileX - 1) / Way::kTileX),
        height(experts > 0 ? Way::kTileX : ((out.m + row_tiles - 1) / row_tiles + 7) / 8 * 8),
        columns((out.n + Way::kOutN - 1) / Way::kOutN),
        steps((in.in + kScaledRange - 1) / kScaledRange),
        m(out.m),
        n(out.n) {}
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
  int tile = blockIdx.x, k = 0;
  TurnedPlace place{};
  __device__ explicit TurnedTurn(const TurnedShare<Way>& share) : share(share) { Find(); }
  __device__ bool IsOver() const { return tile >= share.Count(); }
  __device__ void Find() {
    if (!IsOver()) place = share.Place(tile);
  }
  __device__ void Advance() {
    if (++k < share.steps) return;
    k = 0;
    tile += gridDim.x;
    Find();
  }
};

// A thread of the warpgroup that loads.
template <class Way>
class TurnedFeed {
 public:
  __device__ TurnedFeed(const TurnedRing<Way>& ring, const TurnedShare<Way>& share,
                        const TurnedInput& in, const CUtensorMap* map_x,
                        const CUtensorMap* map_weight)
      : ring_(ring),
        share_(share),
        in_(in),
        map_x_(map_x),
        map_weight_(map_weight),
        weights_(share) {}

  __device__ void Run() {
#pragma unroll 1
    for (int i = 0; i < Way::kWeightStages; ++i) LoadWeight();
    if (share_.experts == 0) {
      WaitForEarlierGrids();
      LetNextGridStart();
    }
    TurnedStage<Way::kXStages> stage;
    int i = 0;
    for (TurnedTurn<Way> turn(share_); !turn.IsOver(); turn.Advance(), ++i) {
      if (turn.k == 0) FindRows(turn.place);
      Await(ring_.x_empty + stage.s, stage.phase ^ 1);
      // What was multiplied before that has left its stage of the weight as well. Given back as
      // soon as warps had read it, a stage was overwritten too early in up to one launch of six.
      if (i >= Way::kXStages) LoadWeight();
      LoadX(turn, stage.s);
      CopyScales(turn, ring_.scales + stage.s * Way::kScales);
      ArriveBehindCopies(ring_.x_full + stage.s);
      stage.Advance();
    }
  }

 private:
  static constexpr int kWeightThread = 0, kXThread = 32;
  static constexpr int kItems = Way::kTileX / 8;  // of 16 bytes, of each row by 16 threads

  // Asks for the next range of the weight, if there is one, by one thread.
  __device__ __forceinline__ void LoadWeight() {
    if (threadIdx.x != kWeightThread || weights_.IsOver()) return;
    uint64_t* full = ring_.weight_full + weight_stage_.s;
    ExpectBytes(full, Way::kWeightBytes);
    LoadOfStack(ring_.weight + weight_stage_.s * Way::kWeightBytes, map_weight_,
                weights_.k * kScaledRange, weights_.place.column, weights_.place.expert, full);
    weight_stage_.Advance();
    weights_.Advance();
  }

  __device__ __forceinline__ int64_t RowOfX(const TurnedPlace& place, int row) const {
    const int at = min(place.row + row, place.end_row - 1);
    return in_.row == nullptr ? at : in_.row[at];
  }

  // Of a tile: the rows that the thread copies, and those whose scales it does.
  __device__ __forceinline__ void FindRows(const TurnedPlace& place) {
    const int mine = threadIdx.x;
    scales_of_x_ = in_.x_scales + RowOfX(place, mine) * in_.groups;
    const int column = min(place.column + (Way::kGated ? mine / 2 : mine), share_.n - 1);
    const int64_t expert = place.expert, n = share_.n;
    scales_of_weight_ =
        in_.weight_scales +
        (Way::kGated ? (expert * 2 + mine % 2) * n + column : expert * n + column) * in_.groups;
    if (in_.row == nullptr) return;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      rows_[i] = static_cast<int>(RowOfX(place, i * 8 + mine / 16));
    }
  }

  __device__ __forceinline__ void LoadX(const TurnedTurn<Way>& turn, int s) const {
    uint8_t* to = ring_.x + s * Way::kXBytes;
    uint64_t* full = ring_.x_full + s;
    if (in_.row != nullptr) {
      CopyX(turn, to);
      if (threadIdx.x == kXThread) Arrive(full);
    } else if (threadIdx.x == kXThread) {
      ExpectBytes(full, Way::kXBytes);
      const int column = turn.k * kScaledRange;
      LoadBox(to, map_x_, column, turn.place.row, full);
      LoadBox(to + Way::kXBytes / 2, map_x_, column + kScaledHalf, turn.place.row, full);
    }
  }

  // Sixteen threads have a row, eight of them each half of it, swizzled as by the copy engine.
  __device__ __forceinline__ void CopyX(const TurnedTurn<Way>& turn, uint8_t* to) const {
    const int half = threadIdx.x / 8 % 2, chunk = threadIdx.x % 8, in_block = threadIdx.x / 16;
    const int at = turn.k * kScaledRange + half * kScaledHalf;
    const bool is_there = at < in_.in;
    const uint8_t* from = in_.halves + (is_there ? at * 2 + chunk * 16 : 0);
    to += half * (Way::kXBytes / 2) + in_block * kTurnedRowBytes + (chunk ^ in_block) * 16;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (turn.place.row + i * 8 >= turn.place.end_row) break;
      BeginCopyOrZeros(to + i * (8 * kTurnedRowBytes), from + rows_[i] * in_.stride, is_there);
    }
  }

  // The range's scale of a row of x, and of one of the weight's.
  __device__ __forceinline__ void CopyScales(const TurnedTurn<Way>& turn, float* to) const {
    const int mine = threadIdx.x, group = min(turn.k, in_.groups - 1);
    if (mine < Way::kTileX) BeginCopyOfFour(to + mine, scales_of_x_ + group);
    if (mine < Way::kTileWeight) {
      BeginCopyOfFour(to + Way::kTileX + mine, scales_of_weight_ + group);
    }
  }

  const TurnedRing<Way>& ring_;
  const TurnedShare<Way>& share_;
  const TurnedInput& in_;
  const CUtensorMap *map_x_, *map_weight_;
  TurnedTurn<Way> weights_;
  TurnedStage<Way::kWeightStages> weight_stage_;
  const float *scales_of_x_ = nullptr, *scales_of_weight_ = nullptr;
  int rows_[kItems] = {};
};

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_SCALED_FEED_CUH_
