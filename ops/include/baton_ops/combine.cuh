// The sum of what a token's experts made of it, in the order of the token's own list, so that it
// does not depend on who shares them.
#ifndef BATON_OPS_COMBINE_CUH_
#define BATON_OPS_COMBINE_CUH_

#include "baton_ops/grid_order.cuh"
#include "baton_ops/row_norm.cuh"
#include "baton_ops/values.cuh"

namespace baton_ops::cuda {

constexpr int kCombineThreads = 256, kMostCombined = 32;
// Of a token, so many rows are asked for at once. With many tokens others' loads fill the time.
constexpr int kCombineFewTokens = 8, kCombineOfFew = 8, kCombineOfMany = 4;
// Where a row is normed too, more threads than these have registers for fewer.
constexpr int kCombineFewThreads = 512, kCombineOfWide = 2;
constexpr int kCombineRehearsed = 128;  // tokens at most: a block is alone on a multiprocessor

template <class E>
struct CombineParams {
  const E* made;  // by place
  const int32_t* place;
  const float* weight;
  const E* beside;  // by token, or null
  E* out;
  int64_t made_stride, beside_stride, out_stride;
  int64_t columns;
  int chosen;
};

// Of a token, where its pairs stand and what they count.
struct CombinePairs {
  int32_t places[kMostCombined];
  float weights[kMostCombined];

  template <class E>
  __device__ __forceinline__ void Read(const CombineParams<E>& p, int64_t token) {
    if (static_cast<int>(threadIdx.x) >= p.chosen) return;
    places[threadIdx.x] = __ldcg(p.place + token * p.chosen + threadIdx.x);
    weights[threadIdx.x] = __ldcg(p.weight + token * p.chosen + threadIdx.x);
  }
};

// A chunk of what some of a token's pairs made, from one of its list on. What takes time is waiting
// for memory, so their loads are under way together.
template <class E, bool kWide, int kAtOnce>
struct MadeChunks {
  Packed<E, kChunk> of[kAtOnce];

  __device__ __forceinline__ void Load(const CombineParams<E>& p, const CombinePairs& pairs,
                                       int64_t first, int from) {
    if (from >= p.chosen) return;
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const int32_t place = pairs.places[min(from + n, p.chosen - 1)];
      of[n] = LoadChunk<E, kWide>(p.made + place * p.made_stride, first, p.columns);
    }
  }
};

// A chunk of a token's row: the sum of weight * made of its pairs from the first on, then of
// beside; products and sums are rounded to fp32 one by one. `made` has those of the first pairs.
template <class E, bool kWide, int kAtOnce>
__device__ __forceinline__ Packed<E, kChunk> CombineChunk(const CombineParams<E>& p,
                                                          const CombinePairs& pairs, int64_t token,
                                                          int64_t first,
                                                          MadeChunks<E, kWide, kAtOnce>& made) {
  float sum[kChunk] = {};
  for (int from = 0; from < p.chosen; from += kAtOnce) {
    if (from > 0) made.Load(p, pairs, first, from);
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      if (from + n >= p.chosen) break;
      const float weight = pairs.weights[from + n];
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        sum[i] = __fadd_rn(sum[i], __fmul_rn(weight, ToFloat(made.of[n].at[i])));
      }
    }
  }
  if (p.beside != nullptr) {
    const E* row = p.beside + token * p.beside_stride;
    const auto beside = LoadChunk<E, kWide>(row, first, p.columns);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) sum[i] = __fadd_rn(sum[i], ToFloat(beside.at[i]));
  }
  Packed<E, kChunk> out;
#pragma unroll
  for (int i = 0; i < kChunk; ++i) out.at[i] = Rounded<E>(sum[i]);
  return out;
}

// The next kernel may begin before anything is added: a norm, and behind it a product, which
// fetches its weights as soon as the experts leave room. Where pairs stand was told some launches
// before: it is read while the experts' products are still made. Grid: (tokens, parts of a row).
template <class E, bool kWide, int kAtOnce>
__global__ void __launch_bounds__(kCombineThreads) CombineKernel(CombineParams<E> p) {
  __shared__ CombinePairs pairs;
  LetNextGridStart();
  const int64_t token = blockIdx.x;
  pairs.Read(p, token);
  WaitForEarlierGrids();
  __syncthreads();
  const int64_t first = (blockIdx.y * static_cast<int64_t>(kCombineThreads) + threadIdx.x) * kChunk;
  if (first >= p.columns) return;
  MadeChunks<E, kWide, kAtOnce> made{};
  made.Load(p, pairs, first, 0);
  const auto out = CombineChunk<E, kWide, kAtOnce>(p, pairs, token, first, made);
  StoreChunk<E, kWide>(p.out + token * p.out_stride, first, p.columns, out);
}

// The same, and what row_norm.cuh makes of it: the sum, rounded, is not stored but added to the
// residual, and that normed. A thread has a chunk of the row of a block. Who rehearses does all
// twice: the first time is for nobody, while the experts' products are still made, and leaves
// nothing but this code in the caches, which a step's weights have driven it out of. It reads the
// norm's weight in place of rows, for the first-level cache would keep what is read too early. The
// block meets between loads and sums: else the compiler puts each load before its own sums, where
// it waits for all of those before. Grid: (tokens).
template <class E, int kAtOnce, int kMostThreads>
__global__ void __launch_bounds__(kMostThreads)
    CombineNormKernel(CombineParams<E> p, NormParams<E> norm, bool rehearses) {
  __shared__ CombinePairs pairs;
  __shared__ float warps[kWarp];
  LetNextGridStart();
  const int64_t token = blockIdx.x, first = threadIdx.x * int64_t{kChunk};
  const bool is_there = first < p.columns;
  pairs.Read(p, token);
  Packed<E, kChunk> weight{};
  if (is_there) weight = LoadChunk<E, true>(norm.weight, first, p.columns);
  __syncthreads();  // pairs are there
  CombineParams<E> now = p;
  now.made = norm.weight;
  now.made_stride = now.beside_stride = 0;
  if (p.beside) now.beside = norm.weight;
#pragma unroll 1
  for (int turn = rehearses ? 0 : 1; turn < 2; ++turn) {
    const bool is_real = turn > 0;
    if (is_real) {
      WaitForEarlierGrids();
      now = p;
    }
    const NormRow<E, true> row(norm, token);
    Packed<E, kChunk> sum{};
    ChunkWords<E> before{};
    MadeChunks<E, true, kAtOnce> made{};
    if (is_there) {
      before.Load(is_real ? row.residual : norm.weight, first);
      made.Load(now, pairs, first, 0);
    }
    __syncthreads();
    if (is_there) {
      sum = before.Elements();
      row.AddTo(sum, CombineChunk<E, true, kAtOnce>(now, pairs, token, first, made));
      if (is_real) StoreChunk<E, true>(row.residual, first, p.columns, sum);
    }
    const float scale = row.Scale(row.Squares(sum, 0.0f), warps);
    if (is_there && is_real) row.Write(first, sum, weight, scale);
  }
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_COMBINE_CUH_
