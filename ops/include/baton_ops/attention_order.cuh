// The one order in which Hopper's kernels compute attention, whichever of them does: tiles of 128
// keys from position 0 on, in splits of 4; online softmax in fp32 within a split, probabilities in
// bf16, one wgmma chain a tile; splits merged in order. A lane of a quad sums its own columns of a
// tile, and the four lanes' sums are added last. Every product and sum is written out, so that no
// compiler chooses which of them are fused.
#ifndef BATON_OPS_ATTENTION_ORDER_CUH_
#define BATON_OPS_ATTENTION_ORDER_CUH_

#include "baton_ops/hopper.cuh"

namespace baton_ops::cuda {

constexpr int kTile = 128, kHeadDim = 128, kSplitTiles = 4, kSplitKeys = kSplitTiles * kTile;
constexpr int kHalfBytes = kTile * 128, kTileBytes = 2 * kHalfBytes;  // a half: 64 columns

__device__ __forceinline__ float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float BaseOf(float top) { return top == -INFINITY ? 0.f : top; }

// Of a row: the largest score so far, times the scale, and a lane's part of the sum of
// probabilities.
struct SoftmaxRow {
  float top = -INFINITY, sum = 0.f;
};

// Turns a tile's scores of row h of a lane's two (r and r + 8) into probabilities. Returns what
// that which was made before is to be multiplied by.
template <int kCount>
__device__ __forceinline__ float Soften(SoftmaxRow& row, float (&scores)[kCount], int h,
                                        float scale_log2) {
  float even = scores[h * 2], odd = scores[h * 2 + 1];
#pragma unroll
  for (int j = 1; j < kCount / 4; ++j) {
    even = fmaxf(even, scores[j * 4 + h * 2]);
    odd = fmaxf(odd, scores[j * 4 + h * 2 + 1]);
  }
  float top = fmaxf(even, odd);
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
  top = fmaxf(row.top, __fmul_rn(top, scale_log2));
  const float base = BaseOf(top), alpha = Exp2(__fsub_rn(row.top, base));
  even = odd = 0.f;
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
    float &x = scores[j * 4 + h * 2], &y = scores[j * 4 + h * 2 + 1];
    x = Exp2(fmaf(x, scale_log2, -base));
    y = Exp2(fmaf(y, scale_log2, -base));
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
  __device__ __forceinline__ Merge(SoftmaxRow& all, const SoftmaxRow& split) {
    const float top = fmaxf(all.top, split.top), base = BaseOf(top);
    before = Exp2(__fsub_rn(all.top, base));
    next = Exp2(__fsub_rn(split.top, base));
    all.top = top;
    all.sum = Sum(all.sum, split.sum);
  }
  __device__ __forceinline__ float Sum(float all, float split) const {
    return fmaf(all, before, __fmul_rn(split, next));
  }
};

// One over the sum of the lanes of a quad.
__device__ __forceinline__ float ShareOf(float sum) {
  sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 1));
  sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 2));
  return __frcp_rn(sum);
}

// Where keys and values lie in the pool, seen as rows of 128 elements, and who has which.
struct PagedKeys {
  const int32_t* tables;    // [rows, width]
  const int32_t* contexts;  // [rows]
  int width;
  int page;                // keys in a block of the pool: 16, 32, 64 or 128
  int kv_heads;            // or parts of their queries' heads
  int parts;               // of each head of keys and values
  int block_rows;          // from one block to the next
  int key_row, value_row;  // of the layer, in a block

  // Keys that a row has, none for one that is not there; tables end before any others.
  __device__ __forceinline__ int Context(int row) const {
    return max(0, min(__ldg(contexts + row), width * page));
  }
  __device__ __forceinline__ int FirstRow(int block, int head) const {
    return block * block_rows + head / parts * page;
  }
};

// Makes zeros of a tile's values from a key on, by a warpgroup: what lies behind a context's end
// may be anything, and a probability of zero does not make zero of it. The tile must have come.
__device__ __forceinline__ void ClearValues(uint8_t* tile, int first_key) {
  for (int key = first_key + threadIdx.x % 128 / 16; key < kTile; key += 8) {
    const int chunk = threadIdx.x % 16;
    *reinterpret_cast<uint4*>(tile + chunk / 8 * kHalfBytes + key * 128 + chunk % 8 * 16) = uint4{};
  }
  PublishShared();
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_ATTENTION_ORDER_CUH_
