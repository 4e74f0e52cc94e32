// out[m, n] = x[m, k] weight[n, k]^T of e4m3 numbers with float32 scales for each group along k, of
// any shape. Range of 128 after range from the first on: the sum of its products, by the tensor
// cores in steps of 16 in one order (scaled_tile.cuh), times the row's scale, times the weight's,
// is added to the sum so far; where a row is one group, the ranges are added and the sum is scaled.
// So an output has the same bits whatever the one of these kernels, the tile and the rows. Gated:
// silu(gate) * up of both sums, rounded. Of experts each row has the bits of a product with its
// expert's part alone.
//
// Few rows: what takes time is reading the weight once. A block's warps have a range each, for all
// of 16 or 32 rows and 32 columns, and the next one's numbers are on their way while the block adds
// these up in order. Many rows: each warp has 32 x 32 outputs and goes through all ranges.
#ifndef BATON_OPS_SCALED_MATMUL_CUH_
#define BATON_OPS_SCALED_MATMUL_CUH_

#include "baton_ops/gate.cuh"
#include "baton_ops/grid_order.cuh"
#include "baton_ops/scaled_tile.cuh"

namespace baton_ops::cuda {

constexpr int kScaledWarps = 8, kScaledThreads = kScaledWarps * kWarp;
constexpr int kSplitColumns = kScaledTiles * kScaledTileColumns, kSplitPitch = kSplitColumns + 8;

// Adds what the block's warps made of their ranges of this round, in order. A thread has of each
// block of rows one row and two columns, half a tile's columns apart.
template <int kBlocks>
__device__ __forceinline__ void AddRanges(
    const float (*partial)[kBlocks * kScaledBlockRows][kSplitPitch], int ranges,
    float (&total)[kBlocks][2]) {
  const int row = threadIdx.x / 16, column = threadIdx.x % 16;
  for (int i = 0; i < min(ranges, kScaledWarps); ++i) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float each = partial[i][block * kScaledBlockRows + row][half * 16 + column];
        total[block][half] = __fadd_rn(total[block][half], each);
      }
    }
  }
}

template <class Out, bool kGated>
__device__ __forceinline__ void StoreSplit(const ScaledParams<Out>& p, int row, int left,
                                           float (&total)[2]) {
  const int column = left + static_cast<int>(threadIdx.x % 16);
  if (row >= p.rows) return;
  const int64_t of_x = p.row == nullptr ? row : p.row[row];
  if (p.groups == 1 && p.in > kScaledRange) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = min(kGated ? column : column + half * 16, p.out_columns - 1);
      const float scaled = __fmul_rn(total[half], p.x_scales[of_x]);
      total[half] = __fmul_rn(scaled, p.weight_scales[kGated ? half * p.out_columns + at : at]);
    }
  }
  Out* out = p.out + static_cast<int64_t>(row) * p.out_stride;
  if constexpr (kGated) {
    if (column < p.out_columns) out[column] = ScaledGate<Out>(total[0], total[1]);
  } else {
    if (column < p.out_columns) out[column] = Rounded<Out>(total[0]);
    if (column + 16 < p.out_columns) out[column + 16] = Rounded<Out>(total[1]);
  }
}

// Grid: (tiles of rows, of all experts if there are some; tiles of columns).
template <class Out, int kBlocks, bool kGated, bool kWide>
__global__ void __launch_bounds__(kScaledThreads, kBlocks == 1 && kWide ? 2 : 1)
    ScaledSplitKernel(ScaledParams<Out> p) {
  __shared__ float partial[kScaledWarps][kBlocks * kScaledBlockRows][kSplitPitch];
  using Tile = ScaledTile<Out, kBlocks, kGated, kWide>;
  int top = static_cast<int>(blockIdx.x) * (kBlocks * kScaledBlockRows);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const bool has_experts = p.starts != nullptr, is_whole = p.groups == 1 && p.in > kScaledRange;
  if (has_experts) {
    WaitForEarlierGrids();
    top = FindTile(p, kGated, kBlocks * kScaledBlockRows, blockIdx.x);
  }
  if (top < 0) return;  // the whole block
  Tile tile(p, top, static_cast<int>(blockIdx.y) * Tile::kOutColumns);
  ScaledHalf<kBlocks> halves[2];
  int range = warp * kScaledRange;
  LoadWeight(tile, range, halves[0]);
  LoadWeight(tile, range + kScaledHalf, halves[1]);
  if (!has_experts) WaitForEarlierGrids();
  LetNextGridStart();
  tile.FindRows();
  float total[kBlocks][2] = {};
  LoadX(tile, range, halves[0]);
  LoadX(tile, range + kScaledHalf, halves[1]);
  TileScales<kBlocks> scales = LoadScales(tile, range / kScaledRange);
  for (int round = 0; round < p.in; round += kScaledWarps * kScaledRange) {
    float sums[kBlocks][kScaledTiles][4] = {};
    AddHalf(halves[0], sums);
    AddHalf(halves[1], sums);
    if (!is_whole) Scale(scales, sums);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < kScaledTiles; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int row = block * kScaledBlockRows + j / 2 * 8 + lane / 4;
          partial[warp][row][i * kScaledTileColumns + lane % 4 * 2 + j % 2] = sums[block][i][j];
        }
      }
    }
    range += kScaledWarps * kScaledRange;
    LoadWeight(tile, range, halves[0]);
    LoadWeight(tile, range + kScaledHalf, halves[1]);
    LoadX(tile, range, halves[0]);
    LoadX(tile, range + kScaledHalf, halves[1]);
    scales = LoadScales(tile, range / kScaledRange);
    __syncthreads();
    AddRanges<kBlocks>(partial, (p.in - round + kScaledRange - 1) / kScaledRange, total);
    __syncthreads();
  }
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    const int row = top + block * kScaledBlockRows + static_cast<int>(threadIdx.x / 16);
    StoreSplit<Out, kGated>(p, row, tile.left, total[block]);
  }
}

constexpr int kManyBlocks = 2;  // of a warp's rows
constexpr int kManyDown = 4, kManyAcross = kScaledWarps / kManyDown;
constexpr int kManyRows = kManyDown * kManyBlocks * kScaledBlockRows;

template <class Out, bool kGated, class Tile>
__device__ __forceinline__ void StoreMany(const Tile& tile,
                                          const float (&total)[kManyBlocks][kScaledTiles][4]) {
  const ScaledParams<Out>& p = tile.p;
#pragma unroll
  for (int block = 0; block < kManyBlocks; ++block) {
#pragma unroll
    for (int i = 0; i < (kGated ? kScaledTiles / 2 : kScaledTiles); ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int row = tile.top + block * kScaledBlockRows + j / 2 * 8 + tile.group;
        const int column = tile.left + i * kScaledTileColumns + tile.quarter * 2 + j % 2;
        if (row >= p.rows || column >= p.out_columns) continue;
        Out& out = p.out[static_cast<int64_t>(row) * p.out_stride + column];
        if constexpr (kGated) {
          out = ScaledGate<Out>(total[block][i][j], total[block][i + kScaledTiles / 2][j]);
        } else {
          out = Rounded<Out>(total[block][i][j]);
        }
      }
    }
  }
}

// Grid: as for few rows; blocks have kManyRows rows, and kManyAcross warps' columns.
template <class Out, bool kGated>
__global__ void __launch_bounds__(kScaledThreads, 1) ScaledManyKernel(ScaledParams<Out> p) {
  using Tile = ScaledTile<Out, kManyBlocks, kGated, true>;
  const int warp = threadIdx.x / kWarp;
  const bool is_whole = p.groups == 1 && p.in > kScaledRange;
  WaitForEarlierGrids();
  LetNextGridStart();
  int top = static_cast<int>(blockIdx.x) * kManyRows;
  if (p.starts != nullptr) top = FindTile(p, kGated, kManyRows, blockIdx.x);
  if (top < 0) return;  // the whole block
  top += warp / kManyAcross * (kManyBlocks * kScaledBlockRows);
  const int across = static_cast<int>(blockIdx.y) * kManyAcross + warp % kManyAcross;
  if (top >= p.rows || across * Tile::kOutColumns >= p.out_columns) return;  // the whole warp
  Tile tile(p, top, across * Tile::kOutColumns);
  tile.FindRows();
  float total[kManyBlocks][kScaledTiles][4] = {};
  ScaledHalf<kManyBlocks> even, odd;
  LoadWeight(tile, 0, even);
  LoadX(tile, 0, even);
  for (int range = 0; range < p.in; range += kScaledRange) {
    LoadWeight(tile, range + kScaledHalf, odd);
    LoadX(tile, range + kScaledHalf, odd);
    float sums[kManyBlocks][kScaledTiles][4] = {};
    AddHalf(even, sums);
    const TileScales<kManyBlocks> scales = LoadScales(tile, range / kScaledRange);
    LoadWeight(tile, range + kScaledRange, even);
    LoadX(tile, range + kScaledRange, even);
    AddHalf(odd, sums);
    if (!is_whole) Scale(scales, sums);
#pragma unroll
    for (int block = 0; block < kManyBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < kScaledTiles; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          total[block][i][j] = __fadd_rn(total[block][i][j], sums[block][i][j]);
        }
      }
    }
  }
  if (is_whole) Scale(LoadScales(tile, 0), total);
  StoreMany<Out, kGated>(tile, total);
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_SCALED_MATMUL_CUH_
