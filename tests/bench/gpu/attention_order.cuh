// The one order in which attention is computed, whoever computes it: tiles of 128 keys from
// position 0 on, in splits of SPLIT_TILES; online softmax in fp32 within a split, probabilities in
// bf16, one wgmma chain a tile; splits merged in order. A lane of a quad sums its own columns of a
// tile, and the four lanes' sums are added last. Every product and sum is written out, so that no
// compiler chooses which of them are fused.
#pragma once

#include "hopper.cuh"

constexpr int kTile = 128, kDim = 128, kSplitTiles = SPLIT_TILES, kPage = PAGE;

__device__ __forceinline__ float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float base_of(float top) { return top == -INFINITY ? 0.f : top; }

// Of a row: the largest score so far, times the scale, and a lane's part of the sum of
// probabilities.
struct Row {
  float top = -INFINITY, sum = 0.f;
};

// Turns a tile's scores of row h of a lane's two (r and r + 8) into probabilities. Returns what
// that which was made before is to be multiplied by.
__device__ __forceinline__ float soften(Row& row, float (&scores)[64], int h, float scale_log2) {
  float even = scores[h * 2], odd = scores[h * 2 + 1];
#pragma unroll
  for (int j = 1; j < 16; ++j) {
    even = fmaxf(even, scores[j * 4 + h * 2]);
    odd = fmaxf(odd, scores[j * 4 + h * 2 + 1]);
  }
  float top = fmaxf(even, odd);
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
  top = fmaxf(row.top, __fmul_rn(top, scale_log2));
  const float base = base_of(top), alpha = exp2_of(__fsub_rn(row.top, base));
  even = odd = 0.f;
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    float &x = scores[j * 4 + h * 2], &y = scores[j * 4 + h * 2 + 1];
    x = exp2_of(fmaf(x, scale_log2, -base));
    y = exp2_of(fmaf(y, scale_log2, -base));
    even = __fadd_rn(even, x);
    odd = __fadd_rn(odd, y);
  }
  row.top = top;
  row.sum = fmaf(row.sum, alpha, __fadd_rn(even, odd));
  return alpha;
}

// What the splits so far and the next are multiplied by when they are merged.
struct Merge {
  float before, next;
  __device__ __forceinline__ Merge(Row& all, const Row& split) {
    const float top = fmaxf(all.top, split.top), base = base_of(top);
    before = exp2_of(__fsub_rn(all.top, base));
    next = exp2_of(__fsub_rn(split.top, base));
    all.top = top;
    all.sum = sum(all.sum, split.sum);
  }
  __device__ __forceinline__ float sum(float all, float split) const {
    return fmaf(all, before, __fmul_rn(split, next));
  }
};

// One over the sum of the lanes of a quad.
__device__ __forceinline__ float share_of(float sum) {
  sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 1));
  sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 2));
  return __frcp_rn(sum);
}
