// Up to eight rows of x the other way around: a tile's rows are the weight's, and x's rows its
// columns, so that a product of the tensor cores is 64 x 8 and not 64 x kTileN, of which all but
// eight rows would be for nobody. Such products follow each other sooner, and their code is
// shorter.
//
// An element is summed in the same order, whichever operand is which.
#ifndef BATON_OPS_FEW_TURNED_CUH_
#define BATON_OPS_FEW_TURNED_CUH_

#include "baton_ops/matmul_few.cuh"

namespace baton_ops::cuda {

constexpr int kTurnedRows = 8, kTurnedMostN = 128;

// A tile of kTileN of the weight's rows: by 64 of them, or by its gates and its ups, of which a
// thread has both of an element. Where there are fewer than 64, the products are also made of what
// lies behind them in shared memory, and nobody stores those.
template <int kTileN, bool kGated>
struct FewTurnedTile {
  static_assert(kTileN <= kTurnedMostN);
  static constexpr bool kIsTurned = true;
  static constexpr int kRows = kTurnedRows;  // that are loaded
  static constexpr int kStep = kGated ? kTileN / 2 : kFewRows;
  static constexpr int kParts = kGated ? 2 : (kTileN + kFewRows - 1) / kFewRows;
  float sums[kParts][4];

  static __host__ __device__ int ReadBytes(int rows) {
    constexpr int kBoxes = kFewBoxes<kTileN>;
    const int before = kBoxes * rows + (kBoxes - 1) * kTileN;
    return (before + (kParts - 1) * kStep + kFewRows) * kBoxRowBytes;
  }
  __device__ __forceinline__ void Settle() {
#pragma unroll
    for (int part = 0; part < kParts; ++part) Hold(sums[part]);
  }
  __device__ __forceinline__ void Multiply(uint64_t x, uint64_t weight, int i, bool adds) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const uint64_t rows = weight + part * (kStep * kBoxRowBytes >> 4);
      Wgmma<kTurnedRows>::Multiply(sums[part], rows + i * 2, x + i * 2, adds);
    }
  }
  // A lane has, of each part, two neighbours of x's rows for one of the weight's and for the eighth
  // behind it.
  __device__ __forceinline__ void Store(const MatmulOutput& out, const FewPlace& place) const {
    const int lane = threadIdx.x % 32, row = place.row + lane % 4 * 2;
    const int first = threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int column = first + half * 8, at = half * 2;
      if constexpr (kGated) {
        if (column >= kStep) continue;
        const uint32_t gates = PackedPair(sums[0][at], sums[0][at + 1]);
        const uint32_t ups = PackedPair(sums[1][at], sums[1][at + 1]);
        StoreRows(out, row, place.column + column, SiluMulPair(gates, ups));
      } else {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          const int n = part * kStep + column;
          if (n < kTileN) StoreSums(out, row, place.column + n, sums[part][at], sums[part][at + 1]);
        }
      }
    }
  }

 private:
  // Stores an element of each of two rows.
  static __device__ __forceinline__ void StoreRows(const MatmulOutput& out, int row, int column,
                                                   uint32_t words) {
    if (column >= out.n) return;
    uint16_t* to = static_cast<uint16_t*>(out.data) + row * out.stride + column;
    if (row < out.m) to[0] = static_cast<uint16_t>(words);
    if (row + 1 < out.m) to[out.stride] = static_cast<uint16_t>(words >> 16);
  }
  static __device__ __forceinline__ void StoreSums(const MatmulOutput& out, int row, int column,
                                                   float low, float high) {
    if (!out.is_fp32) return StoreRows(out, row, column, PackedPair(low, high));
    if (column >= out.n) return;
    float* to = static_cast<float*>(out.data) + row * out.stride + column;
    if (row < out.m) to[0] = low;
    if (row + 1 < out.m) to[out.stride] = high;
  }
};

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_FEW_TURNED_CUH_
