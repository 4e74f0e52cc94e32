// What becomes of a tile whose columns are half gates, half ups: silu(gate) * up, half as wide.
//
// A tile of the weight is as many of its gates' rows, and behind them as many of its ups', so that
// a thread has both of a column. They are rounded to bf16 before they meet, as if a matmul had
// stored them: the bits are those of the matmul and the activation one after the other.
#ifndef BATON_OPS_GATED_TILE_CUH_
#define BATON_OPS_GATED_TILE_CUH_

#include "baton_ops/gate.cuh"
#include "baton_ops/matmul_tile.cuh"

namespace baton_ops::cuda {

// Two neighbours in a word of each.
__device__ __forceinline__ uint32_t SiluMulPair(uint32_t gates, uint32_t ups) {
  const auto low = [](uint32_t word) { return __uint_as_float(word << 16); };
  const auto high = [](uint32_t word) { return __uint_as_float(word & 0xffff0000u); };
  return PackedPair(SiluMulInLine(low(gates), low(ups)), SiluMulInLine(high(gates), high(ups)));
}

// Stores two neighbours of a row, wherever it begins.
__device__ __forceinline__ void StoreWord(const MatmulOutput& out, int row, int column,
                                          uint32_t word) {
  if (row >= out.m || column >= out.n) return;
  uint16_t* to = static_cast<uint16_t*>(out.data) + row * out.stride + column;
  if (out.is_wide) {
    *reinterpret_cast<uint32_t*>(to) = word;
  } else {
    to[0] = static_cast<uint16_t>(word);
    to[1] = static_cast<uint16_t>(word >> 16);
  }
}

// A warpgroup's sums, rounded, of kWidth columns: of a lane those of rows `row` and `row` + 8.
template <int kWidth>
struct GatedTile {
  // Blocks of 8 columns: four of them are stored together, what is left over one by one.
  static constexpr int kBlocks = kWidth / 16, kQuads = kBlocks / 4, kSingles = kBlocks % 4;
  static constexpr int kUnits = 2 * (kQuads + kSingles);
  uint32_t gates[2 * kBlocks] = {}, ups[2 * kBlocks] = {};

  __device__ __forceinline__ void Keep(const float (&sums)[kWidth / 2]) {
#pragma unroll
    for (int i = 0; i < 2 * kBlocks; ++i) {
      const int at = i % kBlocks * 4 + i / kBlocks * 2, up = at + kBlocks * 4;
      gates[i] = PackedPair(sums[at], sums[at + 1]);
      ups[i] = PackedPair(sums[up], sums[up + 1]);
    }
  }

  // Computes and stores one of kParts parts, by lane q of a quad of lanes. Of two parts the first
  // is row `row`, the second `row` + 8.
  template <int kPart, int kParts>
  __device__ __forceinline__ void Store(const MatmulOutput& out, int row, int first_column,
                                        int q) const {
    // Else addresses and comparisons are computed ahead of a loop around this, and kept.
    asm volatile("" : "+r"(row), "+r"(first_column), "+r"(q));
#pragma unroll
    for (int unit = kPart * kUnits / kParts; unit < (kPart + 1) * kUnits / kParts; ++unit) {
      const int half = unit / (kUnits / 2), place = unit % (kUnits / 2);
      const int r = row + half * 8;
      const bool is_quad = place < kQuads;
      const int block = is_quad ? place * 4 : kQuads * 4 + place - kQuads;
      const int at = half * kBlocks + block, column = first_column + block * 8;
      if (is_quad) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = SiluMulPair(gates[at + i], ups[at + i]);
        if (out.is_wide) {
          StoreQuad(out, r, column, words, q);
          continue;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) StoreWord(out, r, column + i * 8 + q * 2, words[i]);
      } else {
        StoreWord(out, r, column + q * 2, SiluMulPair(gates[at], ups[at]));
      }
    }
  }
};

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_GATED_TILE_CUH_
