// Rows of multi-head latent attention: what is kept of a token is normed, rotated and appended to
// the paged pool, and the part of each query that rotates is rotated. Of one token and head, or of
// one token, by itself.
#ifndef BATON_OPS_LATENT_ROWS_CUH_
#define BATON_OPS_LATENT_ROWS_CUH_

#include "baton_ops/grid_order.cuh"
#include "baton_ops/head_pairs.cuh"
#include "baton_ops/rope_store.cuh"
#include "baton_ops/values.cuh"

namespace baton_ops::cuda {

constexpr int kRotateThreads = 256;
constexpr int kStoreWarps = 4;

// Where tokens stand and by what they rotate, as TokenPlace reads it.
struct LatentPlaces {
  const float* cos;
  const float* sin;
  int32_t positions;
  const int32_t* sequence;
  const int32_t* position;
  const int32_t* tables;
  int32_t sequences;
  int32_t width;  // 0: nothing is stored
  int32_t blocks;
  int32_t block_size;
  int32_t head_dim;  // of what rotates
  int32_t tokens;
};

// Head h's elements begin at column h * step + first of its token's row.
template <class E>
struct HeadsInRows {
  E* data;
  int64_t stride;
  int64_t step;
  int64_t first;

  __device__ __forceinline__ E* At(int64_t token, int64_t head) const {
    return data + token * stride + head * step + first;
  }
};

// A thread takes two pairs of one head.
template <class E, bool kInterleaved, bool kWide>
__global__ void __launch_bounds__(kRotateThreads)
    RotateQueriesKernel(LatentPlaces p, HeadsInRows<const E> from, HeadsInRows<E> to, int heads) {
  WaitForEarlierGrids();
  LetNextGridStart();
  const HeadPairs<E, kInterleaved, kWide> pairs_of{p.head_dim / 2};
  const int groups = (pairs_of.half + 1) / 2;
  const int64_t item = blockIdx.x * static_cast<int64_t>(kRotateThreads) + threadIdx.x;
  const int group = static_cast<int>(item % groups);
  const int64_t head = item / groups % heads, token = item / groups / heads;
  if (token >= p.tokens) return;
  const TokenPlace place(p, static_cast<int>(token));
  if (!place.is_there) return;
  Pairs pairs = pairs_of.Load(from.At(token, head), group);
  Rotate(LoadAngles<kWide>(p.cos + place.angle, p.sin + place.angle, group, pairs_of.half), &pairs);
  pairs_of.Store(to.At(token, head), group, pairs);
}

template <class E>
struct StoreParams {
  LatentPlaces places;
  const E* row;  // [tokens, rank + places.head_dim]
  int64_t row_stride;
  const E* norm;  // [rank]
  float eps;
  int32_t rank;
  E* pool;  // [blocks, layers, 1, 1, block_size, rank + places.head_dim]
  int32_t layers;
  int32_t layer;

  __device__ __forceinline__ E* At(const TokenPlace& place) const {
    const int64_t page = static_cast<int64_t>(place.block) * layers + layer;
    return pool + (page * places.block_size + place.offset) * (rank + places.head_dim);
  }
};

// A warp takes a token: a lane every 32nd chunk of what is normed, so that the order of the sum
// follows from the rank alone.
template <class E, bool kInterleaved, bool kWide>
__global__ void __launch_bounds__(kStoreWarps* kWarp) StoreRowsKernel(StoreParams<E> p) {
  WaitForEarlierGrids();
  LetNextGridStart();
  const int lane = threadIdx.x % kWarp, token = blockIdx.x * kStoreWarps + threadIdx.x / kWarp;
  if (token >= p.places.tokens) return;  // the whole warp
  const TokenPlace place(p.places, token);
  if (!place.is_there) return;
  const E* row = p.row + token * p.row_stride;
  E* to = p.At(place);
  float sum = 0.0f;
  for (int first = lane * kChunk; first < p.rank; first += kWarp * kChunk) {
    const auto chunk = LoadChunk<E, kWide>(row, first, p.rank);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      sum = __fmaf_rn(ToFloat(chunk.at[i]), ToFloat(chunk.at[i]), sum);
    }
  }
  const float scale = HeadScale(SumOfWarp(sum), p.rank, p.eps);
  for (int first = lane * kChunk; first < p.rank; first += kWarp * kChunk) {
    auto chunk = LoadChunk<E, kWide>(row, first, p.rank);
    const auto weight = LoadChunk<E, kWide>(p.norm, first, p.rank);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      const float normed = __fmul_rn(ToFloat(chunk.at[i]), scale);
      chunk.at[i] = Rounded<E>(__fmul_rn(normed, ToFloat(weight.at[i])));
    }
    StoreChunk<E, kWide>(to, first, p.rank, chunk);
  }
  const HeadPairs<E, kInterleaved, kWide> pairs_of{p.places.head_dim / 2};
  const float *cos = p.places.cos + place.angle, *sin = p.places.sin + place.angle;
  for (int group = lane; 2 * group < pairs_of.half; group += kWarp) {
    Pairs pairs = pairs_of.Load(row + p.rank, group);
    Rotate(LoadAngles<kWide>(cos, sin, group, pairs_of.half), &pairs);
    pairs_of.Store(to + p.rank, group, pairs);
  }
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_LATENT_ROWS_CUH_
