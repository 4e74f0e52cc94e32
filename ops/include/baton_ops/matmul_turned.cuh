// The store of a turned tile: its rows are the weight's, so a row of `out` lies across its columns.
// Of a gated one eight rows are gates' and the next eight their ups': a thread has both.
#ifndef BATON_OPS_MATMUL_TURNED_CUH_
#define BATON_OPS_MATMUL_TURNED_CUH_

#include "baton_ops/gated_tile.cuh"

namespace baton_ops::cuda {

// Turns a block of 8 x 8 bf16 over: a lane gives and gets two neighbours of row lane / 4.
__device__ __forceinline__ uint32_t TurnBlock(uint32_t pair) {
  uint32_t turned;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(pair));
  return turned;
}

// Stores a warp's sums of 16 of the weight's rows, which are columns of `out`, from `first_column`
// on. A column of the sums is a row of `out`, from `first_row` on.
template <int kWidth>
__device__ __forceinline__ void StoreTurnedTile(const float (&sums)[kWidth / 2],
                                                const MatmulOutput& out, int first_row,
                                                int first_column, int lane) {
  constexpr int kBlocks = kWidth / 8;
  static_assert(kBlocks % 2 == 0);
  const int q = lane % 4;
  if (out.is_fp32) {
#pragma unroll
    for (int at = 0; at < kWidth / 2; ++at) {
      const int row = first_row + at / 4 * 8 + q * 2 + at % 2;
      const int column = first_column + at % 4 / 2 * 8 + lane / 4;
      if (row >= out.m || column >= out.n) continue;
      static_cast<float*>(out.data)[row * out.stride + column] = sums[at];
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < kBlocks; j += 2) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] = TurnBlock(PackedPair(sums[j * 4 + i * 2], sums[j * 4 + i * 2 + 1]));
    }
    // Lane q of a quad stores block q of the four: of rows j or j + 1, and columns of half q % 2.
    const int row = first_row + (j + q / 2) * 8 + lane / 4, column = first_column + q % 2 * 8;
    StoreQuad(out, row, column - q * 8, words, q);
  }
}

// The same of a gated tile: silu(gate) * up, of 8 columns of `out`, from `first_column` on.
template <int kWidth>
__device__ __forceinline__ void StoreTurnedGated(const float (&sums)[kWidth / 2],
                                                 const MatmulOutput& out, int first_row,
                                                 int first_column, int lane) {
  constexpr int kBlocks = kWidth / 8;
  static_assert(kBlocks % 4 == 0);
  const int q = lane % 4;
#pragma unroll
  for (int j = 0; j < kBlocks; j += 4) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = (j + i) * 4;
      const uint32_t gates = PackedPair(sums[at], sums[at + 1]),
                     ups = PackedPair(sums[at + 2], sums[at + 3]);
      words[i] = TurnBlock(SiluMulPair(gates, ups));
    }
    if (out.is_wide) {
      StoreQuad(out, first_row + (j + q) * 8 + lane / 4, first_column - q * 8, words, q);
      continue;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      StoreWord(out, first_row + (j + i) * 8 + lane / 4, first_column + q * 2, words[i]);
    }
  }
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_MATMUL_TURNED_CUH_
