// Heads on their way from the projection to attention: norm, rotation, and the append of keys and
// values to the paged pool. A warp takes one head of one token.
#ifndef BATON_OPS_ROPE_STORE_CUH_
#define BATON_OPS_ROPE_STORE_CUH_

#include "baton_ops/grid_order.cuh"
#include "baton_ops/values.cuh"

namespace baton_ops::cuda {

constexpr int kRopeWarps = 8;
constexpr int kMostLaneHead = 4 * kWarp;  // elements of a head of which a lane has one group
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
  if (position >= 0 && column < p.width) block = __ldcg(p.tables + sequence * p.width + column);
  if (block <= kNullBlock || block >= p.blocks) block = kTrashBlock;
  const int offset = position >= 0 ? position % p.block_size : 0;
  const int64_t page = (static_cast<int64_t>(block) * p.layers + p.layer) * 2 + is_value;
  return p.pool + ((page * p.kv_heads + kv_head) * p.block_size + offset) * p.head_dim;
}

// Adds the squares of two pairs to a lane's sum.
__device__ __forceinline__ float Squares(const Pairs& pairs, float sum) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    sum = __fmaf_rn(pairs.a[i], pairs.a[i], sum);
    sum = __fmaf_rn(pairs.b[i], pairs.b[i], sum);
  }
  return sum;
}

// What a head is multiplied by, from its lanes' sums.
__device__ __forceinline__ float HeadScale(float sum, int head_dim, float eps) {
  const float mean = __fdiv_rn(SumOfWarp(sum), static_cast<float>(head_dim));
  return __frsqrt_rn(__fadd_rn(mean, eps));
}

__device__ __forceinline__ void Norm(const Pairs& weight, float scale, Pairs* pairs) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    pairs->a[i] = __fmul_rn(__fmul_rn(pairs->a[i], scale), weight.a[i]);
    pairs->b[i] = __fmul_rn(__fmul_rn(pairs->b[i], scale), weight.b[i]);
  }
}

struct Angles {
  float cos[2];
  float sin[2];
};

template <bool kWide>
__device__ __forceinline__ Angles LoadAngles(const float* cos, const float* sin, int group,
                                             int half) {
  Angles angles;
  const int pair = 2 * group;
  if constexpr (kWide) {
    const float2 c = *reinterpret_cast<const float2*>(cos + pair);
    const float2 s = *reinterpret_cast<const float2*>(sin + pair);
    return {{c.x, c.y}, {s.x, s.y}};
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      angles.cos[i] = pair + i < half ? cos[pair + i] : 0.0f;
      angles.sin[i] = pair + i < half ? sin[pair + i] : 0.0f;
    }
    return angles;
  }
}

__device__ __forceinline__ void Rotate(const Angles& by, Pairs* pairs) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float a = pairs->a[i], b = pairs->b[i];
    pairs->a[i] = __fmaf_rn(a, by.cos[i], -__fmul_rn(b, by.sin[i]));
    pairs->b[i] = __fmaf_rn(b, by.cos[i], __fmul_rn(a, by.sin[i]));
  }
}

// One head of one token: where it comes from, what it is multiplied by, where it goes.
template <class E>
struct HeadWork {
  const E* from;
  E* to;             // null: padding
  const E* norm;     // or null
  const float* cos;  // null: a value, which is not rotated
  const float* sin;

  __device__ __forceinline__ HeadWork(const RopeParams<E>& p, int warp)
      : from(nullptr), to(nullptr), norm(nullptr), cos(nullptr), sin(nullptr) {
    if (warp >= p.warps) return;
    const int all_heads = p.heads + 2 * p.kv_heads;
    const int token = warp / all_heads, head = warp % all_heads;
    const int sequence = __ldcg(p.sequence + token), position = __ldcg(p.position + token);
    if (sequence < 0 || sequence >= p.sequences) return;
    const bool is_query = head < p.heads, is_value = head >= p.heads + p.kv_heads;
    from = p.qkv + token * p.qkv_stride + static_cast<int64_t>(head) * p.head_dim;
    to = is_query ? p.query + (static_cast<int64_t>(token) * p.heads + head) * p.head_dim
                  : PoolRow(p, sequence, position, is_value, (head - p.heads) % p.kv_heads);
    if (is_value) return;
    norm = is_query ? p.query_norm : p.key_norm;
    const int64_t angle = min(max(position, 0), p.positions - 1) * int64_t{p.head_dim / 2};
    cos = p.cos + angle;
    sin = p.sin + angle;
  }
};

// Heads of at most 128: a lane has one group of pairs. All but the projection is read before the
// kernel before this one, which writes the projection, is complete.
template <class E, bool kInterleaved, bool kWide>
__global__ void __launch_bounds__(kRopeWarps* kWarp) RopeStoreKernel(RopeParams<E> p) {
  const int lane = threadIdx.x % kWarp;
  const HeadPairs<E, kInterleaved, kWide> place{p.head_dim / 2};
  const HeadWork<E> work(p, blockIdx.x * kRopeWarps + threadIdx.x / kWarp);
  const bool has_pairs = work.to && 2 * lane < place.half;
  Pairs weight{};
  Angles angles{};
  if (has_pairs && work.norm) weight = place.Load(work.norm, lane);
  if (has_pairs && work.cos) angles = LoadAngles<kWide>(work.cos, work.sin, lane, place.half);
  WaitForEarlierGrids();
  LetNextGridStart();
  if (!work.to) return;
  Pairs pairs{};
  if (has_pairs) pairs = place.Load(work.from, lane);
  if (work.norm) Norm(weight, HeadScale(Squares(pairs, 0.0f), p.head_dim, p.eps), &pairs);
  if (work.cos) Rotate(angles, &pairs);
  if (has_pairs) place.Store(work.to, lane, pairs);
}

// Heads of any size: each lane reads again what it summed.
template <class E, bool kInterleaved, bool kWide>
__global__ void __launch_bounds__(kRopeWarps* kWarp) RopeStoreLongKernel(RopeParams<E> p) {
  WaitForEarlierGrids();
  LetNextGridStart();
  const int lane = threadIdx.x % kWarp;
  const HeadPairs<E, kInterleaved, kWide> place{p.head_dim / 2};
  const HeadWork<E> work(p, blockIdx.x * kRopeWarps + threadIdx.x / kWarp);
  if (!work.to) return;
  float sum = 0.0f, scale = 1.0f;
  if (work.norm) {
    for (int group = lane; 2 * group < place.half; group += kWarp) {
      sum = Squares(place.Load(work.from, group), sum);
    }
    scale = HeadScale(sum, p.head_dim, p.eps);
  }
  for (int group = lane; 2 * group < place.half; group += kWarp) {
    Pairs pairs = place.Load(work.from, group);
    if (work.norm) Norm(place.Load(work.norm, group), scale, &pairs);
    if (work.cos) Rotate(LoadAngles<kWide>(work.cos, work.sin, group, place.half), &pairs);
    place.Store(work.to, group, pairs);
  }
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_ROPE_STORE_CUH_
