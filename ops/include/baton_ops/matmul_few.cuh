// out[m, n] = x[m, k] weight[n, k]^T for few rows, in the order of matmul_tile.cuh.
//
// Time goes into reading the weight, so it is cut into columns of tiles that give every
// multiprocessor its share, and a ring takes what shared memory there is. A tile has 64 rows, but
// only the rows that exist are loaded: wgmma reads whatever lies behind them, and makes rows that
// nobody stores. More rows than 64 are cut into equal row tiles, and those of the same columns are
// computed at the same time, so that memory is read once. The weight does not depend on the kernel
// before, so a launch that overlaps that one fills its ring with it first.
#ifndef BATON_OPS_MATMUL_FEW_CUH_
#define BATON_OPS_MATMUL_FEW_CUH_

#include "baton_ops/gated_tile.cuh"
#include "baton_ops/matmul_tile.cuh"

namespace baton_ops::cuda {

// The warps behind the warpgroup load: one the weight, one x.
constexpr int kFewRows = 64, kFewConsumers = 128, kFewThreads = kFewConsumers + 64;
constexpr int kFewWeightThread = kFewConsumers, kFewRowsThread = kFewConsumers + 32;
constexpr int kFewSharedBytes = 227 * 1024, kFewHeadBytes = 1024, kFewMostStages = 40;
constexpr int kBoxRowBytes = kBoxColumns * 2;
static_assert(3 * kFewMostStages * sizeof(uint64_t) <= kFewHeadBytes);

// Wide tiles need shorter stages for as many of them.
template <int kTileN>
constexpr int kFewBoxes = kTileN <= 48    ? 4
                          : kTileN <= 128 ? 2
                                          : 1;

// Stages of kBoxes boxes of x and as many of the weight; `rows` of x are loaded, a multiple of 8.
// Both come by themselves: the weight before x is there.
template <int kTileN>
struct FewRing {
  static constexpr int kBoxes = kFewBoxes<kTileN>, kWeightBytes = kTileN * kBoxRowBytes;
  uint8_t* bytes;
  uint64_t *has_weight, *has_rows, *empty;
  int stages, rows;
  __device__ FewRing(uint8_t* head, int head_bytes, int stages, int rows)
      : bytes(head + head_bytes),
        has_weight(reinterpret_cast<uint64_t*>(head)),
        has_rows(has_weight + kFewMostStages),
        empty(has_rows + kFewMostStages),
        stages(stages),
        rows(rows) {}
  static __host__ __device__ int StageBytes(int rows) {
    return kBoxes * (rows * kBoxRowBytes + kWeightBytes);
  }
  // How many stages fit behind the head, of each of which so many bytes are read: of the last some
  // may lie beyond its end.
  static int StagesFor(int rows, int read, int head_bytes = kFewHeadBytes,
                       int shared_bytes = kFewSharedBytes) {
    const int stage = StageBytes(rows), beyond = read > stage ? read - stage : 0;
    const int fit = (shared_bytes - head_bytes - beyond) / stage;
    return fit < kFewMostStages ? fit : kFewMostStages;
  }
  __device__ uint8_t* X(int s, int box) const {
    return bytes + s * StageBytes(rows) + box * rows * kBoxRowBytes;
  }
  __device__ uint8_t* Weight(int s, int box) const { return X(s, kBoxes) + box * kWeightBytes; }
};

// Where a tile is: its rows of x and of the output, its columns of the output, and the weight's row
// that the first of them is.
struct FewPlace {
  int row, end_row, column, weight_row;
};

// How many of a launch's tiles are a block's: that of its number, and every gridDim.x-th after it.
__device__ __forceinline__ int TilesOfBlock(int all) {
  const int mine = blockIdx.x, stride = gridDim.x;
  return mine < all ? (all - 1 - mine) / stride + 1 : 0;
}

// Calls body with each number. The loop is kept short on request: between two launches of a kernel
// a step's weights drive its code out of the caches, so what is fetched of it counts.
template <bool kIsShort, class Body>
__device__ __forceinline__ void ForEachTurn(int from, int to, Body body) {
  if constexpr (kIsShort) {
#pragma unroll 1
    for (int i = from; i < to; ++i) body(i);
  } else {
    for (int i = from; i < to; ++i) body(i);
  }
}

// What a block has to do. Columns are those of the output, of which a gated tile has half as many
// as of the weight.
template <int kTileN, bool kGated>
struct FewShare {
  static constexpr int kOutN = kGated ? kTileN / 2 : kTileN;
  static constexpr bool kAreLoopsShort = true;
  int tiles, steps, stages, row_tiles, rows, m, n;
  __device__ FewShare(int m, int n, int k, int stages, int row_tiles, int rows)
      : tiles(TilesOfBlock((n + kOutN - 1) / kOutN * row_tiles)),
        steps(BoxesAlong(k) / kFewBoxes<kTileN>),
        stages(stages),
        row_tiles(row_tiles),
        rows(rows),
        m(m),
        n(n) {}
  __device__ bool IsWeightReadOnce() const { return row_tiles == 1; }
  __device__ int WeightRow(const FewPlace& place) const { return place.weight_row; }
  __device__ int RowOfX(const FewPlace& place) const { return place.row; }
  __device__ FewPlace Place(int tile) const {
    const int columns = tile / row_tiles, row = (tile - columns * row_tiles) * rows;
    return {row, min(m, row + rows), columns * kOutN, columns * kOutN};
  }
};

// Where in the tiles of a block, and in the ring, a load or product is.
template <class Share>
struct FewTurn {
  const Share& share;
  int tile = blockIdx.x, k = 0, s = 0, phase = 0;
  FewPlace place;
  __device__ explicit FewTurn(const Share& share) : share(share), place(share.Place(tile)) {}
  __device__ void Advance() {
    if (++s == share.stages) {
      s = 0;
      phase ^= 1;
    }
    if (++k < share.steps) return;
    k = 0;
    tile += gridDim.x;
    place = share.Place(tile);
  }
};

// Loads the weight, by one thread, as far ahead as the ring goes. Until the ring is full `window`
// stages are under way at most: small kernels that read memory meanwhile wait behind no more.
template <int kTileN, bool kGated, class Share>
__device__ void FewLoadWeight(const FewRing<kTileN>& ring, const CUtensorMap* map,
                              const Share& share, int window) {
  constexpr int kBoxes = kFewBoxes<kTileN>, kParts = kGated ? 2 : 1;
  const int turns = share.tiles * share.steps;
  FewTurn<Share> turn(share);
  ForEachTurn<Share::kAreLoopsShort>(0, turns, [&](int i) {
    if (i >= ring.stages) {
      Await(ring.empty + turn.s, turn.phase ^ 1);
    } else if (i >= window) {
      Await(ring.has_weight + i - window, 0);
    }
    uint64_t* const barrier = ring.has_weight + turn.s;
    ExpectBytes(barrier, kBoxes * ring.kWeightBytes);
    const int first_row = share.WeightRow(turn.place);
    for (int part_of_box = 0; part_of_box < kBoxes * kParts; ++part_of_box) {
      const int box = part_of_box / kParts, part = part_of_box % kParts;
      const int column = (turn.k * kBoxes + box) * kBoxColumns;
      const int row = first_row + part * share.n;
      uint8_t* to = ring.Weight(turn.s, box) + part * (ring.kWeightBytes / kParts);
      // Without a hint where it is read again: with one of evict_normal experts' products of many
      // rows took a twentieth longer on an H100, a seventh on an H200.
      if (share.IsWeightReadOnce()) {
        LoadBoxOnce(to, map, column, row, barrier);
      } else {
        LoadBox(to, map, column, row, barrier);
      }
    }
    turn.Advance();
  });
}

// Loads x, by one thread, once the kernel before is over. Who lets the next one start late does it
// then.
template <int kTileN, bool kLetsLate, class Share>
__device__ void FewLoadRows(const FewRing<kTileN>& ring, const CUtensorMap* map,
                            const Share& share) {
  constexpr int kBoxes = kFewBoxes<kTileN>;
  const int turns = share.tiles * share.steps;
  FewTurn<Share> turn(share);
  WaitForEarlierGrids();
  if constexpr (kLetsLate) LetNextGridStart();
  ForEachTurn<Share::kAreLoopsShort>(0, turns, [&](int i) {
    if (i >= ring.stages) Await(ring.empty + turn.s, turn.phase ^ 1);
    ExpectBytes(ring.has_rows + turn.s, kBoxes * ring.rows * kBoxRowBytes);
    for (int box = 0; box < kBoxes; ++box) {
      const int column = (turn.k * kBoxes + box) * kBoxColumns;
      LoadBox(ring.X(turn.s, box), map, column, share.RowOfX(turn.place), ring.has_rows + turn.s);
    }
    turn.Advance();
  });
}

// A tile whose rows are x's: the warpgroup's sums of it.
template <int kTileN, bool kGated>
struct FewTile {
  static constexpr bool kIsTurned = false;
  static constexpr int kRows = 0;  // any number
  float sums[kTileN / 2];

  // What is read of a stage, from its begin on: of the last box of x as many rows as wgmma has.
  static __host__ __device__ int ReadBytes(int rows) {
    return (kFewRows + (kFewBoxes<kTileN> - 1) * rows) * kBoxRowBytes;
  }
  __device__ __forceinline__ void Settle() { Hold(sums); }
  // Adds the product of the i-th 16 columns of a box, or begins with it.
  __device__ __forceinline__ void Multiply(uint64_t x, uint64_t weight, int i, bool adds) {
    Wgmma<kTileN>::Multiply(sums, x + i * 2, weight + i * 2, adds);
  }
  // Stores what `out` has rows of.
  __device__ __forceinline__ void Store(const MatmulOutput& out, const FewPlace& place) const {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
    if constexpr (kGated) {
      GatedTile<kTileN> gated;
      gated.Keep(sums);
      const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
      const int there = out.m - place.row - warp * 16;  // of the warp's rows, so many are there
      if (there > 0) gated.template Store<0, 2>(out, place.row + row, place.column, lane % 4);
      if (there > 8) gated.template Store<1, 2>(out, place.row + row, place.column, lane % 4);
    } else {
      StoreTile<kTileN>(sums, out, place.row + row, place.column, lane % 4);
    }
  }
};

// Where in the ring a warpgroup is. Between a stage's last product and the next one's first nothing
// is multiplied, so all that is the same for every stage is computed once, and what the next one
// needs while the one before is multiplied.
template <class Tile, int kTileN>
class FewStage {
 public:
  __device__ __forceinline__ explicit FewStage(const FewRing<kTileN>& ring)
      : stages_(ring.stages),
        rows_(ring.rows),
        has_weight_(__shfl_sync(~0u, SharedAddress(ring.has_weight), 0)),
        x_(ring.X(0, 0)),
        weight_(ring.Weight(0, 0)) {}

  // Waits for it, unless it was there when the one before was advanced from.
  __device__ __forceinline__ void Wait() const {
    if (is_there_) return;
    AwaitAt(Barrier(0, s_), phase_);
    AwaitAt(Barrier(1, s_), phase_);
  }
  __device__ __forceinline__ int Number() const { return s_; }
  // Descriptors of its boxes.
  __device__ __forceinline__ uint64_t X(int box) const {
    return x_.BehindVectors(s_ * Vectors() + box * (Rows() * kBoxRowBytes / 16));
  }
  __device__ __forceinline__ uint64_t Weight(int box) const {
    return weight_.BehindVectors(s_ * Vectors() + box * (FewRing<kTileN>::kWeightBytes / 16));
  }
  __device__ __forceinline__ void Advance() {
    if (++s_ == stages_) {
      s_ = 0;
      phase_ ^= 1;
    }
    is_there_ = HasComeAt(Barrier(0, s_), phase_) && HasComeAt(Barrier(1, s_), phase_);
  }
  // Gives a stage back.
  __device__ __forceinline__ void Release(int s) const {
    if (threadIdx.x == 0) ArriveAt(Barrier(2, s));
  }

 private:
  __device__ __forceinline__ int Rows() const { return Tile::kRows ? Tile::kRows : rows_; }
  __device__ __forceinline__ int Vectors() const {
    return FewRing<kTileN>::StageBytes(Rows()) / 16;
  }
  // A ring's: of its weight, of its rows, of that it is empty.
  __device__ __forceinline__ uint32_t Barrier(int which, int s) const {
    return has_weight_ + (which * kFewMostStages + s) * static_cast<int>(sizeof(uint64_t));
  }

  const int stages_, rows_;
  const uint32_t has_weight_;
  const UniformDescriptor x_, weight_;
  int s_ = 0, phase_ = 0;
  bool is_there_ = false;
};

// Writes follow reads of x, and these the kernel before: nothing here waits for that itself.
template <class Tile, int kTileN, class Share>
__device__ void FewConsume(const FewRing<kTileN>& ring, const Share& share,
                           const MatmulOutput& out) {
  constexpr int kBoxes = kFewBoxes<kTileN>;
  FewStage<Tile, kTileN> stage(ring);
  ForEachTurn<Share::kAreLoopsShort>(0, share.tiles, [&](int nth) {
    const FewPlace place = share.Place(blockIdx.x + nth * gridDim.x);
    Tile tile;
    int last = 0;
    ForEachTurn<Share::kAreLoopsShort>(0, share.steps, [&](int k) {
      stage.Wait();
      const int s = stage.Number();
      uint64_t x[kBoxes], weight[kBoxes];
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        x[box] = stage.X(box);
        weight[box] = stage.Weight(box);
      }
      tile.Settle();
      FenceProducts();
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
#pragma unroll
        for (int i = 0; i < 4; ++i) tile.Multiply(x[box], weight[box], i, (k | box | i) != 0);
        if (box == (kBoxes - 1) / 2) stage.Advance();
      }
      CommitProducts();
      // One stage's products stay under way; what those before read may be overwritten.
      AwaitProducts<1>();
      if (k > 0) stage.Release(last);
      last = s;
    });
    AwaitProducts<0>();
    tile.Settle();
    stage.Release(last);
    MatmulOutput part = out;
    part.m = place.end_row;
    tile.Store(part, place);
  });
}

// Makes the ring's barriers, by one thread.
template <int kTileN>
__device__ __forceinline__ void FewInit(const FewRing<kTileN>& ring) {
#pragma unroll 1
  for (int s = 0; s < ring.stages; ++s) {
    InitBarrier(ring.has_weight + s, 1);
    InitBarrier(ring.has_rows + s, 1);
    InitBarrier(ring.empty + s, 1);
  }
  PublishBarriers();
}

// A gated product lets the next grid start once the one before it is complete: so a mixture's
// experts, behind what all tokens share, find the choice made, whatever still runs. Until then its
// rings leave hardly any room.
template <int kTileN, bool kGated, class Tile>
__global__ __launch_bounds__(kFewThreads,
                             1) void MatmulFewKernel(const __grid_constant__ CUtensorMap map_x,
                                                     const __grid_constant__ CUtensorMap map_weight,
                                                     const MatmulOutput out, int k, int row_tiles,
                                                     int rows, int stages, int window) {
#if BATON_HAS_WGMMA
  extern __shared__ __align__(1024) uint8_t shared[];
  const FewRing<kTileN> ring(shared, kFewHeadBytes, stages, rows);
  if (threadIdx.x == 0) FewInit(ring);
  if (threadIdx.x == kFewWeightThread) PrefetchMap(&map_weight);
  if (threadIdx.x == kFewRowsThread) PrefetchMap(&map_x);
  if constexpr (!kGated) LetNextGridStart();
  __syncthreads();
  const FewShare<kTileN, kGated> share(out.m, out.n, k, stages, row_tiles, rows);
  if (threadIdx.x < kFewConsumers) {
    FewConsume<Tile>(ring, share, out);
  } else if (threadIdx.x == kFewWeightThread) {
    FewLoadWeight<kTileN, kGated>(ring, &map_weight, share, window);
  } else if (threadIdx.x == kFewRowsThread) {
    FewLoadRows<kTileN, kGated>(ring, &map_x, share);
  }
#endif
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_MATMUL_FEW_CUH_
