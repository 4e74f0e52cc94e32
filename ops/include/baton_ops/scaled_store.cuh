// The store of a tile of scaled_turned.cuh: its rows are the weight's, so a row of `out` lies
// across its columns.
//
// A warp's 16 rows of the weight are not in the order of the instruction's: lanes that read shared
// memory at the same time have rows four apart, whose chunks of 16 bytes the swizzle puts into
// different banks. Lane l has row SlotRow(l / 4) and the one behind it. Of a gated tile that is a
// gate and its up.
#ifndef BATON_OPS_SCALED_STORE_CUH_
#define BATON_OPS_SCALED_STORE_CUH_

#include "baton_ops/matmul_turned.cuh"

namespace baton_ops::cuda {

__device__ __forceinline__ int SlotRow(int slot) {
  return slot / 4 * 8 + slot / 2 % 2 * 2 + slot % 2 * 4;
}

// The lower, or the upper, halves of two words.
__device__ __forceinline__ uint32_t LowHalves(uint32_t a, uint32_t b) {
  return (a & 0xffffu) | b << 16;
}
__device__ __forceinline__ uint32_t HighHalves(uint32_t a, uint32_t b) {
  return a >> 16 | (b & 0xffff0000u);
}

// Stores elements one by one: column `at` / 4 * 8 + ... of the sums is a row of `out`.
template <int kColumns>
__device__ __forceinline__ void StoreEach(const float (&sums)[kColumns / 2],
                                          const MatmulOutput& out, int first_row, int column,
                                          int q) {
#pragma unroll
  for (int at = 0; at < kColumns / 2; ++at) {
    const int row = first_row + at / 4 * 8 + q * 2 + at % 2, here = column + at % 4 / 2;
    if (row >= out.m || here >= out.n) continue;
    const int64_t place = row * out.stride + here;
    if (out.is_fp32) {
      static_cast<float*>(out.data)[place] = sums[at];
    } else {
      static_cast<__nv_bfloat16*>(out.data)[place] = __float2bfloat16_rn(sums[at]);
    }
  }
}

__device__ __forceinline__ void StoreVector(const MatmulOutput& out, int row, int column,
                                            const uint32_t (&words)[4]) {
  if (row >= out.m || column >= out.n) return;
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(
                   static_cast<__nv_bfloat16*>(out.data) + row * out.stride + column)),
               "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

// Stores a warp's sums as bf16, 16 bytes a lane. Of two blocks of eight rows a lane has four
// columns each: two neighbours, and two that are four behind. It gives its neighbour the one's and
// gets the other's, so that each has eight of a row.
template <int kColumns>
__device__ __forceinline__ void StorePairs(const float (&sums)[kColumns / 2],
                                           const MatmulOutput& out, int first_row, int first_column,
                                           int lane) {
  const int q = lane % 4;
#pragma unroll
  for (int j = 0; j < kColumns / 8; j += 2) {
    uint32_t pairs[2][2];
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      const int at = (j + block) * 4;
      const uint32_t even = TurnBlock(Packed(sums[at], sums[at + 1]));
      const uint32_t odd = TurnBlock(Packed(sums[at + 2], sums[at + 3]));
      pairs[block][0] = LowHalves(even, odd);
      pairs[block][1] = HighHalves(even, odd);
    }
    const bool is_odd = q % 2 != 0;
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t kept = is_odd ? pairs[1][i] : pairs[0][i];
      const uint32_t got = __shfl_xor_sync(~0u, is_odd ? pairs[0][i] : pairs[1][i], 1);
      words[i * 2] = is_odd ? got : kept;
      words[i * 2 + 1] = is_odd ? kept : got;
    }
    StoreVector(out, first_row + (j + q % 2) * 8 + lane / 4, first_column + q / 2 * 8, words);
  }
}

// Stores a warp's sums of 16 of the weight's rows, columns of `out` from `first_column` on; a
// column of the sums is a row of `out`, from `first_row` on.
template <int kColumns>
__device__ __forceinline__ void StoreScaled(const float (&sums)[kColumns / 2],
                                            const MatmulOutput& out, int first_row,
                                            int first_column, int lane) {
  constexpr int kBlocks = kColumns / 8;
  const int q = lane % 4;
  if constexpr (kBlocks % 2 != 0) {
    StoreEach<kColumns>(sums, out, first_row, first_column + SlotRow(lane / 4), q);
  } else if (out.is_fp32 || !out.is_wide) {
    StoreEach<kColumns>(sums, out, first_row, first_column + SlotRow(lane / 4), q);
  } else {
    StorePairs<kColumns>(sums, out, first_row, first_column, lane);
  }
}
// The same of gates and ups, silu(gate) * up, of 8 columns of `out` from `first_column` on.
template <int kColumns>
__device__ __forceinline__ void StoreScaledGates(const float (&sums)[kColumns / 2],
                                                 const MatmulOutput& out, int first_row,
                                                 int first_column, int lane) {
  constexpr int kBlocks = kColumns / 8, kQuads = kBlocks / 4;
  const int q = lane % 4, column = first_column + SlotRow(lane / 4) / 2;
  const auto made = [&](int block) {
    const int at = block * 4;
    return SiluMulPair(Packed(sums[at], sums[at + 1]), Packed(sums[at + 2], sums[at + 3]));
  };
  const int whole = out.is_wide ? kQuads * 4 : 0;
#pragma unroll
  for (int j = 0; j < kBlocks; j += 4) {
    if (j < whole) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = j + i < kBlocks ? TurnBlock(made(j + i)) : 0;
      TransposeQuad(words, q);
      // Lanes 0 and 1 have columns that take turns, and so have 2 and 3.
      const uint32_t eight[4] = {LowHalves(words[0], words[1]), HighHalves(words[0], words[1]),
                                 LowHalves(words[2], words[3]), HighHalves(words[2], words[3])};
      StoreVector(out, first_row + (j + q) * 8 + lane / 4, first_column, eight);
      continue;
    }
#pragma unroll
    for (int i = j; i < j + 4 && i < kBlocks; ++i) {
      const uint32_t both = made(i);
      const int row = first_row + i * 8 + q * 2;
      if (column >= out.n) continue;
      uint16_t* to = static_cast<uint16_t*>(out.data) + row * out.stride + column;
      if (row < out.m) to[0] = static_cast<uint16_t>(both);
      if (row + 1 < out.m) to[out.stride] = static_cast<uint16_t>(both >> 16);
    }
  }
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_SCALED_STORE_CUH_
