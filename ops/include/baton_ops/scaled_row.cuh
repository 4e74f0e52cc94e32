// The product of scaled_turned.cuh for a single row of x, which each block quantises for itself as
// quantise.cuh does: in their order and so with their bits. What takes time is reading the weight
// once, and before this launches that wait for each other: so the ring is full while the row is
// still being made, and no launch is between the two.
//
// A tile is 32 of the weight's rows, and a stage two ranges of it: the tensor cores take them as 64
// rows, whose columns are x's first range, x's second, and six of whatever lies there, which nobody
// reads. Four warpgroups take stages in turn, of one tile after the other; the sums of all ranges of
// a tile lie in shared memory until one warp adds them up in order, while the others go on with the
// next. Of experts each row of the output is a tile's. Where each of these has a row of x of its
// own, a block has tiles that follow each other, of two rows at most. What all tokens share may be
// one row more, whose weight is read before it is known who is chosen.
#ifndef BATON_OPS_SCALED_ROW_CUH_
#define BATON_OPS_SCALED_ROW_CUH_

#include "baton_ops/hopper.cuh"
#include "baton_ops/row_quantise.cuh"
#include "baton_ops/scaled_tile.cuh"

namespace baton_ops::cuda {

constexpr int kRowTile = 32;                   // rows of the weight
constexpr int kRowGroups = 4, kRowGroup = 128;  // warpgroups that multiply, and their threads
constexpr int kRowMultipliers = kRowGroups * kRowGroup, kRowWarps = kRowMultipliers / kWarp;
constexpr int kRowThreads = kRowMultipliers + kRowGroups * kWarp;  // a warp loads for each
constexpr int kRowStages = 16, kRowStageBytes = 2 * kRowTile * kScaledRange;
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
    return kRowStages * kRowStageBytes + kRowBeyond + x_bytes +
           ranges * 2 * kRowTile * int{sizeof(RowScaledSum)};
  }
};

// A product of one more row, which comes before all others: of as many columns of a weight without
// experts. Where there is none, `is_there` is false.
struct RowScaledBeside {
  bool is_there;
  const __nv_bfloat16* x;
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
        beside(rows.beside.is_there ? columns : 0),
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
  __device__ __forceinline__ int Expert(int tile) const {
    return in.starts == nullptr || IsBeside(tile) ? 0 : expert_of_[Row(tile)];
  }
  // Scales of the tile's row of its weight of that number.
  __device__ __forceinline__ const float* WeightScales(int tile, int nth) const {
    const float* scales = IsBeside(tile) ? rows.beside.weight_scales : in.weight_scales;
    const int64_t part = Expert(tile) * (Way::kGated ? 2 : 1) + nth / Way::kOutColumns;
    const int64_t row = part * in.out_columns + Column(tile) + nth % Way::kOutColumns;
    return scales + (row >> in.scale_shift) * in.groups;
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

// Shared memory: the ring, x's rows and their scales, sums of two tiles' ranges.
//
// Of x two ranges lie together, 16 bytes of the one and of the other in turns: so a product's first
// two columns are 16 bytes apart, and what follows in depth is 32 bytes behind.
struct RowScaledMemory {
  uint8_t *stages, *x;
  RowScaledSum* sums;
  float* scales;
  int of_row;  // bytes of a row of x
  __device__ RowScaledMemory(uint8_t* memory, int ranges, int rows)
      : stages(memory), x(memory + kRowStages * kRowStageBytes) {
    of_row = (ranges + 1) / 2 * 2 * kScaledRange;
    sums = reinterpret_cast<RowScaledSum*>(x + rows * of_row + kRowBeyond);
    scales = reinterpret_cast<float*>(sums + 2 * ranges * kRowTile);
  }
  // Where four columns of a range of x begin.
  __device__ __forceinline__ uint8_t* Place(int row, int range, int column) const {
    return x + row * of_row + range / 2 * (2 * kScaledRange) + column / 16 * 32 + range % 2 * 16 +
           column % 16;
  }
};

struct RowScaledBarriers {
  uint64_t full[kRowStages], empty[kRowStages];
  __device__ void Init() {
    for (int s = 0; s < kRowStages; ++s) {
      InitBarrier(full + s, 1);
      InitBarrier(empty + s, kRowGroup / kWarp);
    }
    PublishBarriers();
  }
};

// A thread that asks for the weight, every so many-th stage: asking takes some 200 cycles.
template <class Way>
class RowScaledFeed {
 public:
  __device__ RowScaledFeed(const RowScaledTiles<Way>& tiles, const RowScaledMemory& memory,
                           RowScaledBarriers& barriers, const CUtensorMap* map_weight,
                           const CUtensorMap* map_beside)
      : tiles_(tiles),
        memory_(memory),
        barriers_(barriers),
        map_weight_(map_weight),
        map_beside_(map_beside),
        turn_(tiles, MyGroup()) {
    stage_.Advance(MyGroup());
  }
  static __device__ __forceinline__ bool IsOne() {
    return threadIdx.x >= kRowMultipliers && threadIdx.x % kWarp == 0;
  }

  // Fills the ring, or begins to with the row beside, which is always known.
  __device__ __forceinline__ void Begin(bool is_known) {
    while (begun_ < kStages && !IsOver() && (is_known || tiles_.IsBeside(turn_.tile))) Load();
  }
  __device__ __forceinline__ void Run() {
    while (!IsOver()) {
      if (begun_ >= kStages) Await(barriers_.empty + stage_.s, stage_.phase ^ 1);
      Load();
    }
  }

 private:
  static constexpr int kStages = kRowStages / kRowGroups;  // its own
  static __device__ __forceinline__ int MyGroup() {
    return static_cast<int>(threadIdx.x / kWarp) % kRowGroups;
  }
  __device__ __forceinline__ bool IsOver() const { return turn_.tile >= tiles_.end; }
  __device__ __forceinline__ void Load() {
    if (turn_.tile != found_) Find();
    uint64_t* full = barriers_.full + stage_.s;
    ExpectBytes(full, kRowStageBytes);
    LoadRanges(memory_.stages + stage_.s * kRowStageBytes, map_, column_, turn_.k * 2, expert_,
               full);
    ++begun_;
    stage_.Advance(kRowGroups);
    turn_.Advance(kRowGroups);
  }
  __device__ __forceinline__ void Find() {
    found_ = turn_.tile;
    map_ = tiles_.IsBeside(found_) ? map_beside_ : map_weight_;
    column_ = tiles_.Column(found_);
    expert_ = tiles_.Expert(found_);
  }

  const RowScaledTiles<Way>& tiles_;
  const RowScaledMemory& memory_;
  RowScaledBarriers& barriers_;
  const CUtensorMap *map_weight_, *map_beside_;
  RowScaledTurn<Way> turn_;
  RingStage<kRowStages> stage_;
  int begun_ = 0, found_ = -1, column_ = 0, expert_ = 0;  // found_: the tile that the rest is of
  const CUtensorMap* map_ = nullptr;
};

// A thread of those that multiply.
template <class Way>
class RowScaledMultiply {
 public:
  __device__ RowScaledMultiply(const RowScaledTiles<Way>& tiles, const RowScaledMemory& memory,
                               RowScaledBarriers& barriers)
      : tiles_(tiles),
        memory_(memory),
        barriers_(barriers),
        ranges_(tiles.in.groups),
        first_(tiles.rows.chunk > 0 ? tiles.Nth(tiles.begin) : 0),
        turn_(tiles, group_) {
    stage_.Advance(group_);
  }

  __device__ void Run() {
    Quantise();
    const UniformDescriptor weight(memory_.stages);
    int adder = 0, buffer = 0;
    LoadScales();
#pragma unroll 1
    for (int tile = tiles_.begin; tile < tiles_.end; tile += tiles_.step) {
      const int row = tiles_.rows.chunk > 0 ? tiles_.Nth(tile) - first_ : 0;
#pragma unroll 1
      while (turn_.tile == tile) Multiply(weight, row, buffer);
      Meet();
      if (warp_ == adder) Store(tile, AddUp(buffer));
      adder = adder + 1 == kRowWarps ? 0 : adder + 1;
      buffer ^= 1;
    }
  }

 private:
  static __device__ __forceinline__ void Meet() {
    asm volatile("bar.sync %0, %1;" ::"r"(1), "n"(kRowMultipliers) : "memory");
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
    Meet();
  }

  // Of its next stage, where there is one: of the range that the thread has two rows' sums of.
  __device__ __forceinline__ void LoadScales() {
    if (turn_.tile >= tiles_.end) return;
    if (turn_.tile != found_) {
      found_ = turn_.tile;
#pragma unroll
      for (int i = 0; i < 2; ++i) of_weight_[i] = tiles_.WeightScales(found_, tile_row_ + i * 8);
    }
    const int range = min(turn_.k * 2 + part_, ranges_ - 1);
#pragma unroll
    for (int i = 0; i < 2; ++i) next_[i] = __ldg(of_weight_[i] + range);
  }

  __device__ __forceinline__ void Multiply(const UniformDescriptor& weight, int row, int buffer) {
    const int range = turn_.k * 2 + part_;
    const float scales[2] = {next_[0], next_[1]};
    turn_.Advance(kRowGroups);
    LoadScales();
    const uint8_t* from = memory_.x + row * memory_.of_row + range / 2 * (2 * kScaledRange);
    const PlainDescriptor x(from, 32);
    float sums[4];
    Await(barriers_.full + stage_.s, stage_.phase);
    const UniformDescriptor at = weight.Stage(stage_.s * kRowStageBytes);
    Hold(sums);
    FenceProducts();
#pragma unroll
    for (int step = 0; step < kScaledRange / 32; ++step) {
      WgmmaOfE4m3<8>::Multiply(sums, at.Behind(step * 32), x.Behind(step * 64), step != 0);
    }
    CommitProducts();
    AwaitProducts<0>();
    Hold(sums);
    __syncwarp();
    if (lane_ == 0) Arrive(barriers_.empty + stage_.s);
    stage_.Advance(kRowGroups);
    if (lane_ % 4 != 0 || range >= ranges_) return;
    const float scale = memory_.scales[row * ranges_ + range];
    RowScaledSum* to = memory_.sums + (buffer * ranges_ + range) * kRowTile + tile_row_;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float sum = part_ == 0 ? sums[i * 2] : sums[i * 2 + 1];
      to[i * 8] = {sum, __fmul_rn(scale, scales[i])};
    }
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
  RowScaledBarriers& barriers_;
  const int lane_ = threadIdx.x % kWarp, warp_ = threadIdx.x / kWarp;
  const int group_ = warp_ / 4, part_ = warp_ % 4 / 2;  // which range of a stage it has sums of
  const int tile_row_ = warp_ % 2 * 16 + lane_ / 4;     // and which row, with the eighth behind
  const int ranges_, first_;
  RowScaledTurn<Way> turn_;
  RingStage<kRowStages> stage_;
  int found_ = -1;  // the tile whose rows' scales these are
  const float* of_weight_[2] = {};
  float next_[2] = {};
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

// Grid: as many blocks as there are multiprocessors, or tiles. x begins on 16 bytes, and so do
// its rows. in.groups are ranges; a tile's columns are all there. in.x and in.weight are not read.
template <class Way>
__global__ void __launch_bounds__(kRowThreads, 1)
    RowScaledKernel(const __grid_constant__ CUtensorMap map_weight,
                    const __grid_constant__ CUtensorMap map_beside,
                    const ScaledParams<typename Way::Out> in, const RowScaledRows rows) {
#if BATON_HAS_WGMMA
  extern __shared__ __align__(1024) uint8_t shared[];
  __shared__ int expert_of[kMostRowPairs];
  __shared__ RowScaledBarriers barriers;
  const bool has_experts = in.starts != nullptr, is_feeder = RowScaledFeed<Way>::IsOne();
  const bool waits_first = has_experts && !rows.are_starts_early;
  RowScaledTiles<Way> tiles(in, rows, expert_of);
  if (threadIdx.x == kRowMultipliers) {
    barriers.Init();
    PrefetchMap(&map_weight);
    if (rows.beside.is_there) PrefetchMap(&map_beside);
  }
  if (!has_experts) tiles.SetRows(0, in.rows);
  if (has_experts && !waits_first) FindExperts(tiles, expert_of);
  __syncthreads();
  const RowScaledMemory memory(shared, in.groups, rows.chunk > 0 ? 2 : 1);
  RowScaledFeed<Way> feed(tiles, memory, barriers, &map_weight, &map_beside);
  if (is_feeder) feed.Begin(!waits_first);
  WaitForEarlierGrids();
  LetNextGridStart();
  if (waits_first) FindExperts(tiles, expert_of);
  __syncthreads();
  if (tiles.begin >= tiles.end) return;
  if (is_feeder) feed.Run();
  if (threadIdx.x < kRowMultipliers) RowScaledMultiply<Way>(tiles, memory, barriers).Run();
#endif
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_SCALED_ROW_CUH_
