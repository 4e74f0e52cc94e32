// What loads for scaled_turned.cuh: its tiles, its ring in shared memory, and the warpgroup that
// fills it.
//
// A range of the weight is a stage of rows of 128 bytes, swizzled. One of x is a stage of halves in
// two parts of 64, each as wgmma reads it, and the scales of its rows and of the weight's. A thread
// has copies of x's bytes under way for the next ranges, in a ring that nobody else reads; so it
// may take rows in any order.
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
  const uint8_t* x;
  const float *x_scales, *weight_scales;
  const int32_t *row, *starts;  // as in ScaledParams
  int experts, in, groups;
  bool are_scales_wide;  // four of a row lie on 16 bytes, all of a row are a multiple of four
};

// How many of the two warpgroups that multiply have rows of the weight of their own - else they
// share them and each has columns of its own -, the columns of each, and whether it is gated.
template <int kWeightGroupsOf, int kColumnsOf, bool kGatedOf>
struct TurnedWay {
  static constexpr int kWeightGroups = kWeightGroupsOf, kColumns = kColumnsOf;
  static constexpr bool kGated = kGatedOf;
  static constexpr int kThreads = 3 * kTurnedGroup, kFewRegisters = 104, kManyRegisters = 200;
  static constexpr int kTileX = kColumns * 2 / kWeightGroups, kTileWeight = 64 * kWeightGroups;
  static constexpr int kOutN = kGated ? kTileWeight / 2 : kTileWeight;
  static constexpr int kXBytes = kTileX * kScaledRange * 2, kRawBytes = kTileX * kScaledRange;
  static constexpr int kWeightBytes = kTileWeight * kScaledRange;
  static constexpr int kScales = kTileX + kTileWeight;
  // More copies of x's bytes are under way where a range is over sooner.
  static constexpr int kXStages = kTileX < 64 ? 4 : kTileX < 128 ? 3 : 2;
  static constexpr int kRawStages = kTileX < 64 ? 8 : kTileX < 128 ? 6 : 4;
  static constexpr int kOtherBytes = kTurnedHeadBytes + kRawStages * kRawBytes +
                                     kXStages * (kXBytes + kScales * int{sizeof(float)});
  static constexpr int kFit = (kFewSharedBytes - kOtherBytes) / kWeightBytes;
  static constexpr int kWeightStages = kFit < 16 ? kFit : 16;
  static constexpr int kSharedBytes = kOtherBytes + kWeightStages * kWeightBytes;
  static_assert(kWeightStages > kXStages);
};

template <class Way>
struct TurnedRing {
  uint64_t *weight_full, *x_full, *x_empty;
  int *before, *begins;  // of experts: see matmul_grouped.cuh
  uint8_t *weight, *x, *raw;
  float* scales;
  __device__ explicit TurnedRing(uint8_t* shared)
      : weight_full(reinterpret_cast<uint64_t*>(shared)),
        x_full(weight_full + Way::kWeightStages),
        x_empty(x_full + Way::kXStages),
        before(reinterpret_cast<int*>(shared + kFewHeadBytes)),
        begins(before + kMostGroups + 1),
        weight(shared + kTurnedHeadBytes),
        x(weight + Way::kWeightStages * Way::kWeightBytes),
        raw(x + Way::kXStages * Way::kXBytes),
        scales(reinterpret_cast<float*>(raw + Way::kRawStages * Way::kRawBytes)) {}
  // Makes the barriers, by one thread. Warps arrive, each for itself.
  __device__ void Init() const {
    for (int s = 0; s < Way::kWeightStages; ++s) InitBarrier(weight_full + s, 1);
    for (int s = 0; s < Way::kXStages; ++s) {
      InitBarrier(x_full + s, kTurnedGroup / 32);
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
  // So many ranges further, or to where the next tile begins.
  __device__ void AdvanceBy(int ranges) {
    k += ranges;
    if (k < share.steps) return;
    k = 0;
    tile += gridDim.x;
    Find();
  }
  __device__ void Advance() { AdvanceBy(1); }
  // Of eight rows from `row` of the tile on, whether there are some.
  __device__ __forceinline__ bool Has(int row) const { return place.row + row < place.end_row; }
};

// A thread of the warpgroup that loads. Its warps have a half of a range each, and every second
// block of eight rows; a lane has a row's 16 bytes of each block.
template <class Way>
class TurnedFeed {
 public:
  __device__ TurnedFeed(const TurnedRing<Way>& ring, const TurnedShare<Way>& share,
                        const TurnedInput& in, const CUtensorMap* map_weight)
      : ring_(ring), share_(share), in_(in), map_weight_(map_weight), weights_(share) {}

  __device__ void Run() {
    if (share_.experts == 0) {
      FillWeights();
      WaitForEarlierGrids();
      LetNextGridStart();
    } else {
      FillWeights();
    }
    TurnedTurn<Way> turn(share_), ahead(share_), scales(share_);
    int raw = 0;
    LoadScales(scales);
#pragma unroll 1
    for (int i = 0; i + 1 < Way::kRawStages; ++i) CopyX(ahead, i);
    TurnedStage<Way::kXStages> stage;
    for (int i = 0; !turn.IsOver(); turn.Advance(), ++i) {
      if (turn.k % kFour == 0) {
        now_ = next_;
        scales.AdvanceBy(kFour);
        LoadScales(scales);
      }
      CopyX(ahead, raw == 0 ? Way::kRawStages - 1 : raw - 1);
      Await(ring_.x_empty + stage.s, stage.phase ^ 1);
      // What was multiplied before that has left its stage of the weight as well.
      if (i >= Way::kXStages) LoadWeight();
      AwaitCopies<Way::kRawStages - 1>();
      Convert(turn, raw, stage.s);
      StoreScales(turn.k % kFour, stage.s);
      PublishShared();
      __syncwarp();
      if (lane_ == 0) Arrive(ring_.x_full + stage.s);
      stage.Advance();
      raw = raw + 1 == Way::kRawStages ? 0 : raw + 1;
    }
  }

 private:
  static constexpr int kItems = (Way::kTileX / 8 + 1) / 2;
  static constexpr int kBlockBytes = 8 * kTurnedRowBytes;
  static constexpr int kFour = 4;  // ranges, whose scales of a row are loaded at once
  struct Scales {
    float x[kFour], weight[kFour];
  };

  __device__ __forceinline__ void FillWeights() {
#pragma unroll 1
    for (int i = 0; i < Way::kWeightStages; ++i) LoadWeight();
  }

  // Asks for the next range of the weight, if there is one, by one thread.
  __device__ __forceinline__ void LoadWeight() {
    if (threadIdx.x != 0 || weights_.IsOver()) return;
    uint64_t* full = ring_.weight_full + weight_stage_.s;
    ExpectBytes(full, Way::kWeightBytes);
    LoadOfStack(ring_.weight + weight_stage_.s * Way::kWeightBytes, map_weight_,
                weights_.k * kScaledRange, weights_.place.column, weights_.place.expert, full);
    weight_stage_.Advance();
    weights_.Advance();
  }

  __device__ __forceinline__ int RowOfX(const TurnedPlace& place, int row) const {
    const int at = min(place.row + row, place.end_row - 1);
    return in_.row == nullptr ? at : in_.row[at];
  }

  // Begins to copy the bytes of x that the thread will convert.
  __device__ __forceinline__ void CopyX(TurnedTurn<Way>& turn, int slot) {
    if (!turn.IsOver()) {
      if (turn.k == 0) {
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
          if (turn.Has(Block(i) * 8)) rows_[i] = RowOfX(turn.place, Block(i) * 8 + lane_ / 4);
        }
      }
      const int at = turn.k * kScaledRange + half_ * kScaledHalf + lane_ % 4 * 16;
      const bool is_there = at < in_.in;
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        if (!turn.Has(Block(i) * 8)) continue;
        const uint8_t* from = in_.x + static_cast<int64_t>(rows_[i]) * in_.in + at;
        BeginCopyOrZeros(Raw(slot, i), is_there ? from : in_.x, is_there);
      }
      turn.Advance();
    }
    CountCopies();
  }

  // Halves of a step lie together: of each lane's four numbers the first two, then the others.
  // Blocks are converted four at once, so that what one waits for is another's time.
  __device__ __forceinline__ void Convert(const TurnedTurn<Way>& turn, int slot, int s) const {
    constexpr int kAtOnce = kItems < 4 ? kItems : 4;
    uint8_t* to = ring_.x + s * Way::kXBytes + half_ * (Way::kXBytes / 2) + lane_ % 4 * 4 +
                  lane_ / 4 * kTurnedRowBytes;
#pragma unroll
    for (int i = 0; i < kItems; i += kAtOnce) {
      if (i > 0 && !turn.Has(i * 16)) return;
      Sixteen numbers[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        numbers[j] = *reinterpret_cast<const Sixteen*>(Raw(slot, i + j));
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) StoreHalves(to + Block(i + j) * kBlockBytes, numbers[j]);
    }
  }

  __device__ __forceinline__ void StoreHalves(uint8_t* row, const Sixteen& numbers) const {
    const int in_block = lane_ / 4;
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      const uint32_t four = numbers.at[word];
      *reinterpret_cast<uint32_t*>(row + (word * 2 ^ in_block) * 16) = HalvesOf(four);
      *reinterpret_cast<uint32_t*>(row + (word * 2 + 1 ^ in_block) * 16) = HalvesOf(four >> 16);
    }
  }

  // Begins to load four groups' scales of a row of the tile, and of one of the weight's.
  __device__ __forceinline__ void LoadScales(const TurnedTurn<Way>& turn) {
    const int mine = threadIdx.x;
    if (turn.IsOver()) return;
    if (mine < Way::kTileX && turn.Has(mine)) {
      if (turn.k == 0) scaled_row_ = RowOfX(turn.place, mine);
      LoadFour(in_.x_scales, scaled_row_, turn.k, next_.x);
    }
    if (mine >= Way::kTileWeight) return;
    const int column = turn.place.column + (Way::kGated ? mine / 2 : mine);
    const int64_t expert = turn.place.expert, at = min(column, share_.n - 1);
    const int64_t row =
        Way::kGated ? (expert * 2 + mine % 2) * share_.n + at : expert * share_.n + at;
    LoadFour(in_.weight_scales, row, turn.k, next_.weight);
  }

  __device__ __forceinline__ void LoadFour(const float* scales, int64_t row, int first,
                                           float (&four)[4]) const {
    const float* of_row = scales + row * in_.groups;
    if (in_.are_scales_wide) {
      const float4 wide = *reinterpret_cast<const float4*>(of_row + first);
      four[0] = wide.x, four[1] = wide.y, four[2] = wide.z, four[3] = wide.w;
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) four[i] = of_row[min(first + i, in_.groups - 1)];
  }

  __device__ __forceinline__ void StoreScales(int nth, int s) const {
    float* to = ring_.scales + s * Way::kScales;
    const int mine = threadIdx.x;
    if (mine < Way::kTileX) to[mine] = Nth(now_.x, nth);
    if (mine < Way::kTileWeight) to[Way::kTileX + mine] = Nth(now_.weight, nth);
  }

  static __device__ __forceinline__ float Nth(const float (&four)[4], int nth) {
    const float low = nth % 2 ? four[1] : four[0], high = nth % 2 ? four[3] : four[2];
    return nth / 2 ? high : low;
  }

  __device__ __forceinline__ int Block(int i) const { return first_block_ + 2 * i; }
  __device__ __forceinline__ uint8_t* Raw(int slot, int i) const {
    return ring_.raw + slot * Way::kRawBytes + (i * kTurnedGroup + threadIdx.x) * 16;
  }

  const TurnedRing<Way>& ring_;
  const TurnedShare<Way>& share_;
  const TurnedInput& in_;
  const CUtensorMap* map_weight_;
  TurnedTurn<Way> weights_;
  TurnedStage<Way::kWeightStages> weight_stage_;
  Scales now_{}, next_{};
  int rows_[kItems] = {};  // of x, of the tile that is copied
  int scaled_row_ = 0;     // of x, of the tile whose scales are loaded
  const int lane_ = threadIdx.x % 32, half_ = threadIdx.x / 32 % 2, first_block_ = threadIdx.x / 64;
};

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_SCALED_FEED_CUH_
