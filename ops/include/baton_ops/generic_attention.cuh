// Causal attention over a paged pool, of any head dimension. A warp takes one query head of one
// token and walks its keys from position 0 in tiles of a key a lane; nothing that it adds depends
// on another query or on how many there are.
#ifndef BATON_OPS_GENERIC_ATTENTION_CUH_
#define BATON_OPS_GENERIC_ATTENTION_CUH_

#include <cmath>

#include "baton_ops/grid_order.cuh"
#include "baton_ops/values.cuh"

namespace baton_ops::cuda {

constexpr int kAttendWarps = 4;
constexpr int kMostLaneDims = 8;  // output dimensions of a lane; more go to further blocks

template <class E>
struct AttendParams {
  const E* query;
  E* out;
  const E* pool;
  const int32_t* tables;
  const int32_t* contexts;
  int32_t warps;  // tokens * heads
  int32_t heads;
  int32_t q_len;
  int32_t width;
  int32_t blocks;
  int32_t layers;
  int32_t layer;
  int32_t kv_heads;
  int32_t block_size;
  int32_t head_dim;
  float scale;
};

// Where the keys of one KV head of one sequence lie.
template <class E>
struct PagedKeys {
  const AttendParams<E>& p;
  const int32_t* table;
  int kv_head;

  // The key at a position; the null block's where the table names no block.
  __device__ __forceinline__ const E* At(int position) const {
    const int column = position / p.block_size;
    int32_t block = column < p.width ? table[column] : 0;
    if (block < 0 || block >= p.blocks) block = 0;
    const int64_t page = (static_cast<int64_t>(block) * p.layers + p.layer) * 2;
    const int64_t row = (page * p.kv_heads + kv_head) * p.block_size + position % p.block_size;
    return p.pool + row * p.head_dim;
  }
  // From a key to its value.
  __device__ __forceinline__ int64_t ToValue() const {
    return static_cast<int64_t>(p.kv_heads) * p.block_size * p.head_dim;
  }
};

// kWide: rows of the pool are whole vectors of 16 bytes.
template <class E, bool kWide>
__device__ __forceinline__ float Dot(const float* query, const E* key, int head_dim) {
  constexpr int kCount = kWide ? kPerVector<E> : 1;
  float sum = 0.0f;
#pragma unroll 4
  for (int first = 0; first < head_dim; first += kCount) {
    const auto values = *reinterpret_cast<const Packed<E, kCount>*>(key + first);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      sum = __fmaf_rn(query[first + i], ToFloat(values.at[i]), sum);
    }
  }
  return sum;
}

// Adds a tile's values, key by key. `value` and `weight` are of the lane's own key.
template <class E, int kDims>
__device__ __forceinline__ void AddValues(const E* value, float weight, int count, int first_dim,
                                          int head_dim, float* sum) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll 4
  for (int key = 0; key < count; ++key) {
    const auto address = reinterpret_cast<unsigned long long>(value);
    const E* row = reinterpret_cast<const E*>(__shfl_sync(kEveryLane, address, key)) + first_dim;
    const float by = __shfl_sync(kEveryLane, weight, key);
#pragma unroll
    for (int i = 0; i < kDims; ++i) {
      const int dim = lane + i * kWarp;
      if (first_dim + dim < head_dim) sum[i] = __fmaf_rn(by, ToFloat(row[dim]), sum[i]);
    }
  }
}

// Grid: (warps, slices of kDims * 32 output dimensions). Shared: a query in fp32 for each warp.
template <class E, int kDims, bool kWide>
__global__ void __launch_bounds__(kAttendWarps* kWarp, 4)
    GenericAttentionKernel(AttendParams<E> p) {
  extern __shared__ float queries[];
  WaitForEarlierGrids();
  LetNextGridStart();
  const int lane = threadIdx.x % kWarp, own = threadIdx.x / kWarp;
  const int warp = blockIdx.x * kAttendWarps + own;
  if (warp >= p.warps) return;
  const int token = warp / p.heads, head = warp % p.heads, sequence = token / p.q_len;
  const int context = p.contexts[sequence];
  const int keys = context - p.q_len + token % p.q_len + 1;
  if (context <= 0 || keys <= 0) return;
  float* query = queries + own * p.head_dim;
  const E* from = p.query + static_cast<int64_t>(warp) * p.head_dim;
  for (int d = lane; d < p.head_dim; d += kWarp) query[d] = ToFloat(from[d]);
  __syncwarp();
  const PagedKeys<E> paged{p, p.tables + static_cast<int64_t>(sequence) * p.width,
                           head / (p.heads / p.kv_heads)};
  const int first_dim = blockIdx.y * kDims * kWarp;
  float most = -INFINITY, total = 0.0f, sum[kDims] = {};
  for (int start = 0; start < keys; start += kWarp) {
    const int count = min(keys - start, kWarp);
    const E* key = paged.At(min(start + lane, keys - 1));
    const float score =
        lane < count ? __fmul_rn(Dot<E, kWide>(query, key, p.head_dim), p.scale) : -INFINITY;
    const float peak = fmaxf(most, MaxOfWarp(score));
    const float weight = lane < count ? expf(__fsub_rn(score, peak)) : 0.0f;
    const float keep = expf(__fsub_rn(most, peak));
    most = peak;
    total = __fmaf_rn(total, keep, SumOfWarp(weight));
#pragma unroll
    for (int i = 0; i < kDims; ++i) sum[i] = __fmul_rn(sum[i], keep);
    AddValues<E, kDims>(key + paged.ToValue(), weight, count, first_dim, p.head_dim, sum);
  }
  const float inverse = __fdiv_rn(1.0f, total);
  E* out = p.out + static_cast<int64_t>(warp) * p.head_dim + first_dim;
#pragma unroll
  for (int i = 0; i < kDims; ++i) {
    const int dim = lane + i * kWarp;
    if (first_dim + dim < p.head_dim) out[dim] = Rounded<E>(__fmul_rn(sum[i], inverse));
  }
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_GENERIC_ATTENTION_CUH_
