// What scaled_few.cuh loads: its tiles and where they are, what a warp copies of the weight, and
// what a lane has of x.
#ifndef BATON_OPS_SCALED_FEW_FEED_CUH_
#define BATON_OPS_SCALED_FEW_FEED_CUH_

#include "baton_ops/async_copy.cuh"
#include "baton_ops/row_tiles.cuh"
#include "baton_ops/scaled_matmul.cuh"

namespace baton_ops::cuda {

constexpr int kFewScaledBlocks = 2;  // of a multiprocessor
constexpr int kFewScaledRows = 8;    // of x, a product's columns
constexpr int kFewScaledWarps = 8, kFewScaledThreads = kFewScaledWarps * kWarp;
constexpr int kFewScaledColumns = 32, kFewScaledPitch = kFewScaledColumns + 4;
constexpr int kFewScaledHeadBytes = 4112;  // where experts' rows and tiles begin
static_assert(2 * (kMostGroups + 1) * sizeof(int) <= kFewScaledHeadBytes);

template <class OutOf, bool kGatedOf>
struct FewScaledWay {
  using Out = OutOf;
  static constexpr int kStages = 2;
  static constexpr bool kGated = kGatedOf;
  static constexpr int kOutColumns = kFewScaledColumns / (kGated ? 2 : 1);
  static constexpr int kStageBytes = kFewScaledColumns * kScaledRange;
  // Of a row's eighths together.
  static constexpr int kScaleBytes = kFewScaledColumns * int{sizeof(float)};
  static constexpr int kWarpBytes = kStages * (kStageBytes + kScaleBytes);
  static constexpr int kPartial = kFewScaledRows * kFewScaledPitch;  // of a warp
  static constexpr int kSharedBytes = kFewScaledHeadBytes + kFewScaledWarps * kWarpBytes +
                                      2 * kFewScaledWarps * kPartial * int{sizeof(float)};
};

// Of a tile: its rows of the output and how many, its first column, and its expert.
struct FewScaledPlace {
  int row, rows, column, expert;
};

// Where tiles are. `before` and `begins`: of experts, see row_tiles.cuh.
template <class Way>
struct FewScaledTiles {
  const ScaledParams<typename Way::Out>& in;
  const int *begins, *before;
  int columns, count;
  __device__ FewScaledTiles(const ScaledParams<typename Way::Out>& in, const int* begins,
                            const int* before)
      : in(in),
        begins(begins),
        before(before),
        columns((in.out_columns + Way::kOutColumns - 1) / Way::kOutColumns),
        count(columns * (in.starts == nullptr ? (in.rows + kFewScaledRows - 1) / kFewScaledRows
                                              : before[in.experts])) {}
  // By whole warps. An expert's tiles follow each other, so that neighbours have x in common.
  __device__ __forceinline__ FewScaledPlace Find(int tile) const {
    const int nth = tile / columns, column = tile - nth * columns;
    const int left = column * Way::kOutColumns;
    if (in.starts == nullptr) {
      const int row = nth * kFewScaledRows;
      return {row, min(in.rows - row, kFewScaledRows), left, 0};
    }
    int up_to = 0;
#pragma unroll 1
    for (int first = 0; first < in.experts; first += kWarp) {
      const int at = first + static_cast<int>(threadIdx.x % kWarp);
      const bool is_before = at < in.experts && before[at] <= nth;
      up_to += __popc(__ballot_sync(kEveryLane, is_before));
    }
    const int row = begins[up_to - 1] + (nth - before[up_to - 1]) * kFewScaledRows;
    return {row, min(begins[up_to] - row, kFewScaledRows), left, up_to - 1};
  }
  // The weight's row of a column of a tile; columns behind the last are read as it is.
  __device__ __forceinline__ int64_t WeightRow(const FewScaledPlace& place, int column) const {
    const int at = min(place.column + column % Way::kOutColumns, in.out_columns - 1);
    const int64_t part = Way::kGated ? place.expert * 2 + column / Way::kOutColumns : place.expert;
    return part * in.out_columns + at;
  }
  __device__ __forceinline__ int RowOfX(const FewScaledPlace& place, int row) const {
    const int at = place.row + min(row, place.rows - 1);
    return in.row == nullptr ? at : in.row[at];
  }
  // The warp's first range of a tile.
  static __device__ __forceinline__ int FirstRange() {
    return static_cast<int>(threadIdx.x) / kWarp;
  }
};

// What a warp copies of the weight, range after range of its tiles.
template <class Way>
class FewScaledFeed {
 public:
  __device__ FewScaledFeed(const FewScaledTiles<Way>& tiles, uint8_t* stages)
      : tiles_(tiles), stages_(stages), tile_(blockIdx.x) {
    Find();
  }
  // Begins to copy the next range, if there is one; counts it in any case. A row's 128 bytes are
  // asked for at once, by eight lanes.
  __device__ __forceinline__ void Copy() {
    const ScaledParams<typename Way::Out>& in = tiles_.in;
    if (tile_ < tiles_.count) {
      if (at_ < in.in) {
        const int lane = threadIdx.x % kWarp, row = lane / 8, at = at_ + lane % 8 * 16;
        const bool is_there = at < in.in;
        const uint8_t* from = row_ + (is_there ? at : 0);
        uint8_t* to = stages_ + stage_ * Way::kStageBytes + row * kScaledRange +
                      (lane % 8 ^ row % 2 * 4) * 16;
#pragma unroll
        for (int i = 0; i < kFewScaledColumns / 4; ++i) {
          BeginEarlyCopyOrZeros(to + i * 4 * kScaledRange, from + Offset(i), is_there);
        }
        CopyScales(in, lane);
      }
      stage_ = stage_ + 1 == Way::kStages ? 0 : stage_ + 1;
      at_ += kFewScaledWarps * kScaledRange;
      if (at_ - tiles_.FirstRange() * kScaledRange >= in.in) {
        tile_ += gridDim.x;
        Find();
      }
    }
    CountCopies();
  }

 private:
  // Of the weight's row that is i * 4 behind the lane's first.
  __device__ __forceinline__ int64_t Offset(int i) const {
    return static_cast<int64_t>(offsets_[i]) * 16;
  }

  // A row's by each lane.
  __device__ __forceinline__ void CopyScales(const ScaledParams<typename Way::Out>& in, int lane) {
    float* to = reinterpret_cast<float*>(stages_ + Way::kStages * Way::kStageBytes +
                                         stage_ * Way::kScaleBytes);
    const int group = min(at_ / kScaledRange, in.groups - 1);
    const int64_t row = tiles_.WeightRow(place_, lane) >> in.scale_shift;
    BeginEarlyCopyOfFour(to + lane % 8 * 4 + lane / 8, in.weight_scales + row * in.groups + group);
  }

  __device__ __forceinline__ void Find() {
    at_ = tiles_.FirstRange() * kScaledRange;
    if (tile_ >= tiles_.count) return;
    const int row = static_cast<int>(threadIdx.x) % kWarp / 8;
    place_ = tiles_.Find(tile_);
    const int64_t first = tiles_.WeightRow(place_, row);
    row_ = tiles_.in.weight + first * tiles_.in.in;
#pragma unroll
    for (int i = 0; i < kFewScaledColumns / 4; ++i) {
      const int64_t behind = tiles_.WeightRow(place_, row + i * 4) - first;
      offsets_[i] = static_cast<uint32_t>(behind * (tiles_.in.in / 16));
    }
  }

  const FewScaledTiles<Way>& tiles_;
  uint8_t* stages_;
  int tile_, at_ = 0, stage_ = 0;  // at_: the range's first column
  FewScaledPlace place_{};
  const uint8_t* row_ = nullptr;  // of the weight, the first that the lane copies of
  uint32_t offsets_[kFewScaledColumns / 4] = {};  // of 16 bytes
};

// What a lane has of x for a range: of a row numbers, by half, and scales of two rows.
template <class Way>
class FewScaledX {
 public:
  Numbers at[2];
  float scales[2];

  __device__ __forceinline__ void Find(const FewScaledTiles<Way>& tiles,
                                       const FewScaledPlace& place) {
    const int lane = threadIdx.x % kWarp;
    row_ = tiles.RowOfX(place, lane / 4);
    // Those that are the lane's columns of a product: of lanes that have them as rows.
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      scaled_[j] = __shfl_sync(kEveryLane, row_, (lane % 4 * 2 + j) * 4);
    }
  }
  __device__ __forceinline__ void Load(const ScaledParams<typename Way::Out>& in, int range) {
    const int first = range * kScaledRange + static_cast<int>(threadIdx.x) % 4 * 16;
    const int group = min(range, in.groups - 1);
    const uint8_t* row = in.x + row_ * in.x_stride;
    at[0] = LoadNumbers<true>(row, first, in.in);
    at[1] = LoadNumbers<true>(row, first + kScaledHalf, in.in);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      scales[j] = in.x_scales[static_cast<int64_t>(scaled_[j]) * in.groups + group];
    }
  }

 private:
  int row_, scaled_[2];
};

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_SCALED_FEW_FEED_CUH_
