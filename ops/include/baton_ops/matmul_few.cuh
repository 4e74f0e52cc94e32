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

#include "baton_ops/matmul_tile.cuh"

namespace baton_ops::cuda {

constexpr int kFewRows = 64, kFewConsumers = 128, kFewThreads = kFewConsumers + 32;
constexpr int kFewSharedBytes = 227 * 1024, kFewHeadBytes = 1024, kFewMostStages = 48;
constexpr int kBoxRowBytes = kBoxColumns * 2;
static_assert(2 * kFewMostStages * sizeof(uint64_t) <= kFewHeadBytes);

// Wide tiles need shorter stages for as many of them.
template <int kTileN>
constexpr int kFewBoxes = kTileN <= 48 ? 4 : 2;

// Stages of kBoxes boxes of x and as many of the weight; `rows` of x are loaded, a multiple of 8.
template <int kTileN>
struct FewRing {
  static constexpr int kBoxes = kFewBoxes<kTileN>, kWeightBytes = kTileN * kBoxRowBytes;
  uint8_t* bytes;
  uint64_t *full, *empty;
  int stages, rows;
  static __host__ __device__ int StageBytes(int rows) {
    return kBoxes * (rows * kBoxRowBytes + kWeightBytes);
  }
  // How many stages fit; the last may be read beyond its end.
  static int StagesFor(int rows) {
    const int stage = StageBytes(rows);
    const int read = (kFewRows + (kBoxes - 1) * rows) * kBoxRowBytes;
    const int beyond = read > stage ? read - stage : 0;
    const int fit = (kFewSharedBytes - kFewHeadBytes - beyond) / stage;
    return fit < kFewMostStages ? fit : kFewMostStages;
  }
  __device__ uint8_t* X(int s, int box) const {
    return bytes + s * StageBytes(rows) + box * rows * kBoxRowBytes;
  }
  __device__ uint8_t* Weight(int s, int box) const { return X(s, kBoxes) + box * kWeightBytes; }
};

// Where in the tiles of a block, and in the ring, a load or product is.
struct FewTurn {
  int tile, k = 0, s = 0, phase = 0;
  __device__ explicit FewTurn(int first) : tile(first) {}
  __device__ void Advance(int steps, int stages) {
    if (++k == steps) {
      k = 0;
      tile += gridDim.x;
    }
    if (++s == stages) {
      s = 0;
      phase ^= 1;
    }
  }
};

// What a block has to do: tiles of its number, and of every gridDim.x-th after it.
template <int kTileN>
struct FewShare {
  int tiles, steps, row_tiles;
  __device__ FewShare(int n, int k, int row_tiles)
      : steps(BoxesAlong(k) / kFewBoxes<kTileN>), row_tiles(row_tiles) {
    const int all = (n + kTileN - 1) / kTileN * row_tiles, mine = blockIdx.x, stride = gridDim.x;
    tiles = mine < all ? (all - 1 - mine) / stride + 1 : 0;
  }
  __device__ int Column(int tile) const { return tile / row_tiles * kTileN; }
  __device__ int Row(int tile, int rows) const { return tile % row_tiles * rows; }
};

template <int kTileN>
__device__ void FewProduce(const FewRing<kTileN>& ring, const CUtensorMap* map_x,
                           const CUtensorMap* map_weight, const FewShare<kTileN>& share) {
  constexpr int kBoxes = kFewBoxes<kTileN>;
  const int turns = share.tiles * share.steps, ahead = min(turns, ring.stages);
  const auto load_weight = [&](const FewTurn& t) {
    ExpectBytes(ring.full + t.s, ring.StageBytes(ring.rows));
    const int row = share.Column(t.tile);
    for (int box = 0; box < kBoxes; ++box) {
      const int column = (t.k * kBoxes + box) * kBoxColumns;
      if (share.row_tiles == 1) {
        LoadBoxOnce(ring.Weight(t.s, box), map_weight, column, row, ring.full + t.s);
      } else {
        LoadBox(ring.Weight(t.s, box), map_weight, column, row, ring.full + t.s);
      }
    }
  };
  const auto load_x = [&](const FewTurn& t) {
    const int row = share.Row(t.tile, ring.rows);
    for (int box = 0; box < kBoxes; ++box) {
      LoadBox(ring.X(t.s, box), map_x, (t.k * kBoxes + box) * kBoxColumns, row, ring.full + t.s);
    }
  };
  FewTurn turn(blockIdx.x), behind(blockIdx.x);
  for (int i = 0; i < ahead; ++i, turn.Advance(share.steps, ring.stages)) load_weight(turn);
  WaitForEarlierGrids();
  for (int i = 0; i < ahead; ++i, behind.Advance(share.steps, ring.stages)) load_x(behind);
  for (int i = ahead; i < turns; ++i, turn.Advance(share.steps, ring.stages)) {
    Await(ring.empty + turn.s, turn.phase ^ 1);
    load_weight(turn);
    load_x(turn);
  }
}

// Writes follow reads of x, and these the kernel before: nothing here waits for that itself.
template <int kTileN>
__device__ void FewConsume(const FewRing<kTileN>& ring, const FewShare<kTileN>& share,
                           const MatmulOutput& out) {
  constexpr int kBoxes = kFewBoxes<kTileN>;
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
  FewTurn turn(blockIdx.x);
  const auto release = [&](int s) {
    if (threadIdx.x == 0) Arrive(ring.empty + s);
  };
  for (int t = 0; t < share.tiles; ++t) {
    const int tile = turn.tile;
    float sums[kTileN / 2];
    int last = 0;
    for (int k = 0; k < share.steps; ++k) {
      Await(ring.full + turn.s, turn.phase);
      Hold(sums);
      FenceProducts();
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        const uint64_t x = Descriptor(ring.X(turn.s, box));
        const uint64_t weight = Descriptor(ring.Weight(turn.s, box));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          Wgmma<kTileN>::Multiply(sums, x + i * 2, weight + i * 2, (k | box | i) != 0);
        }
      }
      CommitProducts();
      // One stage's products stay under way; what those before read may be overwritten.
      AwaitProducts<1>();
      if (k > 0) release(last);
      last = turn.s;
      turn.Advance(share.steps, ring.stages);
    }
    AwaitProducts<0>();
    Hold(sums);
    release(last);
    const int first_row = share.Row(tile, ring.rows);
    MatmulOutput part = out;
    part.m = min(out.m, first_row + ring.rows);
    StoreTile<kTileN>(sums, part, first_row + row, share.Column(tile), lane % 4);
  }
}

template <int kTileN>
__global__ __launch_bounds__(kFewThreads,
                             1) void MatmulFewKernel(const __grid_constant__ CUtensorMap map_x,
                                                     const __grid_constant__ CUtensorMap map_weight,
                                                     const MatmulOutput out, int k, int row_tiles,
                                                     int rows, int stages) {
#if BATON_HAS_WGMMA
  extern __shared__ __align__(1024) uint8_t shared[];
  auto* full = reinterpret_cast<uint64_t*>(shared);
  const FewRing<kTileN> ring{shared + kFewHeadBytes, full, full + kFewMostStages, stages, rows};
  if (threadIdx.x == 0) {
    for (int s = 0; s < stages; ++s) {
      InitBarrier(ring.full + s, 1);
      InitBarrier(ring.empty + s, 1);
    }
    PublishBarriers();
  }
  if (threadIdx.x == kFewConsumers) {
    PrefetchMap(&map_x);
    PrefetchMap(&map_weight);
  }
  LetNextGridStart();
  __syncthreads();
  const FewShare<kTileN> share(out.n, k, row_tiles);
  if (threadIdx.x < kFewConsumers) {
    FewConsume(ring, share, out);
  } else if (threadIdx.x == kFewConsumers) {
    FewProduce(ring, &map_x, &map_weight, share);
  }
#endif
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_MATMUL_FEW_CUH_
