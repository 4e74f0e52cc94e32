// What threads that multiply do with a range of scaled_ring.cuh: begin its products, read its scales,
// store a tile.
#ifndef BATON_OPS_SCALED_RANGE_CUH_
#define BATON_OPS_SCALED_RANGE_CUH_

#include "baton_ops/scaled_ring.cuh"
#include "baton_ops/scaled_store.cuh"

namespace baton_ops::cuda {

constexpr int kScaledStep = 32;  // numbers of a range that a product takes

// The scales of a range: of the rows that a lane has sums of, and of its two of the weight, which
// are eight apart.
template <int kColumns>
struct TurnedScales {
  float2 x[kColumns / 8];
  float weight[2];
  __device__ __forceinline__ TurnedScales(const float* of_x, const float* of_weight, int q)
      : weight{of_weight[0], of_weight[8]} {
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      x[j] = *reinterpret_cast<const float2*>(of_x + j * 8 + q * 2);
    }
  }
  // A sum times the row's scale and then the weight's.
  __device__ __forceinline__ float Scaled(const float (&sums)[kColumns / 2], int i) const {
    const float2 of_x = x[i / 4];
    return __fmul_rn(__fmul_rn(sums[i], i % 2 ? of_x.y : of_x.x), weight[i / 2 % 2]);
  }
  // Adds such to the total.
  __device__ __forceinline__ void Add(const float (&sums)[kColumns / 2],
                                      float (&total)[kColumns / 2]) const {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) total[i] = __fadd_rn(total[i], Scaled(sums, i));
  }
};

// Begins the products of a range, of a warpgroup's rows of the weight and of x's in shared memory:
// two groups of them, of which the second is the last product.
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
    if (step >= kSteps - 2) CommitProducts();
  }
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
