// x times a transposed weight, of any shape. Tiles pass through shared memory as fp32; each output
// is one thread's sum in ascending order of the shared dimension, whatever the tile's shape. Gated:
// half of a tile's columns are gates, half the ups of the same columns, which meet rounded.
#ifndef BATON_OPS_GENERIC_MATMUL_CUH_
#define BATON_OPS_GENERIC_MATMUL_CUH_

#include "baton_ops/gate.cuh"
#include "baton_ops/generic_tile.cuh"
#include "baton_ops/grid_order.cuh"

namespace baton_ops::cuda {

template <class E, class Out>
struct MatmulParams {
  const E* x;
  const E* weight;
  Out* out;
  int64_t x_stride;
  int64_t out_stride;
  int64_t rows;
  int64_t in;
  int64_t out_columns;
};

// silu(gate) * up, of sums as a matmul would store them.
template <class E>
__device__ __forceinline__ E Gated(float gate, float up) {
  return Rounded<E>(SiluMulOf(ToFloat(Rounded<E>(gate)), ToFloat(Rounded<E>(up))));
}

// Computes the tile that begins at row `top` of x and column `left` of `out`. `out_columns` are
// those of `out`, also where it is gated. kTurned: the weight is [in, out_columns].
template <class E, class Out, class Tile, bool kGated, bool kTurned = false>
__device__ __forceinline__ void ComputeTile(const MatmulParams<E, Out>& p, int64_t top,
                                            int64_t left) {
  __shared__ float xs[Tile::kDepth][Tile::kRows + 1];
  __shared__ float ws[Tile::kDepth][Tile::kColumns + 1];
  constexpr int kPer = Tile::kPerThread, kPerOut = kGated ? kPer / 2 : kPer;
  constexpr int kParts = kGated ? 2 : 1, kOutColumns = Tile::kColumns / kParts;
  static_assert(!kGated || kPer % 2 == 0, "a thread has a column's gate and up");
  static_assert(!kGated || !kTurned, "nothing has such a weight");
  const int across = threadIdx.x % Tile::kAcross, down = threadIdx.x / Tile::kAcross;
  const E* x = p.x + top * p.x_stride;
  const E* weight = p.weight + (kTurned ? left : left * p.in);
  float total[kPer][kPer] = {};
  for (int64_t range = 0; range < p.in; range += kMatmulRange) {
    float sum[kPer][kPer] = {};
    const int64_t end = min(range + kMatmulRange, p.in);
    for (int64_t first = range; first < end; first += Tile::kDepth) {
      FillTile<Tile::kRows, Tile::kDepth>(x, p.x_stride, p.rows - top, p.in, first, xs);
      if constexpr (kTurned) {
        FillTurnedTile<kOutColumns, Tile::kDepth>(weight, p.out_columns, p.out_columns - left, p.in,
                                                  first, ws);
      } else {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          FillTile<kOutColumns, Tile::kDepth>(weight + part * p.out_columns * p.in, p.in,
                                              p.out_columns - left, p.in, first, ws,
                                              part * kOutColumns);
        }
      }
      __syncthreads();
#pragma unroll 8
      for (int k = 0; k < Tile::kDepth; ++k) {
        float a[kPer], b[kPer];
#pragma unroll
        for (int i = 0; i < kPer; ++i) {
          a[i] = xs[k][down + i * Tile::kDown];
          b[i] = ws[k][across + i * Tile::kAcross];
        }
#pragma unroll
        for (int i = 0; i < kPer; ++i) {
#pragma unroll
          for (int j = 0; j < kPer; ++j) sum[i][j] = __fmaf_rn(a[i], b[j], sum[i][j]);
        }
      }
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
#pragma unroll
      for (int j = 0; j < kPer; ++j) total[i][j] = __fadd_rn(total[i][j], sum[i][j]);
    }
  }
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const int64_t row = top + down + i * Tile::kDown;
#pragma unroll
    for (int j = 0; j < kPerOut; ++j) {
      const int64_t column = left + across + j * Tile::kAcross;
      if (row >= p.rows || column >= p.out_columns) continue;
      Out& out = p.out[row * p.out_stride + column];
      if constexpr (kGated) {
        out = Gated<Out>(total[i][j], total[i][j + kPerOut]);
      } else {
        out = Rounded<Out>(total[i][j]);
      }
    }
  }
}

template <class Tile, bool kGated>
constexpr int64_t kTileColumns = kGated ? Tile::kColumns / 2 : Tile::kColumns;

// Grid: (tiles' columns, tiles' rows).
template <class E, class Out, class Tile, bool kGated>
__global__ void __launch_bounds__(kMatmulThreads) GenericMatmulKernel(MatmulParams<E, Out> p) {
  WaitForEarlierGrids();
  LetNextGridStart();
  ComputeTile<E, Out, Tile, kGated>(p, blockIdx.y * static_cast<int64_t>(Tile::kRows),
                                    blockIdx.x * kTileColumns<Tile, kGated>);
}

// Rows lie group by group from starts[group] on, and each group has its part of the weight. Grid:
// (tiles' columns, at least all groups' tiles' rows).
template <class E, class Out, class Tile, bool kGated>
__global__ void __launch_bounds__(kMatmulThreads)
    GenericGroupedKernel(MatmulParams<E, Out> p, const int32_t* starts, int groups) {
  __shared__ int place[2];  // the block's group, and its number among that one's tiles
  WaitForEarlierGrids();
  LetNextGridStart();
  if (threadIdx.x == 0) {
    int group = 0, nth = static_cast<int>(blockIdx.y);
    for (; group < groups; ++group) {
      const int tiles = (starts[group + 1] - starts[group] + Tile::kRows - 1) / Tile::kRows;
      if (nth < tiles) break;
      nth -= tiles;
    }
    place[0] = group;
    place[1] = nth;
  }
  __syncthreads();
  const int group = place[0];
  if (group == groups) return;  // the whole block
  const int64_t first = starts[group];
  p.rows = starts[group + 1] - first;
  p.x += first * p.x_stride;
  p.out += first * p.out_stride;
  p.weight += group * (kGated ? 2 : 1) * p.out_columns * p.in;
  ComputeTile<E, Out, Tile, kGated>(p, place[1] * static_cast<int64_t>(Tile::kRows),
                                    blockIdx.x * kTileColumns<Tile, kGated>);
}

// Few rows: a lane walks one row of the weight, and a block's warps walk a range each at a time.
constexpr int kFewWarps = 16;
constexpr int kFewVectors = 8;  // a lane's step: 128 bytes of its row, all asked for at once

// Adds columns first .. end - 1, at most a step, to the sums of kRows rows of x.
template <class E, int kRows>
__device__ __forceinline__ void AddStep(const E* weight, const E* const* x, int64_t first,
                                        int64_t end, float* sum) {
  using Vector = Packed<E, kPerVector<E>>;
  Vector w[kFewVectors];
#pragma unroll
  for (int v = 0; v < kFewVectors; ++v) {
    const int64_t at = first + v * kPerVector<E>;
    if (at < end) w[v] = *reinterpret_cast<const Vector*>(weight + at);
  }
#pragma unroll
  for (int v = 0; v < kFewVectors; ++v) {
    const int64_t at = first + v * kPerVector<E>;
    if (at >= end) break;
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const Vector a = *reinterpret_cast<const Vector*>(x[row] + at);
#pragma unroll
      for (int i = 0; i < kPerVector<E>; ++i) {
        sum[row] = __fmaf_rn(ToFloat(a.at[i]), ToFloat(w[v].at[i]), sum[row]);
      }
    }
  }
}

// Rows of x and of the weight are whole vectors. Grid: (32 outputs, or 16 gated ones, whose ups the
// upper lanes have; kRows rows).
template <class E, class Out, int kRows, bool kGated>
__global__ void __launch_bounds__(kFewWarps* kWarp) FewRowsMatmulKernel(MatmulParams<E, Out> p) {
  __shared__ float partial[kFewWarps][kRows][kWarp];
  WaitForEarlierGrids();
  LetNextGridStart();
  constexpr int64_t kStep = kFewVectors * kPerVector<E>;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  constexpr int kOutputs = kGated ? kWarp / 2 : kWarp;
  const int64_t column = blockIdx.x * static_cast<int64_t>(kOutputs) + lane % kOutputs;
  const int64_t top = blockIdx.y * static_cast<int64_t>(kRows);
  const int64_t before = lane / kOutputs * p.out_columns;
  const E* weight = p.weight + (before + min(column, p.out_columns - 1)) * p.in;
  const E* x[kRows];
#pragma unroll
  for (int row = 0; row < kRows; ++row) x[row] = p.x + min(top + row, p.rows - 1) * p.x_stride;
  float total = 0.0f;  // of row `warp`
  for (int64_t round = 0; round < p.in; round += kFewWarps * kMatmulRange) {
    const int64_t range = round + warp * kMatmulRange, end = min(range + kMatmulRange, p.in);
    float sum[kRows] = {};
    for (int64_t first = range; first < end; first += kStep) {
      AddStep<E, kRows>(weight, x, first, end, sum);
    }
#pragma unroll
    for (int row = 0; row < kRows; ++row) partial[warp][row][lane] = sum[row];
    __syncthreads();
    if (warp < kRows) {
      for (int i = 0; i < kFewWarps && round + i * kMatmulRange < p.in; ++i) {
        total = __fadd_rn(total, partial[i][warp][lane]);
      }
    }
    __syncthreads();
  }
  if (warp >= kRows || top + warp >= p.rows) return;  // the whole warp
  const float up = kGated ? __shfl_down_sync(kEveryLane, total, kWarp / 2) : 0.0f;
  if (column >= p.out_columns || lane >= kOutputs) return;
  Out& out = p.out[(top + warp) * p.out_stride + column];
  if constexpr (kGated) {
    out = Gated<Out>(total, up);
  } else {
    out = Rounded<Out>(total);
  }
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_GENERIC_MATMUL_CUH_
