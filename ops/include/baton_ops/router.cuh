// How much tokens want each expert: the products of their rows and the router's, in fp32, in an
// order that depends on the row alone.
#ifndef BATON_OPS_ROUTER_CUH_
#define BATON_OPS_ROUTER_CUH_

#include "baton_ops/grid_order.cuh"
#include "baton_ops/values.cuh"

namespace baton_ops::cuda {

// Asks for a row of weights, which no earlier grid writes, to be brought near: by a warp.
__device__ __forceinline__ void PrefetchRow(const float* row, int64_t columns, int lane) {
  constexpr int kLine = 128 / sizeof(float);
  for (int64_t at = lane * kLine; at < columns; at += kWarp * kLine) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(row + at));
  }
}

constexpr int kRouterThreads = 256, kRouterWarps = kRouterThreads / kWarp;

template <class E>
struct RouterParams {
  const E* x;
  const float* router;
  float* products;
  int64_t x_stride;
  int64_t tokens;
  int64_t hidden;
  int experts;
};

// products[t, e] = x[t] . router[e]: a warp has some experts and some tokens, and kAcross warps of
// a block the same tokens, so that the router is read once for these tokens and x for these
// experts. Each lane sums its chunks in ascending order, then the lanes are added, however many of
// each a warp has. Grid: (experts, tokens).
template <class E, bool kWide, int kTokens, int kExperts, int kAcross>
__global__ void __launch_bounds__(kRouterThreads) RouterKernel(RouterParams<E> p) {
  constexpr int kDown = kRouterWarps / kAcross, kEach = kTokens * kExperts;
  // So many chunks are asked for at once: with few sums what takes time is waiting for them.
  constexpr int kAtOnce = kEach <= 4 ? 4 : kEach == 8 ? 2 : 1;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int first_expert = static_cast<int>(blockIdx.x * kAcross + warp % kAcross) * kExperts;
  const float* weights[kExperts];
#pragma unroll
  for (int e = 0; e < kExperts; ++e) {
    weights[e] = p.router + min(first_expert + e, p.experts - 1) * p.hidden;
  }
  if constexpr (kExperts == 1) {
    if (blockIdx.y == 0) PrefetchRow(weights[0], p.hidden, lane);
  }
  WaitForEarlierGrids();
  LetNextGridStart();
  const int64_t first = (blockIdx.y * static_cast<int64_t>(kDown) + warp / kAcross) * kTokens;
  if (first_expert >= p.experts || first >= p.tokens) return;  // the whole warp
  float sum[kExperts][kTokens] = {};
#pragma unroll(kAtOnce)
  for (int64_t at = lane * kChunk; at < p.hidden; at += kWarp * kChunk) {
    float x[kTokens][kChunk];
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      const E* row = p.x + min(first + t, p.tokens - 1) * p.x_stride;
      const auto chunk = LoadChunk<E, kWide>(row, at, p.hidden);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) x[t][i] = ToFloat(chunk.at[i]);
    }
#pragma unroll
    for (int e = 0; e < kExperts; ++e) {
      const auto w = LoadChunk<float, kWide>(weights[e], at, p.hidden);
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
#pragma unroll
        for (int i = 0; i < kChunk; ++i) sum[e][t] = __fmaf_rn(x[t][i], w.at[i], sum[e][t]);
      }
    }
  }
#pragma unroll
  for (int e = 0; e < kExperts; ++e) {
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      const float whole = SumOfWarp(sum[e][t]);
      if (lane > 0 || first + t >= p.tokens || first_expert + e >= p.experts) continue;
      p.products[(first + t) * p.experts + first_expert + e] = whole;
    }
  }
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_ROUTER_CUH_
