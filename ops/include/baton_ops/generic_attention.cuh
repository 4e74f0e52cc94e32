// Causal attention over a paged pool, of any head dimension. A block takes one token's queries of
// one KV head. Keys are cut into ranges from position 0; a range is one warp's, in tiles of a key a
// lane, and an output adds its ranges in ascending order. So nothing that is added depends on
// another query or on how many there are. A value is of the key's size and lies apart, or is the
// beginning of the key, where rows are kept that are both.
#ifndef BATON_OPS_GENERIC_ATTENTION_CUH_
#define BATON_OPS_GENERIC_ATTENTION_CUH_

#include <cmath>

#include "baton_ops/grid_order.cuh"
#include "baton_ops/values.cuh"

namespace baton_ops::cuda {

constexpr int kAttendWarps = 8;
constexpr int kAttendThreads = kAttendWarps * kWarp;
constexpr int kAttendRange = 2 * kWarp;  // keys

template <class E>
struct AttendParams {
  const E* query;
  E* out;
  const E* pool;
  const int32_t* tables;
  const int32_t* contexts;
  int32_t heads;
  int32_t q_len;
  int32_t width;
  int32_t blocks;
  int32_t layers;
  int32_t layer;
  int32_t kv_heads;
  int32_t block_size;
  int32_t head_dim;
  int32_t parts;      // of a layer's page: 2, keys and values, or 1, rows that are both
  int32_t value_dim;  // at most head_dim
  float scale;
};

// Where the keys of one KV head of one sequence lie.
template <class E>
struct KeyPlaces {
  const AttendParams<E>& p;
  const int32_t* table;
  int kv_head;

  // The key at a position; the null block's where the table names no block.
  __device__ __forceinline__ const E* At(int position) const {
    const int column = position / p.block_size;
    int32_t block = column < p.width ? table[column] : 0;
    if (block < 0 || block >= p.blocks) block = 0;
    const int64_t page = (static_cast<int64_t>(block) * p.layers + p.layer) * p.parts;
    const int64_t row = (page * p.kv_heads + kv_head) * p.block_size + position % p.block_size;
    return p.pool + row * p.head_dim;
  }
  // From a key to its value.
  __device__ __forceinline__ int64_t ToValue() const {
    return static_cast<int64_t>(p.parts - 1) * p.kv_heads * p.block_size * p.head_dim;
  }
};

// Of kHeads queries over a range of keys: the largest score, the sum of weights, a lane's sums of
// weighted values.
template <int kHeads, int kDims>
struct Attended {
  float most[kHeads];
  float total[kHeads];
  float sum[kHeads][kDims];
};

// Products of kHeads queries, in shared memory, with one key. kWide: a key is whole vectors.
template <class E, int kHeads, bool kWide>
__device__ __forceinline__ void Dots(const float* queries, const E* key, int head_dim, float* sum) {
  constexpr int kCount = kWide ? kPerVector<E> : 1;
#pragma unroll
  for (int head = 0; head < kHeads; ++head) sum[head] = 0.0f;
#pragma unroll 2
  for (int first = 0; first < head_dim; first += kCount) {
    const auto values = *reinterpret_cast<const Packed<E, kCount>*>(key + first);
#pragma unroll
    for (int head = 0; head < kHeads; ++head) {
      const auto query =
          *reinterpret_cast<const Packed<float, kCount>*>(queries + head * head_dim + first);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        sum[head] = __fmaf_rn(query.at[i], ToFloat(values.at[i]), sum[head]);
      }
    }
  }
}

// Adds a tile's values, key by key. `value` and `weight` are of the lane's own key. kWhole: a
// lane's dimensions lie side by side; else a warp apart, as far as there are any.
template <class E, int kHeads, int kDims, bool kWhole>
__device__ __forceinline__ void AddValues(const E* value, const float* weight, int count,
                                          int dims_left, float (*sum)[kDims]) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll 4
  for (int key = 0; key < count; ++key) {
    const auto address = reinterpret_cast<unsigned long long>(value);
    const E* row = reinterpret_cast<const E*>(__shfl_sync(kEveryLane, address, key));
    Packed<E, kDims> values;
    if constexpr (kWhole) {
      values = *reinterpret_cast<const Packed<E, kDims>*>(row + lane * kDims);
    } else {
#pragma unroll
      for (int i = 0; i < kDims; ++i) {
        const int dim = lane + i * kWarp;
        values.at[i] = dim < dims_left ? row[dim] : Rounded<E>(0.0f);
      }
    }
#pragma unroll
    for (int head = 0; head < kHeads; ++head) {
      const float by = __shfl_sync(kEveryLane, weight[head], key);
#pragma unroll
      for (int i = 0; i < kDims; ++i) {
        sum[head][i] = __fmaf_rn(by, ToFloat(values.at[i]), sum[head][i]);
      }
    }
  }
}

// A range's keys start .. end - 1.
template <class E, int kHeads, int kDims, bool kWide, bool kWhole>
__device__ __forceinline__ void AttendRange(const AttendParams<E>& p, const KeyPlaces<E>& places,
                                            const float* queries, int start, int end, int first_dim,
                                            Attended<kHeads, kDims>* out) {
  const int lane = threadIdx.x % kWarp;
  for (int tile = start; tile < end; tile += kWarp) {
    const int count = min(end - tile, kWarp);
    const E* key = places.At(min(tile + lane, end - 1));
    float weight[kHeads];
    Dots<E, kHeads, kWide>(queries, key, p.head_dim, weight);
#pragma unroll
    for (int head = 0; head < kHeads; ++head) {
      const float score = lane < count ? __fmul_rn(weight[head], p.scale) : -INFINITY;
      const float most = fmaxf(out->most[head], MaxOfWarp(score));
      const float keep = expf(__fsub_rn(out->most[head], most));
      weight[head] = lane < count ? expf(__fsub_rn(score, most)) : 0.0f;
      out->most[head] = most;
      out->total[head] = __fmaf_rn(out->total[head], keep, SumOfWarp(weight[head]));
#pragma unroll
      for (int i = 0; i < kDims; ++i) out->sum[head][i] = __fmul_rn(out->sum[head][i], keep);
    }
    AddValues<E, kHeads, kDims, kWhole>(key + places.ToValue() + first_dim, weight, count,
                                        p.value_dim - first_dim, out->sum);
  }
}

// What a block keeps in shared memory: its queries, and a range's results of each warp.
template <int kHeads, int kDims>
struct AttendShared {
  static constexpr int kOutputs = kHeads * kDims * kWarp;
  float* queries;  // [kHeads][head_dim]
  float* most;     // [kAttendWarps][kHeads]
  float* total;    // [kAttendWarps][kHeads]
  float* sum;      // [kAttendWarps][kOutputs]

  static size_t Bytes(int head_dim) {
    return (kHeads * head_dim + kAttendWarps * (2 * kHeads + kOutputs)) * sizeof(float);
  }
  __device__ __forceinline__ explicit AttendShared(float* base)
      : queries(base + kAttendWarps * (2 * kHeads + kOutputs)),
        most(base + kAttendWarps * kOutputs),
        total(most + kAttendWarps * kHeads),
        sum(base) {}

  // kWhole as in AddValues.
  template <bool kWhole>
  __device__ __forceinline__ void Put(const Attended<kHeads, kDims>& range) const {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
#pragma unroll
    for (int head = 0; head < kHeads; ++head) {
      if (lane == 0) most[warp * kHeads + head] = range.most[head];
      if (lane == 0) total[warp * kHeads + head] = range.total[head];
#pragma unroll
      for (int i = 0; i < kDims; ++i) {
        const int dim = kWhole ? lane * kDims + i : lane + i * kWarp;
        sum[warp * kOutputs + head * kDims * kWarp + dim] = range.sum[head][i];
      }
    }
  }
};

// One output element as its ranges are added.
struct Joined {
  float most = -INFINITY;
  float total = 0.0f;
  float sum = 0.0f;

  __device__ __forceinline__ void Add(float range_most, float range_total, float range_sum) {
    const float peak = fmaxf(most, range_most);
    const float keep = expf(__fsub_rn(most, peak)), by = expf(__fsub_rn(range_most, peak));
    total = __fmaf_rn(range_total, by, __fmul_rn(total, keep));
    sum = __fmaf_rn(range_sum, by, __fmul_rn(sum, keep));
    most = peak;
  }
};

// Grid: (tokens, heads / kHeads, slices of kDims * 32 output dimensions).
template <class E, int kHeads, int kDims, bool kWide, bool kWhole>
__global__ void __launch_bounds__(kAttendThreads, 2) GenericAttentionKernel(AttendParams<E> p) {
  extern __shared__ __align__(16) float memory[];
  using Shared = AttendShared<kHeads, kDims>;
  constexpr int kOwn = (Shared::kOutputs + kAttendThreads - 1) / kAttendThreads;
  WaitForEarlierGrids();
  LetNextGridStart();
  const Shared shared(memory);
  const int token = blockIdx.x, head = blockIdx.y * kHeads, sequence = token / p.q_len;
  const int first_dim = blockIdx.z * kDims * kWarp, warp = threadIdx.x / kWarp;
  const int context = p.contexts[sequence];
  const int keys = context - p.q_len + token % p.q_len + 1;
  if (context <= 0 || keys <= 0) return;
  const int64_t first_head = static_cast<int64_t>(token) * p.heads + head;
  for (int i = threadIdx.x; i < kHeads * p.head_dim; i += kAttendThreads) {
    shared.queries[i] = ToFloat(p.query[first_head * p.head_dim + i]);
  }
  __syncthreads();
  const KeyPlaces<E> places{p, p.tables + static_cast<int64_t>(sequence) * p.width,
                            head / (p.heads / p.kv_heads)};
  Joined joined[kOwn];
  for (int round = 0; round < keys; round += kAttendWarps * kAttendRange) {
    const int start = round + warp * kAttendRange, end = min(start + kAttendRange, keys);
    if (start < end) {
      Attended<kHeads, kDims> range{};
#pragma unroll
      for (int i = 0; i < kHeads; ++i) range.most[i] = -INFINITY;
      AttendRange<E, kHeads, kDims, kWide, kWhole>(p, places, shared.queries, start, end, first_dim,
                                                   &range);
      shared.template Put<kWhole>(range);
    }
    __syncthreads();
    for (int from = 0; from < kAttendWarps && round + from * kAttendRange < keys; ++from) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const int own = threadIdx.x + i * kAttendThreads, of = own / (kDims * kWarp);
        if (own >= Shared::kOutputs) break;
        joined[i].Add(shared.most[from * kHeads + of], shared.total[from * kHeads + of],
                      shared.sum[from * Shared::kOutputs + own]);
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int own = threadIdx.x + i * kAttendThreads, of = own / (kDims * kWarp);
    const int dim = first_dim + own % (kDims * kWarp);
    if (own >= Shared::kOutputs || dim >= p.value_dim) continue;
    p.out[(first_head + of) * p.value_dim + dim] =
        Rounded<E>(__fmul_rn(joined[i].sum, __fdiv_rn(1.0f, joined[i].total)));
  }
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_GENERIC_ATTENTION_CUH_
