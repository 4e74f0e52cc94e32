// Heads on their way from the projection to attention: bias, norm, rotation, and the append of keys
// and values to the paged pool. A warp takes one head of a token, or a few.
#ifndef BATON_OPS_ROPE_STORE_CUH_
#define BATON_OPS_ROPE_STORE_CUH_

#include <cstring>

#include "baton_ops/grid_order.cuh"
#include "baton_ops/head_pairs.cuh"
#include "baton_ops/values.cuh"

namespace baton_ops::cuda {

constexpr int kRopeWarps = 8;
constexpr int kMostLaneHead = 4 * kWarp;  // elements of a head of which a lane has one group
// Heads of which eight lanes have 16 bytes of each half: as many as most models have.
constexpr int kVectorHead = 128;
constexpr int kHeadLanes = 8;
constexpr int kLaneGroups = kMostLaneHead / 4 / kHeadLanes;
constexpr int32_t kNullBlock = 0;
constexpr int32_t kTrashBlock = 1;

template <class E>
struct RopeParams {
  const E* qkv;
  int64_t qkv_stride;
  const E* bias;        // [heads + 2 * kv_heads, head_dim], of kernels with kBias
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
  int32_t tokens;
  E* query;
};

// Where a token stands, which all of its heads share.
struct TokenPlace {
  bool is_there;  // false: padding
  int32_t block;
  int32_t offset;
  int64_t angle;

  template <class Params>
  __device__ __forceinline__ TokenPlace(const Params& p, int token) {
    const int sequence = __ldcg(p.sequence + token), position = __ldcg(p.position + token);
    is_there = sequence >= 0 && sequence < p.sequences;
    block = kNullBlock;
    const int known = max(position, 0), column = known / p.block_size;
    if (is_there && position >= 0 && column < p.width) {
      block = __ldcg(p.tables + static_cast<int64_t>(sequence) * p.width + column);
    }
    if (block <= kNullBlock || block >= p.blocks) block = kTrashBlock;
    offset = known % p.block_size;
    angle = min(known, p.positions - 1) * int64_t{p.head_dim / 2};
  }
};

// One head of a token: where it goes, and its norm's weight, null for none.
template <class E>
struct HeadPlace {
  E* to;
  const E* norm;
  bool is_value;

  __device__ __forceinline__ HeadPlace(const RopeParams<E>& p, const TokenPlace& place, int token,
                                       int head) {
    is_value = head >= p.heads + p.kv_heads;
    if (head < p.heads) {
      to = p.query + (static_cast<int64_t>(token) * p.heads + head) * p.head_dim;
      norm = p.query_norm;
      return;
    }
    const int kv_head = head - p.heads - (is_value ? p.kv_heads : 0);
    const int64_t page = (static_cast<int64_t>(place.block) * p.layers + p.layer) * 2 + is_value;
    to = p.pool + ((page * p.kv_heads + kv_head) * p.block_size + place.offset) * p.head_dim;
    norm = is_value ? nullptr : p.key_norm;
  }
};

// Heads of at most kMostLaneHead: a lane has one group of pairs. A warp takes kPer heads of a
// token. All but the projection is read before the kernel before this one, which writes it, is
// complete, and maybe the one before that.
template <class E, bool kInterleaved, bool kWide, bool kBias, int kPer>
__global__ void __launch_bounds__(kRopeWarps* kWarp) RopeStoreKernel(RopeParams<E> p) {
  const int lane = threadIdx.x % kWarp, warp = blockIdx.x * kRopeWarps + threadIdx.x / kWarp;
  const int all_heads = p.heads + 2 * p.kv_heads, parts = (all_heads + kPer - 1) / kPer;
  const int token = min(warp / parts, p.tokens - 1), first = warp % parts * kPer;
  const HeadPairs<E, kInterleaved, kWide> pairs_of{p.head_dim / 2};
  const TokenPlace place(p, token);
  const bool has_pairs = 2 * lane < pairs_of.half;
  Angles angles{};
  Pairs query_norm{}, key_norm{};
  if (has_pairs) {
    angles = LoadAngles<kWide>(p.cos + place.angle, p.sin + place.angle, lane, pairs_of.half);
    if (p.query_norm) query_norm = pairs_of.Load(p.query_norm, lane);
    if (p.key_norm) key_norm = pairs_of.Load(p.key_norm, lane);
  }
  Pairs bias[kBias ? kPer : 1] = {};
  if constexpr (kBias) {
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      const int head = min(first + i, all_heads - 1);
      if (has_pairs) bias[i] = pairs_of.Load(p.bias + int64_t{head} * p.head_dim, lane);
    }
  }
  LetNextGridStart();
  WaitForEarlierGrids();
  if (!place.is_there || warp / parts >= p.tokens) return;
  const E* from = p.qkv + token * p.qkv_stride + static_cast<int64_t>(first) * p.head_dim;
  Pairs pairs[kPer] = {};
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    if (has_pairs && first + i < all_heads) pairs[i] = pairs_of.Load(from + i * p.head_dim, lane);
  }
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    if (first + i >= all_heads) break;
    const HeadPlace<E> head(p, place, token, first + i);
    if constexpr (kBias) Add(bias[i], &pairs[i]);
    if (head.norm) {
      const float scale = HeadScale(SumOfWarp(Squares(pairs[i], 0.0f)), p.head_dim, p.eps);
      Norm(first + i < p.heads ? query_norm : key_norm, scale, &pairs[i]);
    }
    if (!head.is_value) Rotate(angles, &pairs[i]);
    if (has_pairs) pairs_of.Store(head.to, lane, pairs[i]);
  }
}

// What a lane of kHeadLanes has of a head: the groups of pairs of kLaneGroups lanes above.
struct LanePairs {
  Pairs group[kLaneGroups];
};

// kChunk elements from each half of a head. E: two bytes.
template <class E>
struct HalfChunks {
  Packed<E, kChunk> a;
  Packed<E, kChunk> b;

  __device__ __forceinline__ void Load(const E* head, int lane) {
    a = LoadChunk<E, true>(head, lane * kChunk, kVectorHead);
    b = LoadChunk<E, true>(head, kVectorHead / 2 + lane * kChunk, kVectorHead);
  }
  __device__ __forceinline__ LanePairs ToPairs() const {
    LanePairs pairs;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      pairs.group[i / 2].a[i % 2] = ToFloat(a.at[i]);
      pairs.group[i / 2].b[i % 2] = ToFloat(b.at[i]);
    }
    return pairs;
  }
};

// Word by word, so that all stay in registers.
template <class E>
__device__ __forceinline__ Packed<E, kChunk> Chosen(bool is_first, const Packed<E, kChunk>& first,
                                                    const Packed<E, kChunk>& second) {
  uint4 x, y;
  memcpy(&x, &first, sizeof x);
  memcpy(&y, &second, sizeof y);
  x = is_first ? x : y;
  Packed<E, kChunk> chosen;
  memcpy(&chosen, &x, sizeof x);
  return chosen;
}

template <class E>
__device__ __forceinline__ void StoreHead(E* head, int lane, const LanePairs& pairs) {
  HalfChunks<E> chunks;
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    chunks.a.at[i] = Rounded<E>(pairs.group[i / 2].a[i % 2]);
    chunks.b.at[i] = Rounded<E>(pairs.group[i / 2].b[i % 2]);
  }
  StoreChunk<E, true>(head, lane * kChunk, kVectorHead, chunks.a);
  StoreChunk<E, true>(head, kVectorHead / 2 + lane * kChunk, kVectorHead, chunks.b);
}

// The sum that SumOfWarp would give if each group had a lane of its own: the same order, the same
// bits. Every lane of the warp must call it.
__device__ __forceinline__ float SumOfHead(const LanePairs& pairs) {
  float sums[kLaneGroups];
#pragma unroll
  for (int i = 0; i < kLaneGroups; ++i) {
    sums[i] = Squares(pairs.group[i], 0.0f);
#pragma unroll
    for (int distance = kHeadLanes / 2; distance > 0; distance /= 2) {
      sums[i] = __fadd_rn(sums[i], __shfl_xor_sync(kEveryLane, sums[i], distance));
    }
  }
  static_assert(kLaneGroups == 4);
  return __fadd_rn(__fadd_rn(sums[0], sums[2]), __fadd_rn(sums[1], sums[3]));
}

// Heads of kVectorHead elements of two bytes, pairs in halves: eight lanes take kPer heads of a
// token, with the bits of the kernel above.
template <class E, bool kBias, int kPer>
__global__ void __launch_bounds__(kRopeWarps* kWarp) RopeStoreVectorKernel(RopeParams<E> p) {
  const int lane = threadIdx.x % kHeadLanes;
  const int part = (blockIdx.x * kRopeWarps * kWarp + threadIdx.x) / kHeadLanes;
  const int all_heads = p.heads + 2 * p.kv_heads, parts = (all_heads + kPer - 1) / kPer;
  const int token = min(part / parts, p.tokens - 1), first = part % parts * kPer;
  const TokenPlace place(p, token);
  Angles angles[kLaneGroups];
#pragma unroll
  for (int i = 0; i < kLaneGroups; ++i) {
    angles[i] = LoadAngles<true>(p.cos + place.angle, p.sin + place.angle, lane * kLaneGroups + i,
                                 kVectorHead / 2);
  }
  HalfChunks<E> query_norm{}, key_norm{};
  if (p.query_norm) query_norm.Load(p.query_norm, lane);
  if (p.key_norm) key_norm.Load(p.key_norm, lane);
  HalfChunks<E> bias[kBias ? kPer : 1] = {};
  if constexpr (kBias) {
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      bias[i].Load(p.bias + int64_t{min(first + i, all_heads - 1)} * kVectorHead, lane);
    }
  }
  LetNextGridStart();
  WaitForEarlierGrids();
  const int heads = place.is_there && part / parts < p.tokens ? min(kPer, all_heads - first) : 0;
  const E* from = p.qkv + token * p.qkv_stride + static_cast<int64_t>(first) * kVectorHead;
  HalfChunks<E> chunks[kPer] = {};
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    if (i < heads) chunks[i].Load(from + i * kVectorHead, lane);
  }
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const HeadPlace<E> head(p, place, token, min(first + i, all_heads - 1));
    LanePairs pairs = chunks[i].ToPairs();
    if constexpr (kBias) {
      const LanePairs added = bias[i].ToPairs();
#pragma unroll
      for (int j = 0; j < kLaneGroups; ++j) Add(added.group[j], &pairs.group[j]);
    }
    const float scale = HeadScale(SumOfHead(pairs), kVectorHead, p.eps);
    const bool is_query = first + i < p.heads;
    const LanePairs weight = HalfChunks<E>{Chosen(is_query, query_norm.a, key_norm.a),
                                           Chosen(is_query, query_norm.b, key_norm.b)}
                                 .ToPairs();
#pragma unroll
    for (int j = 0; j < kLaneGroups; ++j) {
      if (head.norm) Norm(weight.group[j], scale, &pairs.group[j]);
      if (!head.is_value) Rotate(angles[j], &pairs.group[j]);
    }
    if (i < heads) StoreHead(head.to, lane, pairs);
  }
}

// Heads of any size: each lane reads again what it summed. A warp takes a head.
template <class E, bool kInterleaved, bool kWide, bool kBias>
__global__ void __launch_bounds__(kRopeWarps* kWarp) RopeStoreLongKernel(RopeParams<E> p) {
  LetNextGridStart();
  WaitForEarlierGrids();
  const int lane = threadIdx.x % kWarp, warp = blockIdx.x * kRopeWarps + threadIdx.x / kWarp;
  const int all_heads = p.heads + 2 * p.kv_heads, token = warp / all_heads, of = warp % all_heads;
  if (token >= p.tokens) return;
  const TokenPlace place(p, token);
  if (!place.is_there) return;
  const HeadPairs<E, kInterleaved, kWide> pairs_of{p.head_dim / 2};
  const HeadPlace<E> head(p, place, token, of);
  const E* from = p.qkv + token * p.qkv_stride + static_cast<int64_t>(of) * p.head_dim;
  const auto load = [&](int group) {
    Pairs pairs = pairs_of.Load(from, group);
    if constexpr (kBias) Add(pairs_of.Load(p.bias + int64_t{of} * p.head_dim, group), &pairs);
    return pairs;
  };
  float sum = 0.0f, scale = 1.0f;
  if (head.norm) {
    for (int group = lane; 2 * group < pairs_of.half; group += kWarp) {
      sum = Squares(load(group), sum);
    }
    scale = HeadScale(SumOfWarp(sum), p.head_dim, p.eps);
  }
  const float *cos = p.cos + place.angle, *sin = p.sin + place.angle;
  for (int group = lane; 2 * group < pairs_of.half; group += kWarp) {
    Pairs pairs = load(group);
    if (head.norm) Norm(pairs_of.Load(head.norm, group), scale, &pairs);
    if (!head.is_value) Rotate(LoadAngles<kWide>(cos, sin, group, pairs_of.half), &pairs);
    pairs_of.Store(head.to, group, pairs);
  }
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_ROPE_STORE_CUH_
