// The store of a tile of scaled_turned.cuh. Of a turned one, as matmul_turned.cuh's but gated of as
// few as sixteen rows of x, rows are the weight's, so a row of `out` lies across its columns; of a
// gated one eight rows are gates' and the next eight their ups'. `out` is bf16, on vectors.
#ifndef BATON_OPS_SCALED_STORE_CUH_
#define BATON_OPS_SCALED_STORE_CUH_

#include "baton_ops/matmul_turned.cuh"

namespace baton_ops::cuda {

// Stores a warp's sums of 16 of the weight's rows, gates and ups, as silu(gate) * up: 8 columns of
// `out` from `first_column` on. A column of the sums is a row of `out`, from `first_row` on.
template <int kColumns>
__device__ __forceinline__ void StoreScaledGates(const float (&sums)[kColumns / 2],
                                                 const MatmulOutput& out, int first_row,
                                                 int first_column, int lane) {
  if constexpr (kColumns >= 32) {
    StoreTurnedGated<kColumns>(sums, out, first_row, first_column, lane);
  } else {
#pragma unroll
    for (int at = 0; at < kColumns / 2; at += 4) {
      const uint32_t made =
          SiluMulPair(PackedPair(sums[at], sums[at + 1]), PackedPair(sums[at + 2], sums[at + 3]));
      StoreWord(out, first_row + at / 4 * 8 + lane / 4, first_column + lane % 4 * 2,
                TurnBlock(made));
    }
  }
}

// The same of a tile that is not turned, of rows `row` and `row` + 8, by lane q of a quad: blocks
// of eight columns are gates and ups in turns.
template <int kColumns>
__device__ __forceinline__ void StoreStraightGates(const float (&sums)[kColumns / 2],
                                                   const MatmulOutput& out, int row,
                                                   int first_column, int q) {
  constexpr int kBlocks = kColumns / 16;  // of what is stored
  static_assert(kBlocks % 4 == 0);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int j = 0; j < kBlocks; j += 4) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int gate = (j + i) * 8 + half * 2, up = gate + 4;
        words[i] =
            SiluMulPair(PackedPair(sums[gate], sums[gate + 1]), PackedPair(sums[up], sums[up + 1]));
      }
      StoreQuad(out, row + half * 8, first_column + j * 8, words, q);
    }
  }
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_SCALED_STORE_CUH_
