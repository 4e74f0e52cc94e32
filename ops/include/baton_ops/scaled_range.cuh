// What threads that multiply do with a range of scaled_ring.cuh: read a weight's numbers and
// scales, make halves, begin the products, store a tile.
#ifndef BATON_OPS_SCALED_RANGE_CUH_
#define BATON_OPS_SCALED_RANGE_CUH_

#include "baton_ops/scaled_ring.cuh"
#include "baton_ops/scaled_store.cuh"

namespace baton_ops::cuda {

// What a lane has of a range of a warp's 16 rows: two rows', in each half of it.
struct TurnedNumbers {
  Sixteen at[2][2];  // by half, by row
};

// Where a warp's rows lie in a stage of the weight.
struct TurnedRows {
  int first, second;  // offsets of two rows' swizzled chunks of the first half
  __device__ TurnedRows(int warp_row, int lane) {
    const int row = warp_row + SlotRow(lane / 4), q = lane % 4;
    first = row * kScaledRange + (q ^ row % 8) * 16;
    second = (row + 1) * kScaledRange + (q ^ (row + 1) % 8) * 16;
  }
  // The other half's chunk is the fourth behind, which the swizzle keeps apart by one bit.
  __device__ __forceinline__ TurnedNumbers Load(const uint8_t* stage) const {
    const auto at = [&](int offset) { return *reinterpret_cast<const Sixteen*>(stage + offset); };
    return {{{at(first), at(second)}, {at(first ^ 64), at(second ^ 64)}}};
  }
};

// As the rows of eight products: of two words one by conversion, one by arithmetic.
__device__ __forceinline__ void ToHalves(const TurnedNumbers& numbers, uint32_t (&halves)[32]) {
#pragma unroll
  for (int word = 0; word < 8; ++word) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const uint32_t four = numbers.at[word / 4][row].at[word % 4];
      uint32_t pairs[2] = {};
      if (word % 2 == 0) {
        pairs[0] = HalvesOf(four);
        pairs[1] = HalvesOf(four >> 16);
      } else {
        HalvesOfFour(four, pairs);
      }
      halves[word * 4 + row] = pairs[0];
      halves[word * 4 + 2 + row] = pairs[1];
    }
  }
}

// The scales of a range: of the rows that a lane has sums of, and of its two of the weight.
template <int kColumns>
struct TurnedScales {
  float2 x[kColumns / 8];
  float weight[2];
  __device__ __forceinline__ TurnedScales(const float* of_x, const float* of_weight, int q)
      : weight{of_weight[0], of_weight[1]} {
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

// Begins the products of a range, of a warpgroup's rows of the weight and of what lies at x in
// shared memory: two groups of them, of which the second is the last product.
template <class Way>
__device__ __forceinline__ void BeginRange(uint32_t (&halves)[32], const UniformDescriptor& x,
                                           float (&sums)[Way::kColumns / 2]) {
  Hold(halves);
  Hold(sums);
  FenceProducts();
#pragma unroll
  for (int step = 0; step < 8; ++step) {
    const int bytes = step / 4 * (Way::kXBytes / 2) + step % 4 * 32;
    WgmmaOfHalves<Way::kColumns>::Multiply(sums, halves + step * 4, x.Behind(bytes), step != 0);
    if (step >= 6) CommitProducts();
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
