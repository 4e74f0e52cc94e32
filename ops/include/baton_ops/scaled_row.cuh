// The product of scaled_turned.cuh for a single row of x, which each block quantises for itself as
// quantise.cuh does: in their order and so with their bits. What takes time is reading the weight
// once, and before this launches that wait for each other: so threads ask for the first of it as
// they begin, without the copy engine, and have it while the row is being made; and no launch is
// between the two.
//
// A tile is 32 of the weight's rows, and a stage two ranges of it: the tensor cores take them as 64
// rows, whose columns are x's first range, x's second, and six of whatever lies there, which nobody
// reads. Four warpgroups take stages in turn, of one tile after the other, each from a ring of its
// own; the sums of all ranges of a tile lie in shared memory until one warp adds them up in order,
// while the others go on with the next. Of experts each row of the output is a tile's. Where each
// of these has a row of x of its own, a block has tiles that follow each other, of two rows at
// most. What all tokens share may be one row more, whose weight is read before it is known who is
// chosen.
#ifndef BATON_OPS_SCALED_ROW_CUH_
#define BATON_OPS_SCALED_ROW_CUH_

#include "baton_ops/hopper.cuh"
#include "baton_ops/row_quantise.cuh"
#include "baton_ops/scaled_tile.cuh"

namespace baton_ops::cuda {

constexpr int kRowTile = 32;                    // rows of the weight
constexpr int kRowGroups = 4, kRowGroup = 128;  // warpgroups, and their threads
constexpr int kRowThreads = kRowGroups * kRowGroup, kRowWarps = kRowThreads / kWarp;
// Of a warpgroup's ring: the weight's bytes, and behind all of those its rows' scales.
constexpr int kRowStages = 5, kRowStageBytes = 2 * kRowTile * kScaledRange;
constexpr int kRowRingBytes = kRowStages * kRowStageBytes;
constexpr int kRowStageScales = 2 * kRowTile;
constexpr int kMostRowPairs = 64;       // rows of the output, of experts
constexpr int kMostOwnRows = 8;         // of x, a token's
constexpr int kMostRowColumns = 12288;  // of x
constexpr int kMostRangesOfWarp = kMostRowColumns / kScaledRange / kRowWarps;
constexpr int kRowBeyond = 128;  // bytes behind x that are read for nobody

// What a range's products make of a row of the weight, and the scale of that.
struct RowScaledSum {
  float sum, scale;
};

template <bool kGatedOf>
struct RowScaledWay {
  using Out = __nv_bfloat16;
  static constexpr bool kGated = kGatedOf;
  static constexpr int kOutColumns = kRowTile / (kGated ? 2 : 1);
  // Of a range: two tiles' sums, and of each row numbers and their scale.
  static constexpr int SharedBytes(int ranges, int rows) {
    const int x_bytes = rows * ((ranges + 1) / 2 * 2 * kScaledRange + ranges * int{sizeof(float)});
    const int scale_bytes = kRowGroups * kRowStages * kRowStageScales * int{sizeof(float)};
    return kRowGroups * kRowRingBytes + kRowBeyond + x_bytes + scale_bytes +
           ranges * 2 * kRowTile * int{sizeof(RowScaledSum)};
  }
};

// A product of one more row, which comes before all others: of as many columns of a weight without
// experts. Where there is none, weight is null.
struct RowScaledBeside {
  const __nv_bfloat16* x;
  const uint8_t* weight;
  const float* weight_scales;
  __nv_bfloat16* out;
};

// What rows are made of.
struct RowScaledRows {
  const __nv_bfloat16* x;
  int64_t stride;  // from one row of the output's to the next one's; 0 where all have one
  int chunk;       // how many tiles a block has, where rows are several
  // Where experts' rows begin was written before the kernel before this one let it start.
  bool are_starts_early;
  RowScaledBeside beside;
};

// Where the block's tiles are: of the row beside, then of the output's rows. `expert_of`: of each
// of these, where there are experts.
template <class Way>
class RowScaledTiles {
 public:
  using Out = typename Way::Out;
  const ScaledParams<Out>& in;
  const RowScaledRows& rows;
  const int columns, beside, begin, step;
  int end;  // only of the row beside, until it is known which others there are

  __device__ RowScaledTiles(const ScaledParams<Out>& in, const RowScaledRows& rows,
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
  // The row of the tile's weight, in it or its scales, that is its row of that number.
  __device__ __forceinline__ int64_t WeightRow(int tile, int nth) const {
    const int expert = in.starts == nullptr || IsBeside(tile) ? 0 : expert_of_[Row(tile)];
    const int64_t part = expert * (Way::kGated ? 2 : 1) + nth / Way::kOutColumns;
    return part * in.out_columns + Column(tile) + nth % Way::kOutColumns;
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

// Where in the block's stages someone is who takes every so many-th. A tile has so many stages.
template <class Way>
struct RowScaledTurn {
  const RowScaledTiles<Way>& tiles;
  const int of_tile;
  int tile, k;
  __device__ RowScaledTurn(const RowScaledTiles<Way>& tiles, int first)
      : tiles(tiles), of_tile((tiles.in.groups + 1) / 2), tile(tiles.begin), k(first) {
    GoOn();
  }
  __device__ __forceinline__ void Advance(int by) {
    k += by;
    GoOn();
  }

 private:
  __device__ __forceinline__ void GoOn() {
    while (k >= of_tile) {
      k -= of_tile;
      tile += tiles.step;
    }
  }
};

// Shared memory: the rings, x's rows, sums of two tiles' ranges, scales of the rings, and of x.
//
// Of x two ranges lie together, 16 bytes of the one and of the other in turns: so a product's first
// two columns are 16 bytes apart, and what follows in depth is 32 bytes behind.
struct RowScaledMemory {
  uint8_t *ring, *x;
  RowScaledSum* sums;
  float *scales, *of_weight;
  int of_row;  // bytes of a row of x
  // Of the calling thread's warpgroup, whose number it is.
  __device__ RowScaledMemory(uint8_t* memory, int ranges, int rows, int group)
      : ring(memory + group * kRowRingBytes), x(memory + kRowGroups * kRowRingBytes) {
    of_row = (ranges + 1) / 2 * 2 * kScaledRange;
    sums = reinterpret_cast<RowScaledSum*>(x + rows * of_row + kRowBeyond);
    of_weight = reinterpret_cast<float*>(sums + 2 * ranges * kRowTile);
    scales = of_weight + kRowGroups * kRowStages * kRowStageScales;
    of_weight += group * kRowStages * kRowStageScales;
  }
  // Where four columns of a range of x begin.
  __device__ __forceinline__ uint8_t* Place(int row, int range, int column) const {
    return x + row * of_row + range / 2 * (2 * kScaledRange) + column / 16 * 32 + range % 2 * 16 +
           column % 16;
  }
};

// What a thread copies of its warpgroup's stages: 16 bytes of every sixteenth of their rows, and
// some a scale.
template <class Way>
class RowScaledFeed {
 public:
  __device__ RowScaledFeed(const RowScaledTiles<Way>& tiles, const RowScaledMemory& memory,
                           int group)
      : tiles_(tiles), memory_(memory), turn_(tiles, group) {}

  // Whether the next stage is one of the row beside.
  __device__ __forceinline__ bool IsBeside() const { return tiles_.IsBeside(turn_.tile); }
  // Begins to copy the next stage, if there is one; counts it in any case.
  __device__ __forceinline__ void Copy() {
    if (turn_.tile < tiles_.end) {
      if (turn_.tile != found_) Find();
      const int range = turn_.k * 2, last = tiles_.in.groups - 1;
      uint8_t* to = memory_.ring + stage_ * kRowStageBytes + thread_ / 8 * kScaledRange +
                    (thread_ % 8 ^ thread_ / 8 % 8) * 16;
      const uint8_t* from = row_ + range * kScaledRange;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool is_there = i < 2 || range < last;
        const int behind = i / 2 * kScaledRange;
        BeginEarlyCopyOrZeros(to + i * 16 * kScaledRange,
                              from + (i % 2) * second_ + (is_there ? behind : 0), is_there);
      }
      if (thread_ < kRowStageScales) {
        BeginEarlyCopyOfFour(memory_.of_weight + stage_ * kRowStageScales + thread_,
                             scale_ + min(range + thread_ / kRowTile, last));
      }
      stage_ = stage_ + 1 == kRowStages ? 0 : stage_ + 1;
      turn_.Advance(kRowGroups);
    }
    CountCopies();
  }

 private:
  __device__ __forceinline__ void Find() {
    found_ = turn_.tile;
    const ScaledParams<typename Way::Out>& in = tiles_.in;
    const auto& beside = tiles_.rows.beside;
    const uint8_t* weight = IsBeside() ? beside.weight : in.weight;
    const float* scales = IsBeside() ? beside.weight_scales : in.weight_scales;
    const int64_t first = tiles_.WeightRow(found_, thread_ / 8);
    row_ = weight + first * in.in + thread_ % 8 * 16;
    second_ = (tiles_.WeightRow(found_, thread_ / 8 + 16) - first) * in.in;
    scale_ = scales + (tiles_.WeightRow(found_, thread_ % kRowTile) >> in.scale_shift) * in.groups;
  }

  const RowScaledTiles<Way>& tiles_;
  const RowScaledMemory& memory_;
  const int thread_ = threadIdx.x % kRowGroup;
  RowScaledTurn<Way> turn_;
  int stage_ = 0, found_ = -1;    // found_: the tile that what follows is of
  const uint8_t* row_ = nullptr;  // of the weight, the first that the thread copies of
  int64_t second_ = 0;            // where the other one is, behind it
  const float* scale_ = nullptr;  // of the thread's row
};

template <class Way>
class RowScaledMultiply {
 public:
  __device__ RowScaledMultiply(const RowScaledTiles<Way>& tiles, const RowScaledMemory& memory)
      : tiles_(tiles),
        memory_(memory),
        ranges_(tiles.in.groups),
        turn_(tiles, group_),
        feed_(tiles, memory, group_) {}

  // Fills the ring but for a stage, or begins to with the row beside, which is always known.
  __device__ __forceinline__ void Begin(bool is_known) {
#pragma unroll 1
    for (; begun_ + 1 < kRowStages && (is_known || feed_.IsBeside()); ++begun_) feed_.Copy();
  }

  __device__ __forceinline__ void Run() {
    first_ = tiles_.rows.chunk > 0 ? tiles_.Nth(tiles_.begin) : 0;
    Quantise();
    const UniformDescriptor ring(memory_.ring);
    int adder = 0, buffer = 0;
#pragma unroll 1
    for (int tile = tiles_.begin; tile < tiles_.end; tile += tiles_.step) {
      const int row = tiles_.rows.chunk > 0 ? tiles_.Nth(tile) - first_ : 0;
#pragma unroll 1
      while (turn_.tile == tile) Multiply(ring, row, buffer);
      __syncthreads();
      if (warp_ == adder) Store(tile, AddUp(buffer));
      adder = adder + 1 == kRowWarps ? 0 : adder + 1;
      buffer ^= 1;
    }
  }

 private:
  __device__ __forceinline__ void MeetGroup() const {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + group_), "n"(kRowGroup) : "memory");
  }

  // Each block makes all ranges of the rows that it needs.
  __device__ __forceinline__ void Quantise() const {
    const int last = tiles_.end - 1;
    const int count = tiles_.rows.chunk > 0 ? tiles_.Nth(last) - first_ + 1 : 1;
    QuantiseRows<kRowWarps, kMostRangesOfWarp>(
        tiles_.X(tiles_.begin), tiles_.X(last), ranges_, count * ranges_, memory_.scales,
        [&](int nth, int column) {
          const int row = nth / ranges_;
          return memory_.Place(row, nth - row * ranges_, column);
        });
    PublishShared();
    __syncthreads();
  }

  // Multiplies the group's next stage. Behind its meeting all have copied it, and all have
  // multiplied the one before, whose place the next one takes.
  __device__ __forceinline__ void Multiply(const UniformDescriptor& ring, int row, int buffer) {
    AwaitCopies<kRowStages - 2>();
    PublishShared();
    MeetGroup();
    const int pair = turn_.k, range = pair * 2 + part_;
    const PlainDescriptor x(memory_.x + row * memory_.of_row + pair * (2 * kScaledRange), 32);
    const UniformDescriptor weight = ring.Stage(stage_ * kRowStageBytes);
    float sums[4];
    Hold(sums);
    FenceProducts();
#pragma unroll
    for (int step = 0; step < kScaledRange / 32; ++step) {
      WgmmaOfE4m3<8>::Multiply(sums, weight.Behind(step * 32), x.Behind(step * 64), step != 0);
    }
    CommitProducts();
    feed_.Copy();
    const float* of_weight =
        memory_.of_weight + stage_ * kRowStageScales + part_ * kRowTile + tile_row_;
    const float first = of_weight[0], second = of_weight[8];
    AwaitProducts<0>();
    Hold(sums);
    turn_.Advance(kRowGroups);
    stage_ = stage_ + 1 == kRowStages ? 0 : stage_ + 1;
    if (lane_ % 4 != 0 || range >= ranges_) return;
    const float scale = memory_.scales[row * ranges_ + range];
    RowScaledSum* to = memory_.sums + (buffer * ranges_ + range) * kRowTile + tile_row_;
    to[0] = {part_ == 0 ? sums[0] : sums[1], __fmul_rn(scale, first)};
    to[8] = {part_ == 0 ? sums[2] : sums[3], __fmul_rn(scale, second)};
  }

  // The lane's row of a tile.
  __device__ __forceinline__ float AddUp(int buffer) const {
    const RowScaledSum* sums = memory_.sums + buffer * ranges_ * kRowTile + lane_;
    float total = 0.0f;
#pragma unroll 8
    for (int i = 0; i < ranges_; ++i) {
      const RowScaledSum here = sums[i * kRowTile];
      total = __fmaf_rn(here.sum, here.scale, total);
    }
    return total;
  }

  __device__ __forceinline__ void Store(int tile, float sum) const {
    __nv_bfloat16* to = tiles_.To(tile) + lane_;
    if constexpr (Way::kGated) {
      const float up = __shfl_xor_sync(kEveryLane, sum, Way::kOutColumns);
      if (lane_ < Way::kOutColumns) *to = ScaledGate<__nv_bfloat16>(sum, up);
    } else {
      *to = Rounded<__nv_bfloat16>(sum);
    }
  }

  const RowScaledTiles<Way>& tiles_;
  const RowScaledMemory& memory_;
  const int lane_ = threadIdx.x % kWarp, warp_ = threadIdx.x / kWarp;
  const int group_ = warp_ / 4, part_ = warp_ % 4 / 2;  // which range of a stage it has sums of
  const int tile_row_ = warp_ % 2 * 16 + lane_ / 4;     // and which row, with the eighth behind
  const int ranges_;
  int first_ = 0;  // of a block's rows of x
  RowScaledTurn<Way> turn_;
  RowScaledFeed<Way> feed_;
  int begun_ = 0, stage_ = 0;  // begun_: stages, before Run
};

// Tells which rows of the output have experts, and each one's.
template <class Way>
__device__ __forceinline__ void FindExperts(RowScaledTiles<Way>& tiles, int* expert_of) {
  const ScaledParams<typename Way::Out>& in = tiles.in;
  const int first = __ldcg(in.starts), last = __ldcg(in.starts + in.experts);
#pragma unroll 1
  for (int e = threadIdx.x; e < in.experts; e += kRowThreads) {
    const int from = __ldcg(in.starts + e), next = __ldcg(in.starts + e + 1);
    for (int i = from; i < min(next, in.rows); ++i) expert_of[i] = e;
  }
  tiles.SetRows(min(first, in.rows), min(last, in.rows));
  __syncthreads();
}

// Grid: as many blocks as there are multiprocessors, or tiles. x begins on 16 bytes, and so do its
// rows. in.groups are ranges; a tile's columns are all there. in.x is not read.
template <class Way>
__global__ void __launch_bounds__(kRowThreads, 1)
    RowScaledKernel(const ScaledParams<typename Way::Out> in, const RowScaledRows rows) {
#if BATON_HAS_WGMMA
  extern __shared__ __align__(1024) uint8_t shared[];
  __shared__ int expert_of[kMostRowPairs];
  const bool has_experts = in.starts != nullptr;
  const bool waits_first = has_experts && !rows.are_starts_early;
  RowScaledTiles<Way> tiles(in, rows, expert_of);
  if (!has_experts) tiles.SetRows(0, in.rows);
  if (has_experts && !waits_first) FindExperts(tiles, expert_of);
  const RowScaledMemory memory(shared, in.groups, rows.chunk > 0 ? 2 : 1, threadIdx.x / kRowGroup);
  RowScaledMultiply<Way> multiply(tiles, memory);
  multiply.Begin(!waits_first);
  WaitForEarlierGrids();
  LetNextGridStart();
  if (waits_first) FindExperts(tiles, expert_of);
  multiply.Begin(true);
  if (tiles.begin < tiles.end) multiply.Run();
#endif
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_SCALED_ROW_CUH_
