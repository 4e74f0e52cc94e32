// Causal attention over rows that all heads of a token share, of DeepSeek-V3's sizes, on tensor
// cores: a block takes one token's queries of kHeads heads, which meet a tile of keys in one
// product, and a slice of the values. So nothing depends on another token.
//
// The one order: tiles of 32 keys from position 0 on; a score is one chain along the row; an online
// softmax in fp32 in base 2, of which a lane of a quad sums its own columns of all tiles, and the
// four lanes' sums are added last; probabilities in bf16; an output is one chain along the keys.
// Which slice, and how many, does not matter to it.
#ifndef BATON_OPS_LATENT_ATTENTION_CUH_
#define BATON_OPS_LATENT_ATTENTION_CUH_

#include <cmath>
#include <cstring>

#include "baton_ops/generic_attention.cuh"
#include "baton_ops/warp_mma.cuh"

namespace baton_ops::cuda {

constexpr int kRowWidth = 576, kRowValue = 512;
constexpr int kRowKeys = 32, kRowStages = 2;
constexpr int kRowWarps = 8, kLatentThreads = kRowWarps * kWarp;
constexpr int kRowPitch = kRowWidth + 8;   // elements: rows begin in different banks
constexpr int kScorePitch = kRowKeys + 4;  // floats
constexpr int kRowVectors = kRowWidth / 8;

using RowElement = __nv_bfloat16;

// kHeadTiles: of 16 heads each; their warps share the work on a tile of keys.
template <int kHeadTiles_, int kSlice_>
struct RowShape {
  static constexpr int kHeadTiles = kHeadTiles_, kSlice = kSlice_, kHeads = 16 * kHeadTiles;
  static constexpr int kParts = kRowWarps / kHeadTiles;  // warps of a tile of heads
  static constexpr int kDims = kSlice / kParts;          // of a warp
  static constexpr int kKeyTiles = kParts < 4 ? 4 / kParts : 1;
  static constexpr int kScorers = kRowKeys / 8 / kKeyTiles;  // warps that have scores
  static constexpr size_t kQueryBytes = kHeads * kRowPitch * sizeof(RowElement);
  static constexpr size_t kStageBytes = kRowKeys * kRowPitch * sizeof(RowElement);
  static constexpr size_t kBytes =
      kQueryBytes + kRowStages * kStageBytes + kHeads * kScorePitch * sizeof(float);
  static_assert(kDims % 16 == 0 && kRowValue % kSlice == 0 && kRowWidth % 32 == 0);
};

// Begins to bring keys first .. first + 31; those behind the last are zeros, for what lies there
// may be anything, and a probability of zero does not make zero of it.
__device__ __forceinline__ void BringKeys(const KeyPlaces<RowElement>& places, int first, int keys,
                                          RowElement* to) {
  for (int i = threadIdx.x; i < kRowKeys * kRowVectors; i += kLatentThreads) {
    const int key = i / kRowVectors, at = i % kRowVectors * 8;
    RowElement* place = to + key * kRowPitch + at;
    if (first + key < keys) {
      BeginCopy(place, places.At(first + key) + at);
    } else {
      *reinterpret_cast<uint4*>(place) = uint4{};
    }
  }
}

// The scores of a tile of heads with this warp's keys, not scaled, to `scores`.
template <class Shape>
__device__ __forceinline__ void ScoreKeys(const RowElement* query, const RowElement* keys, int part,
                                          float* scores) {
  constexpr int kTiles = Shape::kKeyTiles;
  const int lane = threadIdx.x % kWarp;
  float sum[kTiles][4] = {};
  const RowElement* heads = query + lane % 16 * kRowPitch + lane / 16 * 8;
  const RowElement* rows = keys + (part * kTiles * 8 + lane % 8) * kRowPitch + lane / 8 * 8;
#pragma unroll 2
  for (int dim = 0; dim < kRowWidth; dim += 32) {
    uint32_t a[2][4];
    LoadMatrices(heads + dim, a[0]);
    LoadMatrices(heads + dim + 16, a[1]);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      uint32_t b[4];
      LoadMatrices(rows + n * 8 * kRowPitch + dim, b);
      MultiplyAdd(a[0], b[0], b[1], sum[n]);
      MultiplyAdd(a[1], b[2], b[3], sum[n]);
    }
  }
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    float* to = scores + lane / 4 * kScorePitch + (part * kTiles + n) * 8 + lane % 4 * 2;
    to[0] = sum[n][0];
    to[1] = sum[n][1];
    to[8 * kScorePitch] = sum[n][2];
    to[8 * kScorePitch + 1] = sum[n][3];
  }
}

// Of a head: the largest score so far, times the scale, and a lane's part of the sum.
struct HeadSum {
  float top = -INFINITY;
  float sum = 0.0f;
};

__device__ __forceinline__ uint32_t PackedPair(float low, float high) {
  const RowElement pair[2] = {Rounded<RowElement>(low), Rounded<RowElement>(high)};
  uint32_t word;
  memcpy(&word, pair, sizeof word);
  return word;
}

// Makes probabilities of a head's scores, of which the lane has columns 16 s + 2 c + {0, 1, 8, 9}:
// words [s][0] and [s][1]. Returns what was made before is to be multiplied by.
__device__ __forceinline__ float SoftenKeys(const float* scores, int count, float scale_log2,
                                            HeadSum* head, uint32_t (&words)[2][2]) {
  const int column = threadIdx.x % 4 * 2;
  float x[8], most = -INFINITY;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int at = i / 2 * 8 + column + i % 2;
    x[i] = at < count ? scores[at] : -INFINITY;
    most = fmaxf(most, x[i]);
  }
  most = fmaxf(most, __shfl_xor_sync(kEveryLane, most, 1));
  most = fmaxf(most, __shfl_xor_sync(kEveryLane, most, 2));
  const float top = fmaxf(head->top, __fmul_rn(most, scale_log2));
  const float base = top == -INFINITY ? 0.0f : top;
  const float keep = exp2f(__fsub_rn(head->top, base));
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int at = i / 2 * 8 + column + i % 2;
    x[i] = at < count ? exp2f(__fmaf_rn(x[i], scale_log2, -base)) : 0.0f;
    sum = __fadd_rn(sum, x[i]);
  }
  head->top = top;
  head->sum = __fmaf_rn(head->sum, keep, sum);
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i / 2][i % 2] = PackedPair(x[2 * i], x[2 * i + 1]);
  return keep;
}

// Adds a tile's values, by the probabilities of two heads a lane, r and r + 8.
template <class Shape>
__device__ __forceinline__ void AddRows(const RowElement* values, const uint32_t (&low)[2][2],
                                        const uint32_t (&high)[2][2], float (*sum)[4]) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    const uint32_t a[4] = {low[s][0], high[s][0], low[s][1], high[s][1]};
    const RowElement* rows = values + (s * 16 + lane % 16) * kRowPitch + lane / 16 * 8;
#pragma unroll
    for (int n = 0; n < Shape::kDims / 8; n += 2) {
      uint32_t b[4];
      LoadTurnedMatrices(rows + n * 8, b);
      MultiplyAdd(a, b[0], b[1], sum[n]);
      MultiplyAdd(a, b[2], b[3], sum[n + 1]);
    }
  }
}

__device__ __forceinline__ float ShareOfQuad(float sum) {
  sum = __fadd_rn(sum, __shfl_xor_sync(kEveryLane, sum, 1));
  sum = __fadd_rn(sum, __shfl_xor_sync(kEveryLane, sum, 2));
  return __fdiv_rn(1.0f, sum);
}

// Grid: (tokens, heads / kHeads, slices of the values).
template <class Shape>
__global__ void __launch_bounds__(kLatentThreads, 1)
    RowAttentionKernel(AttendParams<RowElement> p) {
  extern __shared__ __align__(16) uint8_t row_memory[];
  WaitForEarlierGrids();
  LetNextGridStart();
  auto* query = reinterpret_cast<RowElement*>(row_memory);
  RowElement* ring = query + Shape::kHeads * kRowPitch;
  auto* scores = reinterpret_cast<float*>(ring + kRowStages * kRowKeys * kRowPitch);
  const int token = blockIdx.x, sequence = token / p.q_len, context = p.contexts[sequence];
  const int keys = context - p.q_len + token % p.q_len + 1;
  if (context <= 0 || keys <= 0) return;  // the whole block
  const int64_t first_head = static_cast<int64_t>(token) * p.heads + blockIdx.y * Shape::kHeads;
  const KeyPlaces<RowElement> places{p, p.tables + static_cast<int64_t>(sequence) * p.width, 0};
  for (int i = threadIdx.x; i < Shape::kHeads * kRowVectors; i += kLatentThreads) {
    const int head = i / kRowVectors, at = i % kRowVectors * 8;
    BeginCopy(query + head * kRowPitch + at, p.query + (first_head + head) * kRowWidth + at);
  }
  BringKeys(places, 0, keys, ring);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int tile = warp / Shape::kParts, part = warp % Shape::kParts;
  const int dim = blockIdx.z * Shape::kSlice + part * Shape::kDims;
  const float scale_log2 = __fmul_rn(p.scale, 1.44269504f);
  float* own = scores + tile * 16 * kScorePitch;
  float sum[Shape::kDims / 8][4] = {};
  HeadSum heads[2];
  for (int first = 0, stage = 0; first < keys; first += kRowKeys, stage ^= 1) {
    RowElement* here = ring + stage * kRowKeys * kRowPitch;
    WaitForCopies();
    __syncthreads();
    if (first + kRowKeys < keys) {
      BringKeys(places, first + kRowKeys, keys, ring + (stage ^ 1) * kRowKeys * kRowPitch);
    }
    if (part < Shape::kScorers) {
      ScoreKeys<Shape>(query + tile * 16 * kRowPitch, here, part, own);
    }
    __syncthreads();
    uint32_t words[2][2][2];
    float keep[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      keep[h] = SoftenKeys(own + (lane / 4 + 8 * h) * kScorePitch, keys - first, scale_log2,
                           &heads[h], words[h]);
    }
#pragma unroll
    for (int n = 0; n < Shape::kDims / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[n][i] = __fmul_rn(sum[n][i], keep[i / 2]);
    }
    AddRows<Shape>(here + dim, words[0], words[1], sum);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float share = ShareOfQuad(heads[h].sum);
    const int64_t head = first_head + tile * 16 + lane / 4 + 8 * h;
    RowElement* out = p.out + head * kRowValue + dim + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < Shape::kDims / 8; ++n) {
      *reinterpret_cast<uint32_t*>(out + n * 8) =
          PackedPair(__fmul_rn(sum[n][2 * h], share), __fmul_rn(sum[n][2 * h + 1], share));
    }
  }
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_LATENT_ATTENTION_CUH_
