// A warp's part of a product of e4m3 numbers: blocks of 16 rows of x times 32 rows of the weight,
// 64 columns at a time, straight from memory into registers. Lane l has 16 of the 64 columns, those
// from l % 4 * 16 on, of rows and columns as mma.cuh says; which of the depth a lane has is another
// order than memory's, and the same for both operands.
#ifndef BATON_OPS_SCALED_TILE_CUH_
#define BATON_OPS_SCALED_TILE_CUH_

#include "baton_ops/gate.cuh"
#include "baton_ops/mma.cuh"
#include "baton_ops/values.cuh"

namespace baton_ops::cuda {

constexpr int kScaledBlockRows = 16, kScaledTiles = 4, kScaledTileColumns = 8;

template <class Out>
struct ScaledParams {
  const uint8_t* x;            // [rows, in]
  const float* x_scales;       // [rows, groups]
  const uint8_t* weight;       // [out_columns, in]; gated: gates, then as many ups
  const float* weight_scales;  // [out_columns >> scale_shift, groups]
  Out* out;
  int64_t out_stride;
  int rows;  // of out
  int in;
  int out_columns;  // of out
  int groups;
  const int32_t* row;     // which row of x each is, or null: that of its number
  const int32_t* starts;  // of experts: where the rows of each begin; or null: there are none
  int experts;
  int scale_shift;  // rows of the weight that have a scale in common, as a power of two
};

using Numbers = Packed<uint32_t, 4>;  // 16 of them

// Reads columns first .. first + 15 of a row; those beyond `columns` are zeros. kWide: they all lie
// behind or none does, and rows lie on 16 bytes.
template <bool kWide>
__device__ __forceinline__ Numbers LoadNumbers(const uint8_t* row, int first, int columns) {
  Numbers numbers = {};
  if constexpr (kWide) {
    if (first < columns) numbers = *reinterpret_cast<const Numbers*>(row + first);
  } else {
#pragma unroll 1  // else a tile's bytes want more registers than there are
    for (int word = 0; word < 4; ++word) {
      uint32_t four = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = first + word * 4 + i;
        if (at < columns) four |= static_cast<uint32_t>(row[at]) << 8 * i;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i == word) numbers.at[i] = four;
      }
    }
  }
  return numbers;
}

// silu(gate) * up, of sums as they would be stored.
template <class Out>
__device__ __forceinline__ Out ScaledGate(float gate, float up) {
  return Rounded<Out>(SiluMulOf(ToFloat(Rounded<Out>(gate)), ToFloat(Rounded<Out>(up))));
}

// Where a warp's tile is: from row `top` and column `left` of the output on.
template <class Out, int kBlocks, bool kGated, bool kWide>
struct ScaledTile {
  static constexpr int kOutColumns = kScaledTiles * kScaledTileColumns / (kGated ? 2 : 1);
  const ScaledParams<Out>& p;
  int top, left;
  int group, quarter;  // lane / 4, lane % 4
  int x[kBlocks][2];   // rows of x that the lane reads

  __device__ ScaledTile(const ScaledParams<Out>& p, int top, int left)
      : p(p), top(top), left(left), group(threadIdx.x % kWarp / 4), quarter(threadIdx.x % 4) {}

  // Rows behind the last are read as it is, and not written.
  __device__ __forceinline__ void FindRows() {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = min(top + block * kScaledBlockRows + half * 8 + group, p.rows - 1);
        x[block][half] = p.row == nullptr ? row : p.row[row];
      }
    }
  }
  // The weight's row that is this column of a tile; columns behind the last are read as it is.
  __device__ __forceinline__ int WeightRow(int tile, int column) const {
    const int place = tile * kScaledTileColumns + column;
    if constexpr (kGated) {
      const int at = min(left + place % kOutColumns, p.out_columns - 1);
      return place / kOutColumns * p.out_columns + at;
    }
    return min(left + place, p.out_columns - 1);
  }
};

// What a lane has of 64 columns.
template <int kBlocks>
struct ScaledHalf {
  Numbers x[kBlocks][2], weight[kScaledTiles];
};

template <class Out, int kBlocks, bool kGated, bool kWide>
__device__ __forceinline__ void LoadWeight(const ScaledTile<Out, kBlocks, kGated, kWide>& tile,
                                           int first, ScaledHalf<kBlocks>& half) {
  const int at = first + tile.quarter * 16;
#pragma unroll
  for (int i = 0; i < kScaledTiles; ++i) {
    const int64_t row = tile.WeightRow(i, tile.group);
    half.weight[i] = LoadNumbers<kWide>(tile.p.weight + row * tile.p.in, at, tile.p.in);
  }
}

template <class Out, int kBlocks, bool kGated, bool kWide>
__device__ __forceinline__ void LoadX(const ScaledTile<Out, kBlocks, kGated, kWide>& tile,
                                      int first, ScaledHalf<kBlocks>& half) {
  const int at = first + tile.quarter * 16;
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t row = tile.x[block][i];
      half.x[block][i] = LoadNumbers<kWide>(tile.p.x + row * tile.p.in, at, tile.p.in);
    }
  }
}

// Adds 64 columns to the sums, 16 at a time.
template <int kBlocks>
__device__ __forceinline__ void AddHalf(const ScaledHalf<kBlocks>& half,
                                        float (&sums)[kBlocks][kScaledTiles][4]) {
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    uint32_t b[kScaledTiles][2];
#pragma unroll
    for (int i = 0; i < kScaledTiles; ++i) {
      b[i][0] = HalvesOf(half.weight[i].at[word]);
      b[i][1] = HalvesOf(half.weight[i].at[word] >> 16);
    }
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const uint32_t upper = half.x[block][0].at[word], lower = half.x[block][1].at[word];
      const uint32_t a[4] = {HalvesOf(upper), HalvesOf(lower), HalvesOf(upper >> 16),
                             HalvesOf(lower >> 16)};
#pragma unroll
      for (int i = 0; i < kScaledTiles; ++i) AddProduct(sums[block][i], a, b[i]);
    }
  }
}

// The scales of one group, as a lane needs them for its sums.
template <int kBlocks>
struct TileScales {
  float x[kBlocks][2], weight[kScaledTiles][2];
};

template <class Out, int kBlocks, bool kGated, bool kWide>
__device__ __forceinline__ TileScales<kBlocks> LoadScales(
    const ScaledTile<Out, kBlocks, kGated, kWide>& tile, int group) {
  const ScaledParams<Out>& p = tile.p;
  group = min(group, p.groups - 1);
  TileScales<kBlocks> scales;
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t row = tile.x[block][i];
      scales.x[block][i] = p.x_scales[row * p.groups + group];
    }
  }
#pragma unroll
  for (int i = 0; i < kScaledTiles; ++i) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int64_t row = tile.WeightRow(i, tile.quarter * 2 + j);
      scales.weight[i][j] = p.weight_scales[(row >> p.scale_shift) * p.groups + group];
    }
  }
  return scales;
}

// By the row's scale first.
template <int kBlocks>
__device__ __forceinline__ void Scale(const TileScales<kBlocks>& scales,
                                      float (&sums)[kBlocks][kScaledTiles][4]) {
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
    for (int i = 0; i < kScaledTiles; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float scaled = __fmul_rn(sums[block][i][j], scales.x[block][j / 2]);
        sums[block][i][j] = __fmul_rn(scaled, scales.weight[i][j % 2]);
      }
    }
  }
}

// Finds the tile of so many rows that is `nth` of all experts', by whole warps; leaves in `p` what
// its expert has. Returns the tile's first row there, or -1 where there are fewer tiles.
template <class Out>
__device__ __forceinline__ int FindTile(ScaledParams<Out>& p, bool is_gated, int rows, int nth) {
  const int lane = threadIdx.x % kWarp;
  for (int first = 0; first < p.experts; first += kWarp) {
    const int mine = first + lane, is_there = mine < p.experts;
    const int begin = is_there ? p.starts[mine] : 0, end = is_there ? p.starts[mine + 1] : 0;
    const int tiles = (end - begin + rows - 1) / rows;
    int up_to = tiles;
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2) {
      const int other = __shfl_up_sync(kEveryLane, up_to, distance);
      if (lane >= distance) up_to += other;
    }
    const int all = __shfl_sync(kEveryLane, up_to, kWarp - 1);
    if (nth >= all) {
      nth -= all;
      continue;
    }
    const int found = __reduce_add_sync(kEveryLane, up_to <= nth ? 1u : 0u);
    nth -= __shfl_sync(kEveryLane, up_to - tiles, found);
    const int64_t start = __shfl_sync(kEveryLane, begin, found);
    const int64_t weight_row =
        static_cast<int64_t>(first + found) * (is_gated ? 2 : 1) * p.out_columns;
    p.rows = __shfl_sync(kEveryLane, end - begin, found);
    p.weight += weight_row * p.in;
    p.weight_scales += (weight_row >> p.scale_shift) * p.groups;
    p.out += start * p.out_stride;
    if (p.row != nullptr) {
      p.row += start;
    } else {
      p.x += start * p.in;
      p.x_scales += start * p.groups;
    }
    return nth * rows;
  }
  return -1;
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_SCALED_TILE_CUH_
