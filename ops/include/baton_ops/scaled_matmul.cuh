// out[m, n] = x[m, k] weight[n, k]^T of e4m3 numbers with float32 scales for each group along k, of
// any shape. Group after group from the first on: the fp32 sum of a group's products, in ranges of
// 128 in ascending order, times the row's scale, times the weight's, is added to the sum so far. So
// an output has the same bits whatever the tile and the rows. Products of two e4m3 numbers are
// exact.
#ifndef BATON_OPS_SCALED_MATMUL_CUH_
#define BATON_OPS_SCALED_MATMUL_CUH_

#include "baton_ops/e4m3.cuh"
#include "baton_ops/generic_tile.cuh"
#include "baton_ops/grid_order.cuh"

namespace baton_ops::cuda {

template <class Out>
struct ScaledParams {
  const E4m3* x;               // [rows, in]
  const float* x_scales;       // [rows, groups]
  const E4m3* weight;          // [out_columns, in]
  const float* weight_scales;  // [out_columns, groups]
  Out* out;
  int64_t out_stride;
  int64_t rows;
  int64_t in;
  int64_t out_columns;
  int64_t groups;
};

// Adds columns first .. end - 1, in steps of the tile's depth, to a thread's sums.
template <class Tile, class Out>
__device__ __forceinline__ void AddRange(const ScaledParams<Out>& p, int64_t top, int64_t left,
                                         int64_t first, int64_t end, float (*xs)[Tile::kRows + 1],
                                         float (*ws)[Tile::kColumns + 1],
                                         float (&sum)[Tile::kPerThread][Tile::kPerThread]) {
  const int across = threadIdx.x % Tile::kAcross, down = threadIdx.x / Tile::kAcross;
  constexpr int kPer = Tile::kPerThread;
  for (; first < end; first += Tile::kDepth) {
    FillTile<Tile::kRows, Tile::kDepth>(p.x + top * p.in, p.in, p.rows - top, p.in, first, xs);
    FillTile<Tile::kColumns, Tile::kDepth>(p.weight + left * p.in, p.in, p.out_columns - left, p.in,
                                           first, ws);
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
}

// Multiplies a thread's sums of one group with the scales of their rows and columns.
template <class Tile, class Out>
__device__ __forceinline__ void Scale(const ScaledParams<Out>& p, int64_t row, int64_t column,
                                      int64_t group,
                                      float (&sum)[Tile::kPerThread][Tile::kPerThread]) {
  constexpr int kPer = Tile::kPerThread;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const int64_t m = min(row + i * Tile::kDown, p.rows - 1);
    const float of_row = p.x_scales[m * p.groups + group];
#pragma unroll
    for (int j = 0; j < kPer; ++j) sum[i][j] = __fmul_rn(sum[i][j], of_row);
  }
#pragma unroll
  for (int j = 0; j < kPer; ++j) {
    const int64_t n = min(column + j * Tile::kAcross, p.out_columns - 1);
    const float of_column = p.weight_scales[n * p.groups + group];
#pragma unroll
    for (int i = 0; i < kPer; ++i) sum[i][j] = __fmul_rn(sum[i][j], of_column);
  }
}

// kIsWhole: there is one group; else a group is a range. Grid: (tiles' columns, tiles' rows).
template <class Out, class Tile, bool kIsWhole>
__global__ void __launch_bounds__(kMatmulThreads, 2) ScaledMatmulKernel(ScaledParams<Out> p) {
  __shared__ float xs[Tile::kDepth][Tile::kRows + 1];
  __shared__ float ws[Tile::kDepth][Tile::kColumns + 1];
  WaitForEarlierGrids();
  LetNextGridStart();
  constexpr int kPer = Tile::kPerThread;
  const int64_t top = blockIdx.y * static_cast<int64_t>(Tile::kRows);
  const int64_t left = blockIdx.x * static_cast<int64_t>(Tile::kColumns);
  const int64_t row = top + threadIdx.x / Tile::kAcross;
  const int64_t column = left + threadIdx.x % Tile::kAcross;
  float total[kPer][kPer] = {};
  for (int64_t range = 0; range < p.in; range += kMatmulRange) {
    float sum[kPer][kPer] = {};
    AddRange<Tile>(p, top, left, range, min(range + kMatmulRange, p.in), xs, ws, sum);
    if constexpr (!kIsWhole) Scale<Tile>(p, row, column, range / kMatmulRange, sum);
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
#pragma unroll
      for (int j = 0; j < kPer; ++j) total[i][j] = __fadd_rn(total[i][j], sum[i][j]);
    }
  }
  if constexpr (kIsWhole) Scale<Tile>(p, row, column, 0, total);
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const int64_t m = row + i * Tile::kDown;
#pragma unroll
    for (int j = 0; j < kPer; ++j) {
      const int64_t n = column + j * Tile::kAcross;
      if (m < p.rows && n < p.out_columns) p.out[m * p.out_stride + n] = Rounded<Out>(total[i][j]);
    }
  }
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_SCALED_MATMUL_CUH_
