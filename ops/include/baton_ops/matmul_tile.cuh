// What the matmuls for few and for many rows share: the order along K, and the store of a tile.
//
// An element is summed by wgmma in steps of 16 along K from 0 on, never split, whatever tile it
// lies in. K is filled up with zeros to a multiple of 256, so that the order is one for every
// kernel.
#ifndef BATON_OPS_MATMUL_TILE_CUH_
#define BATON_OPS_MATMUL_TILE_CUH_

#include "baton_ops/hopper.cuh"

namespace baton_ops::cuda {

constexpr int kBoxColumns = 64;  // of 128 bytes
constexpr int kBoxesAStep = 4;   // what K is filled up to

// out[m, n], rows `stride` elements apart: bf16, or fp32. Wide: rows are 16-byte vectors, which
// only a gated product does without. Of such a one, n is what is stored, half the weight's rows.
struct MatmulOutput {
  void* data;
  int64_t stride;
  int m, n;
  bool is_fp32;
  bool is_wide = true;
};

__host__ __device__ __forceinline__ int BoxesAlong(int k) {
  constexpr int kStep = kBoxesAStep * kBoxColumns;
  return (k + kStep - 1) / kStep * kBoxesAStep;
}

// Stores two neighbours of a row as they are.
__device__ __forceinline__ void StorePair(const MatmulOutput& out, int row, int column, float low,
                                          float high) {
  if (row >= out.m || column >= out.n) return;
  const size_t at = row * out.stride + column;
  if (out.is_fp32) {
    *reinterpret_cast<float2*>(static_cast<float*>(out.data) + at) = make_float2(low, high);
  } else {
    *reinterpret_cast<uint32_t*>(static_cast<__nv_bfloat16*>(out.data) + at) =
        PackedPair(low, high);
  }
}

// Stores four blocks of 8 columns as bf16, 16 bytes a lane.
__device__ __forceinline__ void StoreQuad(const MatmulOutput& out, int row, int column,
                                          uint32_t (&words)[4], int q) {
  TransposeQuad(words, q);
  if (row >= out.m || column + q * 8 >= out.n) return;
  const size_t at = row * out.stride + column + q * 8;
  // Written out: else ptxas stores word by word where it saves moves between registers.
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(
                   __cvta_generic_to_global(static_cast<__nv_bfloat16*>(out.data) + at)),
               "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

// Stores a warpgroup's sums of rows `row` and `row` + 8, from a column on, by lane q of a quad.
// Rows of `out` have a multiple of 8 elements, and begin at multiples of 16 bytes.
template <int kWidth>
__device__ __forceinline__ void StoreTile(const float (&sums)[kWidth / 2], const MatmulOutput& out,
                                          int row, int first_column, int q) {
  constexpr int kBlocks = kWidth / 8, kWhole = kBlocks / 4 * 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = row + half * 8;
    if (out.is_fp32) {
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
        const int at = j * 4 + half * 2;
        StorePair(out, r, first_column + j * 8 + q * 2, sums[at], sums[at + 1]);
      }
      continue;
    }
#pragma unroll
    for (int j = 0; j < kWhole; j += 4) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = (j + i) * 4 + half * 2;
        words[i] = PackedPair(sums[at], sums[at + 1]);
      }
      StoreQuad(out, r, first_column + j * 8, words, q);
    }
#pragma unroll
    for (int j = kWhole; j < kBlocks; ++j) {
      const int at = j * 4 + half * 2;
      StorePair(out, r, first_column + j * 8 + q * 2, sums[at], sums[at + 1]);
    }
  }
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_MATMUL_TILE_CUH_
