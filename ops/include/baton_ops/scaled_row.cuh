// The product of scaled_matmul.cuh for a single row of x, which each block quantises for itself as
// quantise.cuh does: in their order and so with their bits. What takes time is reading the weight
// once, and before this launches that wait for each other: so a warp's first copies are under way
// while the row is still being made, and no launch is between the two.
//
// A tile is 32 of the weight's rows. A warp takes ranges in turn, of one tile after the other; the
// sums of all ranges of a tile lie in shared memory until one warp adds them up in order, while the
// others go on with the next. Of experts each row of the output is a tile's. Where each of these
// has a row of x of its own, a block has tiles that follow each other, of two rows at most. What
// all tokens share may be one row more, whose weight is read before it is known who is chosen.
#ifndef BATON_OPS_SCALED_ROW_CUH_
#define BATON_OPS_SCALED_ROW_CUH_

#include "baton_ops/row_quantise.cuh"
#include "baton_ops/scaled_few.cuh"

namespace baton_ops::cuda {

constexpr int kRowScaledWarps = 16, kRowScaledThreads = kRowScaledWarps * kWarp;
constexpr int kMostRowPairs = 64;       // rows of the output, of experts
constexpr int kMostOwnRows = 8;         // of x, a token's
constexpr int kMostRowColumns = 12288;  // of x
constexpr int kMostRangesOfWarp = kMostRowColumns / kScaledRange / kRowScaledWarps;

template <class OutOf, bool kGatedOf>
struct RowScaledWay {
  using Out = OutOf;
  static constexpr int kStages = 2;
  static constexpr bool kGated = kGatedOf;
  static constexpr int kOutColumns = kFewScaledColumns / (kGated ? 2 : 1);
  static constexpr int kStageBytes = kFewScaledColumns * kScaledRange;
  static constexpr int kScaleBytes = kFewScaledColumns * int{sizeof(float)};
  static constexpr int kWarpBytes = kStages * (kStageBytes + kScaleBytes);
  // Of a range: two tiles' sums, and of each row numbers as halves and their scale.
  static constexpr int SharedBytes(int ranges, int rows) {
    const int of_row = 2 * kScaledRange + int{sizeof(float)};
    return kRowScaledWarps * kWarpBytes + ranges * (2 * kScaleBytes + rows * of_row);
  }
};

// A product of one more row, which comes before all others: of as many columns of a weight without
// experts. Where there is none, weight is null.
template <class Out>
struct RowScaledBeside {
  const Out* x;
  const uint8_t* weight;
  const float* weight_scales;
  Out* out;
};

// What rows are made of.
template <class Out>
struct RowScaledRows {
  const Out* x;
  int64_t stride;  // from one row of the output's to the next one's; 0 where all have one
  int chunk;       // how many tiles a block has, where rows are several
  // Where experts' rows begin was written before the kernel before this one let it start.
  bool are_starts_early;
  RowScaledBeside<Out> beside;
};

// Where the block's tiles are: of the row beside, then of the output's rows. `expert_of`: of each
// of these, where there are experts.
template <class Way>
class RowScaledTiles {
 public:
  using Out = typename Way::Out;
  const ScaledParams<Out>& in;
  const RowScaledRows<Out>& rows;
  const int columns, beside, begin, step;
  int end;  // only of the row beside, until it is known which others there are

  __device__ RowScaledTiles(const ScaledParams<Out>& in, const RowScaledRows<Out>& rows,
                            const int* expert_of)
      : in(in),
        rows(rows),
        columns(in.out_columns / Way::kOutColumns),
        beside(rows.beside.weight == nullptr ? 0 : columns),
        begin(rows.chunk > 0 ? blockIdx.x * rows.chunk : blockIdx.x),
        step(rows.chunk > 0 ? 1 : gridDim.x),
        expert_of_(expert_of) {
    LimitTo(beside);
  }
  // The output's rows are from `first` to `last`.
  __device__ __forceinline__ void SetRows(int first, int last) {
    first_ = first;
    LimitTo(beside + columns * (last - first));
  }
  __device__ __forceinline__ bool IsBeside(int tile) const { return tile < beside; }
  // Of those that are not beside.
  __device__ __forceinline__ int Row(int tile) const { return first_ + (tile - beside) / columns; }
  // Counts the row beside, too.
  __device__ __forceinline__ int Nth(int tile) const { return tile / columns; }
  __device__ __forceinline__ int Column(int tile) const {
    return tile % columns * Way::kOutColumns;
  }
  // The first of the tile's rows of its weight.
  __device__ __forceinline__ int64_t WeightRow(int tile) const {
    const bool is_one = in.starts == nullptr || IsBeside(tile);
    const int expert = is_one ? 0 : expert_of_[Row(tile)];
    return int64_t{expert} * (Way::kGated ? 2 : 1) * in.out_columns + Column(tile);
  }
  // What the tile's row is made of.
  __device__ __forceinline__ const Out* X(int tile) const {
    return IsBeside(tile) ? rows.beside.x : rows.x + Row(tile) * rows.stride;
  }
  __device__ __forceinline__ Out* To(int tile) const {
    return (IsBeside(tile) ? rows.beside.out : in.out + Row(tile) * in.out_stride) + Column(tile);
  }

 private:
  __device__ __forceinline__ void LimitTo(int count) {
    end = rows.chunk > 0 ? min(count, begin + rows.chunk) : count;
  }
  const int* const expert_of_;
  int first_ = 0;
};

// What a warp copies of the weight, range after range.
template <class Way>
class RowScaledFeed {
 public:
  __device__ RowScaledFeed(const RowScaledTiles<Way>& tiles, uint8_t* stages)
      : tiles_(tiles), stages_(stages), tile_(tiles.begin), range_(threadIdx.x / kWarp) {
    GoOn();
  }
  // Whether the next range is one of the row beside.
  __device__ __forceinline__ bool IsBeside() const { return tiles_.IsBeside(tile_); }
  // Begins to copy the next range, if there is one; counts it in any case.
  __device__ __forceinline__ void Copy() {
    if (tile_ < tiles_.end) {
      if (tile_ != found_) Find();
      const ScaledParams<typename Way::Out>& in = tiles_.in;
      const int lane = threadIdx.x % kWarp, row = lane / 8;
      const uint8_t* from = row_ + range_ * kScaledRange;
      uint8_t* to =
          stages_ + stage_ * Way::kStageBytes + row * kScaledRange + (lane % 8 ^ row % 2 * 4) * 16;
#pragma unroll
      for (int i = 0; i < kFewScaledColumns / 4; ++i) {
        const bool is_up = Way::kGated && i >= kFewScaledColumns / 8;
        const int behind = is_up ? in.out_columns + i * 4 - Way::kOutColumns : i * 4;
        BeginEarlyCopyOrZeros(to + i * 4 * kScaledRange, from + int64_t{behind} * in.in, true);
      }
      float* scales = reinterpret_cast<float*>(stages_ + Way::kStages * Way::kStageBytes +
                                               stage_ * Way::kScaleBytes);
      BeginEarlyCopyOfFour(scales + lane % 8 * 4 + lane / 8, scale_ + range_);
      stage_ = stage_ + 1 == Way::kStages ? 0 : stage_ + 1;
      range_ += kRowScaledWarps;
      GoOn();
    }
    CountCopies();
  }

 private:
  __device__ __forceinline__ void GoOn() {
    while (range_ >= tiles_.in.groups) {
      range_ -= tiles_.in.groups;
      tile_ += tiles_.step;
    }
  }
  __device__ __forceinline__ void Find() {
    found_ = tile_;
    const ScaledParams<typename Way::Out>& in = tiles_.in;
    const auto& beside = tiles_.rows.beside;
    const bool is_beside = IsBeside();
    const int lane = threadIdx.x % kWarp;
    const int64_t first = tiles_.WeightRow(tile_);
    const bool is_up = Way::kGated && lane >= Way::kOutColumns;
    const int behind = is_up ? in.out_columns + lane - Way::kOutColumns : lane;
    const uint8_t* weight = is_beside ? beside.weight : in.weight;
    const float* scales = is_beside ? beside.weight_scales : in.weight_scales;
    row_ = weight + (first + lane / 8) * in.in + lane % 8 * 16;
    scale_ = scales + ((first + behind) >> in.scale_shift) * in.groups;
  }

  const RowScaledTiles<Way>& tiles_;
  uint8_t* stages_;
  int tile_, range_, stage_ = 0, found_ = -1;  // found_: the tile that what follows is of
  const uint8_t* row_ = nullptr;               // of the weight, the first that the lane copies of
  const float* scale_ = nullptr;               // of the lane's row
};

template <class Way>
class RowScaledBlock {
 public:
  using Out = typename Way::Out;

  // `rows`: how many of x there is room for.
  __device__ RowScaledBlock(const RowScaledTiles<Way>& tiles, int rows, uint8_t* memory)
      : tiles_(tiles),
        ranges_(tiles.in.groups),
        mine_(memory + warp_ * Way::kWarpBytes),
        partial_(reinterpret_cast<float*>(memory + kRowScaledWarps * Way::kWarpBytes)),
        halves_(reinterpret_cast<uint16_t*>(partial_ + 2 * ranges_ * kFewScaledColumns)),
        scales_(reinterpret_cast<float*>(halves_ + rows * ranges_ * kScaledRange)),
        feed_(tiles, mine_) {}

  // Fills the ring, or begins to with the row beside, which is always known.
  __device__ __forceinline__ void Begin(bool is_known) {
#pragma unroll 1
    for (; begun_ < Way::kStages && (is_known || feed_.IsBeside()); ++begun_) feed_.Copy();
  }

  __device__ __forceinline__ void Run() {
    // Of its first tile a warp has the ranges that it has quantised itself; of others', all meet
    // before.
    const bool has_own = tiles_.rows.chunk > 0;
    const int first = has_own ? tiles_.Nth(tiles_.begin) : 0, last = tiles_.end - 1;
    const int count = has_own ? tiles_.Nth(last) - first + 1 : 1;
    QuantiseRows<kRowScaledWarps, kMostRangesOfWarp>(tiles_.X(tiles_.begin), tiles_.X(last),
                                                     ranges_, count * ranges_, halves_, scales_);
    __syncwarp();
    int range = warp_, stage = 0, adder = 0, buffer = 0;
#pragma unroll 1
    for (int tile = tiles_.begin; tile < tiles_.end; tile += tiles_.step) {
      const int before = has_own ? (tiles_.Nth(tile) - first) * ranges_ : 0;
#pragma unroll 1
      for (; range < ranges_; range += kRowScaledWarps) {
        AwaitCopies<Way::kStages - 1>();
        __syncwarp();
        FewScaledSums sums = {};
        Multiply(stage, before + range, sums);
        Put(stage, range, scales_[before + range], buffer, sums);
        __syncwarp();  // all have read the stage
        feed_.Copy();
        stage = stage + 1 == Way::kStages ? 0 : stage + 1;
      }
      range -= ranges_;
      __syncthreads();
      if (warp_ == adder) Store(tile, AddUp(buffer));
      adder = adder + 1 == kRowScaledWarps ? 0 : adder + 1;
      buffer ^= 1;
    }
  }

 private:
  __device__ __forceinline__ void Multiply(int stage, int range, FewScaledSums& sums) const {
    const uint16_t* row = halves_ + range * kScaledRange + lane_ % 4 * 16;
    Packed<uint32_t, 4> x[2][2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i / 2][i % 2] =
          *reinterpret_cast<const Packed<uint32_t, 4>*>(row + i / 2 * kScaledHalf + i % 2 * 8);
    }
    MultiplyRange(
        mine_ + stage * Way::kStageBytes,
        [&](int half, int word, uint32_t (&b)[2]) {
          b[0] = x[half][word / 2].at[word % 2 * 2];
          b[1] = x[half][word / 2].at[word % 2 * 2 + 1];
        },
        sums);
  }

  // Of a product's columns, which are all the one row, the first's sums: by the row's scale, then
  // by the weight's.
  __device__ __forceinline__ void Put(int stage, int range, float scale, int buffer,
                                      const FewScaledSums& sums) const {
    if (lane_ % 4 != 0) return;
    const uint8_t* from = mine_ + Way::kStages * Way::kStageBytes + stage * Way::kScaleBytes;
    const auto weight = reinterpret_cast<const Packed<float, 4>*>(from)[lane_ / 4];
    float* to = partial_ + (buffer * ranges_ + range) * kFewScaledColumns + lane_ / 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      to[i * 8] = __fmul_rn(__fmul_rn(sums[i / 2][i % 2 * 2], scale), weight.at[i]);
    }
  }

  // The lane's column of a tile.
  __device__ __forceinline__ float AddUp(int buffer) const {
    const float* partial = partial_ + buffer * ranges_ * kFewScaledColumns + lane_;
    float total = 0.0f;
#pragma unroll 8
    for (int i = 0; i < ranges_; ++i) total = __fadd_rn(total, partial[i * kFewScaledColumns]);
    return total;
  }

  __device__ __forceinline__ void Store(int tile, float sum) const {
    Out* to = tiles_.To(tile) + lane_;
    if constexpr (Way::kGated) {
      const float up = __shfl_xor_sync(kEveryLane, sum, Way::kOutColumns);
      if (lane_ < Way::kOutColumns) *to = ScaledGate<Out>(sum, up);
    } else {
      *to = Rounded<Out>(sum);
    }
  }

  const RowScaledTiles<Way>& tiles_;
  const int lane_ = threadIdx.x % kWarp, warp_ = threadIdx.x / kWarp;
  const int ranges_;
  uint8_t* const mine_;
  float* const partial_;
  uint16_t* const halves_;
  float* const scales_;
  RowScaledFeed<Way> feed_;
  int begun_ = 0;  // copies, before Run
};

// Tells which rows of the output have experts, and each one's.
template <class Way>
__device__ __forceinline__ void FindExperts(RowScaledTiles<Way>& tiles, int* expert_of) {
  const ScaledParams<typename Way::Out>& in = tiles.in;
  const int first = __ldcg(in.starts), last = __ldcg(in.starts + in.experts);
#pragma unroll 1
  for (int e = threadIdx.x; e < in.experts; e += kRowScaledThreads) {
    const int from = __ldcg(in.starts + e), next = __ldcg(in.starts + e + 1);
    for (int i = from; i < min(next, in.rows); ++i) expert_of[i] = e;
  }
  tiles.SetRows(min(first, in.rows), min(last, in.rows));
  __syncthreads();
}

// Grid: as many blocks as there are multiprocessors, or tiles. x begins on 16 bytes, and so do
// its rows. in.groups are ranges; a tile's columns are all there. in.x is not read.
template <class Way>
__global__ void __launch_bounds__(kRowScaledThreads, 1)
    RowScaledKernel(ScaledParams<typename Way::Out> in, RowScaledRows<typename Way::Out> rows) {
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ int expert_of[kMostRowPairs];
  const bool has_experts = in.starts != nullptr;
  const bool waits_first = has_experts && !rows.are_starts_early;
  RowScaledTiles<Way> tiles(in, rows, expert_of);
  if (!has_experts) tiles.SetRows(0, in.rows);
  if (has_experts && !waits_first) FindExperts(tiles, expert_of);
  RowScaledBlock<Way> block(tiles, rows.chunk > 0 ? 2 : 1, memory);
  block.Begin(!waits_first);
  WaitForEarlierGrids();
  LetNextGridStart();
  if (waits_first) FindExperts(tiles, expert_of);
  block.Begin(true);
  if (tiles.begin < tiles.end) block.Run();
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_SCALED_ROW_CUH_
