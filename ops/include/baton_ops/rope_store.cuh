// Heads on their way from the projection to attention: norm, rotation, and the append of keys and
// values to the paged pool. A warp takes one head of one token.
#ifndef BATON_OPS_ROPE_STORE_CUH_
#define BATON_OPS_ROPE_STORE_CUH_

#include "baton_ops/grid_order.cuh"
#include "baton_ops/values.cuh"

namespace baton_ops::cuda {

constexpr int kRopeWarps = 8;
constexpr int32_t kNullBlock = 0;
constexpr int32_t kTrashBlock = 1;

template <class E>
struct RopeParams {
  const E* qkv;
  int64_t qkv_stride;
  const E* query_norm;  // or null
  const E* key_norm;
  float eps;
  const float* cos;
  const float* sin;
  int32_t positions;
  const int32_t* sequence;
  const int32_t* position;
  const int32_t* tables;
  int32_t sequences;
  int32_t width;
  E* pool;
  int32_t blocks;
  int32_t layers;
  int32_t layer;
  int32_t kv_heads;
  int32_t block_size;
  int32_t head_dim;
  int32_t heads;
  int32_t warps;  // tokens * (heads + 2 * kv_heads)
  E* query;
};

// Two pairs of elements that rotate together: a with b.
struct Pairs {
  float a[2];
  float b[2];
};

// Where pairs 2 * group and 2 * group + 1 of a head lie. kWide: both are there, two elements on
// the boundary of two.
template <class E, bool kInterleaved, bool kWide>
struct HeadPairs {
  int half;

  __device__ __forceinline__ int A(int pair) const { return kInterleaved ? 2 * pair : pair; }
  __device__ __forceinline__ int B(int pair) const {
    return kInterleaved ? 2 * pair + 1 : pair + half;
  }
  __device__ __forceinline__ Pairs Load(const E* head, int group) const {
    const int pair = 2 * group;
    Pairs pairs;
    if constexpr (kWide) {
      using Two = Packed<E, 2>;
      const Two first = *reinterpret_cast<const Two*>(head + A(pair));
      const Two second =
          *reinterpret_cast<const Two*>(head + (kInterleaved ? A(pair + 1) : B(pair)));
      pairs.a[0] = ToFloat(first.at[0]);
      pairs.a[1] = ToFloat(kInterleaved ? second.at[0] : first.at[1]);
      pairs.b[0] = ToFloat(kInterleaved ? first.at[1] : second.at[0]);
      pairs.b[1] = ToFloat(second.at[1]);
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const bool is_there = pair + i < half;
        pairs.a[i] = is_there ? ToFloat(head[A(pair + i)]) : 0.0f;
        pairs.b[i] = is_there ? ToFloat(head[B(pair + i)]) : 0.0f;
      }
    }
    return pairs;
  }
  __device__ __forceinline__ void Store(E* head, int group, const Pairs& pairs) const {
    const int pair = 2 * group;
    if constexpr (kWide) {
      using Two = Packed<E, 2>;
      const E a0 = Rounded<E>(pairs.a[0]), a1 = Rounded<E>(pairs.a[1]);
      const E b0 = Rounded<E>(pairs.b[0]), b1 = Rounded<E>(pairs.b[1]);
      *reinterpret_cast<Two*>(head + A(pair)) = kInterleaved ? Two{a0, b0} : Two{a0, a1};
      *reinterpret_cast<Two*>(head + (kInterleaved ? A(pair + 1) : B(pair))) =
          kInterleaved ? Two{a1, b1} : Two{b0, b1};
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (pair + i >= half) break;
        head[A(pair + i)] = Rounded<E>(pairs.a[i]);
        head[B(pair + i)] = Rounded<E>(pairs.b[i]);
      }
    }
  }
};

template <class E>
__device__ __forceinline__ E* PoolRow(const RopeParams<E>& p, int64_t sequence, int position,
                                      int is_value, int kv_head) {
  const int column = position / p.block_size;
  int32_t block = kNullBlock;
  if (position >= 0 && column < p.width) block = p.tables[sequence * p.width + column];
  if (block <= kNullBlock || block >= p.blocks) block = kTrashBlock;
  const int offset = position >= 0 ? position % p.block_size : 0;
  const int64_t page = (static_cast<int64_t>(block) * p.layers + p.layer) * 2 + is_value;
  return p.pool + ((page * p.kv_heads + kv_head) * p.block_size + offset) * p.head_dim;
}

// What a head is multiplied by: sums over a lane's pairs in order, then over lanes.
template <class E, class Place>
__device__ __forceinline__ float HeadScale(const RopeParams<E>& p, const Place& place,
                                           const E* head, int lane) {
  float sum = 0.0f;
  for (int group = lane; 2 * group < place.half; group += kWarp) {
    const Pairs pairs = place.Load(head, group);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum = __fmaf_rn(pairs.a[i], pairs.a[i], sum);
      sum = __fmaf_rn(pairs.b[i], pairs.b[i], sum);
    }
  }
  const float mean = __fdiv_rn(SumOfWarp(sum), static_cast<float>(p.head_dim));
  return __frsqrt_rn(__fadd_rn(mean, p.eps));
}

template <class E, class Place>
__device__ __forceinline__ void Norm(const Place& place, const E* weight, int group, float scale,
                                     Pairs* pairs) {
  const Pairs by = place.Load(weight, group);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    pairs->a[i] = __fmul_rn(__fmul_rn(pairs->a[i], scale), by.a[i]);
    pairs->b[i] = __fmul_rn(__fmul_rn(pairs->b[i], scale), by.b[i]);
  }
}

template <bool kWide>
__device__ __forceinline__ void Rotate(const float* cos, const float* sin, int group, int half,
                                       Pairs* pairs) {
  float c[2], s[2];
  const int pair = 2 * group;
  if constexpr (kWide) {
    const float2 cc = *reinterpret_cast<const float2*>(cos + pair);
    const float2 ss = *reinterpret_cast<const float2*>(sin + pair);
    c[0] = cc.x, c[1] = cc.y, s[0] = ss.x, s[1] = ss.y;
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      c[i] = pair + i < half ? cos[pair + i] : 0.0f;
      s[i] = pair + i < half ? sin[pair + i] : 0.0f;
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float a = pairs->a[i], b = pairs->b[i];
    pairs->a[i] = __fmaf_rn(a, c[i], -__fmul_rn(b, s[i]));
    pairs->b[i] = __fmaf_rn(b, c[i], __fmul_rn(a, s[i]));
  }
}

template <class E, bool kInterleaved, bool kWide>
__global__ void __launch_bounds__(kRopeWarps* kWarp) RopeStoreKernel(RopeParams<E> p) {
  WaitForEarlierGrids();
  LetNextGridStart();
  const int warp = blockIdx.x * kRopeWarps + threadIdx.x / kWarp;
  if (warp >= p.warps) return;
  const int lane = threadIdx.x % kWarp, all_heads = p.heads + 2 * p.kv_heads;
  const int token = warp / all_heads, head = warp % all_heads;
  const int sequence = p.sequence[token], position = p.position[token];
  if (sequence < 0 || sequence >= p.sequences) return;
  const HeadPairs<E, kInterleaved, kWide> place{p.head_dim / 2};
  const E* source = p.qkv + token * p.qkv_stride + static_cast<int64_t>(head) * p.head_dim;
  const bool is_query = head < p.heads, is_value = head >= p.heads + p.kv_heads;
  E* to = is_query ? p.query + (static_cast<int64_t>(token) * p.heads + head) * p.head_dim
                   : PoolRow(p, sequence, position, is_value, (head - p.heads) % p.kv_heads);
  const E* norm = is_query ? p.query_norm : is_value ? nullptr : p.key_norm;
  const float scale = norm ? HeadScale(p, place, source, lane) : 1.0f;
  const int64_t angle = min(max(position, 0), p.positions - 1) * static_cast<int64_t>(place.half);
  for (int group = lane; 2 * group < place.half; group += kWarp) {
    Pairs pairs = place.Load(source, group);
    if (norm) Norm(place, norm, group, scale, &pairs);
    if (!is_value) Rotate<kWide>(p.cos + angle, p.sin + angle, group, place.half, &pairs);
    place.Store(to, group, pairs);
  }
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_ROPE_STORE_CUH_
