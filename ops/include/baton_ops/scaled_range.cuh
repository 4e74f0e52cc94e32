// What threads that multiply do with a range of scaled_ring.cuh: begin its products, read its
// scales, store a tile.
#ifndef BATON_OPS_SCALED_RANGE_CUH_
#define BATON_OPS_SCALED_RANGE_CUH_

#include "baton_ops/scaled_ring.cuh"
#include "baton_ops/scaled_store.cuh"

namespace baton_ops::cuda {

constexpr int kScaledStep = 32;  // numbers of a range that a product takes

// Adds four sums times their scales, each rounded once for both.
__device__ __forceinline__ void AddScaled(float* total, const float* sums, float a, float b,
                                          float c, float d) {
  total[0] = __fmaf_rn(sums[0], a, total[0]);
  total[1] = __fmaf_rn(sums[1], b, total[1]);
  total[2] = __fmaf_rn(sums[2], c, total[2]);
  total[3] = __fmaf_rn(sums[3], d, total[3]);
}

// Two scales beside each other.
__device__ __forceinline__ float2 ScalePair(const float* at) {
  return *reinterpret_cast<const float2*>(at);
}

// The scales of a range of a turned tile: of the rows of x that a lane has sums of, from `first_x`
// on, times those of its two rows of the weight, `row` and the eighth behind.
template <class Way>
struct TurnedScales {
  static constexpr int kColumns = Way::kColumns;
  const float* of_x;
  float weight[2];
  ScaleKind kind;
  __device__ __forceinline__ TurnedScales(const float* scales, ScaleKind kind, int first_x, int row,
                                          int q)
      : of_x(scales + first_x + q * 2), weight{}, kind(kind) {
    if (kind == ScaleKind::kMade) return;
    weight[0] = scales[Way::kTileX + row];
    weight[1] = scales[Way::kTileX + row + 8];
  }
  __device__ __forceinline__ void AddTo(float (&total)[kColumns / 2],
                                        const float (&sums)[kColumns / 2]) const {
    if (kind == ScaleKind::kMade) {
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
        const float2 one = ScalePair(of_x + j * 8);
        const float2 other = Way::kGated ? ScalePair(of_x + Way::kTileX + j * 8) : one;
        AddScaled(total + j * 4, sums + j * 4, one.x, one.y, other.x, other.y);
      }
    } else {
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
        const float2 x = ScalePair(of_x + j * 8);
        AddScaled(total + j * 4, sums + j * 4, __fmul_rn(x.x, weight[0]), __fmul_rn(x.y, weight[0]),
                  __fmul_rn(x.x, weight[1]), __fmul_rn(x.y, weight[1]));
      }
    }
  }
};

// The same of a tile that is not turned: of a lane's rows of x, `row` and the eighth behind. Where
// the weight's are not of rows, that is all there is, or twice that for gates and for ups.
template <class Way>
struct StraightScales {
  static constexpr int kColumns = Way::kColumns, kParts = Way::kGated ? 2 : 1;
  const float* of_weight;
  float x[kParts][2];
  ScaleKind kind;
  __device__ __forceinline__ StraightScales(const float* scales, ScaleKind kind, int, int row,
                                            int q)
      : of_weight(scales + Way::kTileX + q * 2), kind(kind) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int behind = kind == ScaleKind::kMade ? part * Way::kTileX : 0;
      x[part][0] = scales[behind + row];
      x[part][1] = scales[behind + row + 8];
      if (kind != ScaleKind::kOfBlocks) continue;
      const float weight = scales[Way::kTileX + part * kTurnedPart];
      x[part][0] = __fmul_rn(x[part][0], weight);
      x[part][1] = __fmul_rn(x[part][1], weight);
    }
  }
  __device__ __forceinline__ void AddTo(float (&total)[kColumns / 2],
                                        const float (&sums)[kColumns / 2]) const {
    if (kind != ScaleKind::kOfRows) {
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
        const float (&of)[2] = x[j % kParts];
        AddScaled(total + j * 4, sums + j * 4, of[0], of[0], of[1], of[1]);
      }
    } else {
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
        const float2 weight = ScalePair(of_weight + j * 8);
        AddScaled(total + j * 4, sums + j * 4, __fmul_rn(x[0][0], weight.x),
                  __fmul_rn(x[0][0], weight.y), __fmul_rn(x[0][1], weight.x),
                  __fmul_rn(x[0][1], weight.y));
      }
    }
  }
};

// Begins the products of a range, of a warpgroup's rows and of what is their columns in shared
// memory, as one group.
template <int kColumns>
__device__ __forceinline__ void BeginRange(const UniformDescriptor& rows,
                                           const UniformDescriptor& columns,
                                           float (&sums)[kColumns / 2]) {
  constexpr int kSteps = kScaledRange / kScaledStep;
  Hold(sums);
  FenceProducts();
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    WgmmaOfE4m3<kColumns>::Multiply(sums, rows.Behind(step * kScaledStep),
                                    columns.Behind(step * kScaledStep), step != 0);
  }
  CommitProducts();
}

// Stores a tile's sums of a warp: of so many rows of x and of the weight's behind its first.
template <class Way>
__device__ __forceinline__ void StoreTurned(const float (&sums)[Way::kColumns / 2],
                                            const MatmulOutput& out, const TurnedPlace& place,
                                            int x_row, int weight_row, int lane) {
  MatmulOutput part = out;
  part.m = place.end_row;
  const int row = place.row + x_row;
  if constexpr (Way::kGated) {
    StoreScaledGates<Way::kColumns>(sums, part, row, place.column + weight_row / 2, lane);
  } else {
    StoreTurnedTile<Way::kColumns>(sums, part, row, place.column + weight_row, lane);
  }
}

// The same of a tile that is not turned, of a lane's rows of x: `row` and the eighth behind.
template <class Way>
__device__ __forceinline__ void StoreStraight(const float (&sums)[Way::kColumns / 2],
                                              const MatmulOutput& out, const TurnedPlace& place,
                                              int row, int q) {
  MatmulOutput part = out;
  part.m = place.end_row;
  if constexpr (Way::kGated) {
    StoreStraightGates<Way::kColumns>(sums, part, place.row + row, place.column, q);
  } else {
    StoreTile<Way::kColumns>(sums, part, place.row + row, place.column, q);
  }
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_SCALED_RANGE_CUH_
