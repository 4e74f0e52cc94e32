// What threads that multiply do with a range of scaled_ring.cuh: begin its products, read its scales,
// store a tile.
#ifndef BATON_OPS_SCALED_RANGE_CUH_
#define BATON_OPS_SCALED_RANGE_CUH_

#include "baton_ops/scaled_ring.cuh"
#include "baton_ops/scaled_store.cuh"

namespace baton_ops::cuda {

constexpr int kScaledStep = 32;  // numbers of a range that a product takes

// The scales of a range: of the rows of x that a lane has sums of, times those of its two rows of the
// weight, which are eight apart. Either they are made, for both of these, or they are made here.
template <class Way>
struct TurnedScales {
  static constexpr int kColumns = Way::kColumns;
  const float* of_x;
  float weight[2];
  bool are_made;
  __device__ __forceinline__ TurnedScales(const float* scales, bool are_made, int first_x, int row,
                                          int q)
      : of_x(scales + first_x + q * 2), weight{}, are_made(are_made) {
    if (are_made) return;
    weight[0] = scales[Way::kTileX + row];
    weight[1] = scales[Way::kTileX + row + 8];
  }
  // Adds sums times their scale, rounded once for both.
  __device__ __forceinline__ void AddTo(float (&total)[kColumns / 2],
                                        const float (&sums)[kColumns / 2]) const {
    if (are_made) {
#pragma unroll
      for (int i = 0; i < kColumns / 2; i += 4) {
        const float2 one = At(i / 4), other = Way::kGated ? At(i / 4 + Way::kTileX / 8) : one;
        AddFour(total, sums, i, one.x, one.y, other.x, other.y);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kColumns / 2; i += 4) {
        const float2 x = At(i / 4);
        AddFour(total, sums, i, __fmul_rn(x.x, weight[0]), __fmul_rn(x.y, weight[0]),
                __fmul_rn(x.x, weight[1]), __fmul_rn(x.y, weight[1]));
      }
    }
  }

 private:
  // Of eight rows of x the lane's two.
  __device__ __forceinline__ float2 At(int nth) const {
    return *reinterpret_cast<const float2*>(of_x + nth * 8);
  }
  static __device__ __forceinline__ void AddFour(float (&total)[kColumns / 2],
                                                 const float (&sums)[kColumns / 2], int i, float a,
                                                 float b, float c, float d) {
    total[i] = __fmaf_rn(sums[i], a, total[i]);
    total[i + 1] = __fmaf_rn(sums[i + 1], b, total[i + 1]);
    total[i + 2] = __fmaf_rn(sums[i + 2], c, total[i + 2]);
    total[i + 3] = __fmaf_rn(sums[i + 3], d, total[i + 3]);
  }
};

// Begins the products of a range, of a warpgroup's rows of the weight and of x's in shared memory,
// as one group.
template <int kColumns>
__device__ __forceinline__ void BeginRange(const UniformDescriptor& weight,
                                           const UniformDescriptor& x,
                                           float (&sums)[kColumns / 2]) {
  constexpr int kSteps = kScaledRange / kScaledStep;
  Hold(sums);
  FenceProducts();
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    WgmmaOfE4m3<kColumns>::Multiply(sums, weight.Behind(step * kScaledStep),
                                    x.Behind(step * kScaledStep), step != 0);
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
    StoreScaled<Way::kColumns>(sums, part, row, place.column + weight_row, lane);
  }
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_SCALED_RANGE_CUH_
