// Logprobs under nucleus sampling, for the few rows that ask: the nucleus is found by radix over
// the order of the logits with masses in fixed point, so that the result depends on the row alone.
//
// A token is dropped where the mass of those before it, by (logit descending, id ascending),
// exceeds top_p. Kept tokens lose the log of the kept mass; dropped ones get the lowest logprob.
#ifndef BATON_OPS_TOP_P_CUH_
#define BATON_OPS_TOP_P_CUH_

#include "baton_ops/element.cuh"
#include "baton_ops/logprob_params.cuh"

namespace baton_ops::cuda {

constexpr int kTopPThreads = 1024;
constexpr int kBuckets = 256;
constexpr float kMassUnit = 8796093022208.0f;  // 2^43: the sum over 2^20 logits fits 63 bits

struct TopPShared {
  unsigned long long mass[kBuckets];
  uint32_t count[kBuckets];
  uint32_t warp[32];
  uint32_t prefix;
  unsigned long long before;
  unsigned long long total;
  uint32_t last_tie;
  uint32_t max_ordered;
};

// The last token kept: all tokens ahead of (ordered, id) are.
struct Nucleus {
  uint32_t ordered;
  uint32_t id;
  double log_mass;
};

template <class E>
struct TopPRow {
  const typename E::Raw* logits;
  uint32_t vocab;
  float scale;
  float highest;

  __device__ __forceinline__ float Logit(uint32_t id) const { return E::FromRaw(logits[id]); }
  __device__ __forceinline__ unsigned long long Mass(float logit) const {
    return __float2ull_rn(exp2f((logit - highest) * scale) * kMassUnit);
  }
};

template <class E>
__device__ float BlockMax(const TopPRow<E>& row, TopPShared& shared) {
  if (threadIdx.x == 0) shared.max_ordered = 0;
  __syncthreads();
  uint32_t best = 0;
  for (uint32_t id = threadIdx.x; id < row.vocab; id += kTopPThreads) {
    best = max(best, OrderedValue(row.Logit(id)));
  }
  best = __reduce_max_sync(0xffffffffu, best);
  if (threadIdx.x % 32 == 0) atomicMax(&shared.max_ordered, best);
  __syncthreads();
  return ValueOfOrdered(shared.max_ordered);
}

// Masses and counts by the digit at `shift`, of the logits that agree with `prefix` above it.
template <class E>
__device__ void Histogram(const TopPRow<E>& row, uint32_t prefix, int shift, TopPShared& shared) {
  for (int i = threadIdx.x; i < kBuckets; i += kTopPThreads) {
    shared.mass[i] = 0;
    shared.count[i] = 0;
  }
  __syncthreads();
  for (uint32_t id = threadIdx.x; id < row.vocab; id += kTopPThreads) {
    const float logit = row.Logit(id);
    const uint32_t ordered = OrderedValue(logit);
    if (shift < 24 && (ordered ^ prefix) >> (shift + 8) != 0) continue;
    const uint32_t digit = ordered >> shift & (kBuckets - 1);
    const unsigned long long mass = row.Mass(logit);
    if (mass) atomicAdd(&shared.mass[digit], mass);
    atomicAdd(&shared.count[digit], 1u);
  }
  __syncthreads();
}

// One thread: the lowest bucket that holds anything and has no more than `target` ahead of it.
__device__ __forceinline__ void ChooseBucket(float top_p, int shift, TopPShared& shared) {
  if (shift == 24) {
    shared.total = 0;
    for (int i = 0; i < kBuckets; ++i) shared.total += shared.mass[i];
  }
  const auto target = static_cast<unsigned long long>(static_cast<double>(top_p) * shared.total);
  unsigned long long before = shared.before, chosen_before = before;
  int chosen = kBuckets - 1;
  for (int i = kBuckets - 1; i >= 0 && before <= target; --i) {
    if (shared.count[i] != 0) {
      chosen = i;
      chosen_before = before;
    }
    before += shared.mass[i];
  }
  shared.before = chosen_before;
  shared.prefix |= static_cast<uint32_t>(chosen) << shift;
}

// The id of the n-th logit (from 1) of exactly this order. Each thread owns an interval of ids.
template <class E>
__device__ uint32_t NthTie(const TopPRow<E>& row, uint32_t ordered, uint32_t n,
                           TopPShared& shared) {
  const uint32_t interval = (row.vocab + kTopPThreads - 1) / kTopPThreads;
  const uint32_t first = threadIdx.x * interval, last = min(first + interval, row.vocab);
  uint32_t mine = 0;
  for (uint32_t id = first; id < last; ++id) mine += OrderedValue(row.Logit(id)) == ordered;
  const int lane = threadIdx.x % 32;
  uint32_t through = mine;
  for (int offset = 1; offset < 32; offset *= 2) {
    const uint32_t other = __shfl_up_sync(0xffffffffu, through, offset);
    if (lane >= offset) through += other;
  }
  if (lane == 31) shared.warp[threadIdx.x / 32] = through;
  __syncthreads();
  for (uint32_t w = 0; w < threadIdx.x / 32; ++w) through += shared.warp[w];
  uint32_t seen = through - mine;
  if (seen < n && n <= through) {
    for (uint32_t id = first; id < last; ++id) {
      if (OrderedValue(row.Logit(id)) == ordered && ++seen == n) shared.last_tie = id;
    }
  }
  __syncthreads();
  return shared.last_tie;
}

template <class E>
__device__ Nucleus FindNucleus(const TopPRow<E>& row, float top_p, TopPShared& shared) {
  if (threadIdx.x == 0) {
    shared.prefix = 0;
    shared.before = 0;
  }
  for (int shift = 24; shift >= 0; shift -= 8) {
    __syncthreads();
    Histogram(row, shared.prefix, shift, shared);
    if (threadIdx.x == 0) ChooseBucket(top_p, shift, shared);
  }
  __syncthreads();
  const uint32_t ordered = shared.prefix;
  const uint32_t ties = shared.count[ordered & (kBuckets - 1)];
  const unsigned long long each = row.Mass(ValueOfOrdered(ordered));
  const auto target = static_cast<unsigned long long>(static_cast<double>(top_p) * shared.total);
  const unsigned long long room = each == 0 ? ties : (target - shared.before) / each + 1;
  const uint32_t kept = room < ties ? static_cast<uint32_t>(room) : ties;
  const double mass = static_cast<double>(shared.before + kept * each) / shared.total;
  return {ordered, NthTie(row, ordered, kept, shared), log(mass)};
}

__device__ __forceinline__ float Renormalised(float logprob, uint64_t key, const Nucleus& nucleus) {
  const bool kept = key >= OrderedKey(nucleus.ordered, nucleus.id);
  if (!kept || logprob <= kLowestLogprob) return kLowestLogprob;
  return static_cast<float>(logprob - nucleus.log_mass);
}

// One block per row; rows whose top_p is not in (0, 1) are left as they are.
template <class E>
__global__ void __launch_bounds__(kTopPThreads) TopPKernel(LogprobParams p, const float* top_p) {
  using Raw = typename E::Raw;
  __shared__ TopPShared shared;
  const int32_t t = blockIdx.x;
  const int32_t rows = p.num_rows ? min(*p.num_rows, p.rows) : p.rows;
  if (t >= rows || p.k[t] < 0 || !(top_p[t] > 0.0f && top_p[t] < 1.0f)) return;
  const int64_t source = p.row_index ? p.row_index[t] : t;
  TopPRow<E> row{reinterpret_cast<const Raw*>(p.logits + source * p.row_bytes),
                 static_cast<uint32_t>(p.vocab), 0.0f, 0.0f};
  row.scale = (p.inv_temp ? EffectiveInvTemp(p.inv_temp[t]) : 1.0f) * 1.44269504088896340736f;
  row.highest = BlockMax(row, shared);
  // Without a normaliser there is no mass to divide.
  if (!isfinite(row.highest)) return;
  const Nucleus nucleus = FindNucleus(row, top_p[t], shared);
  const int32_t token = p.token[t];
  if (threadIdx.x == 0 && token >= 0 && token < p.vocab) {
    float& logprob = p.logprob[p.row_offset[t]];
    logprob = Renormalised(logprob, OrderedKey(OrderedValue(row.Logit(token)), token), nucleus);
  }
  for (int32_t i = threadIdx.x; i < min(p.k[t], p.vocab); i += kTopPThreads) {
    const uint32_t id = p.topk_token[p.topk_offset[t] + i];
    float& logprob = p.topk_logprob[p.topk_offset[t] + i];
    logprob = Renormalised(logprob, OrderedKey(OrderedValue(row.Logit(id)), id), nucleus);
  }
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_TOP_P_CUH_
