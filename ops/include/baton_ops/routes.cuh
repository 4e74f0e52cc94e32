// Which experts tokens take, and where that puts them: each token's choice by the router's
// products, and its pairs (a token and one of its experts) sorted by expert.
//
// A token's choice and weights depend on that token alone. Pairs of an expert stand in the order of
// their tokens; their own sums never depend on where they stand.
#ifndef BATON_OPS_ROUTES_CUH_
#define BATON_OPS_ROUTES_CUH_

#include "baton_ops/grid_order.cuh"
#include "baton_ops/values.cuh"

namespace baton_ops::cuda {

constexpr int kMostExperts = 512, kMostChosen = kWarp, kMostExpertGroups = kWarp;
constexpr int kChooseThreads = 128;

struct ChooseParams {
  float* products;    // [tokens, experts]
  const float* bias;  // [experts] or null
  int32_t* expert;    // [tokens, chosen]
  float* weight;
  int32_t *place, *row, *starts;  // where a block sorts: as of OrderParams
  int64_t tokens;
  int experts, chosen, groups, chosen_groups;
  bool is_sigmoid, normalises;
  double least_sum, scaling;
};

__device__ __forceinline__ double AddLanes(double value) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kEveryLane, value, distance);
  }
  return value;
}

// A score as an unsigned number of the same order, above 0; both zeros are one.
__device__ __forceinline__ uint64_t KeyOf(double score) {
  const auto bits = static_cast<uint64_t>(__double_as_longlong(score + 0.0));
  return bits >> 63 ? ~bits : bits | uint64_t{1} << 63;
}

// The largest of some keys and who has it, of equal ones the lowest number; key 0: nobody.
struct Ranked {
  uint64_t key = 0;
  int id = 0;

  // Ids come in ascending order.
  __device__ __forceinline__ void See(uint64_t other, int other_id) {
    if (other <= key) return;
    key = other;
    id = other_id;
  }
  // The first of all lanes': by three reductions of a warp, where exchanges would be fifteen.
  __device__ __forceinline__ void Meet() {
    const auto high = static_cast<uint32_t>(key >> 32), low = static_cast<uint32_t>(key);
    const uint32_t most_high = __reduce_max_sync(kEveryLane, high);
    const bool is_high = high == most_high;
    const uint32_t most_low = __reduce_max_sync(kEveryLane, is_high ? low : 0u);
    const bool is_first = is_high && low == most_low;
    const auto behind = ~static_cast<uint32_t>(id);  // larger, the lower the number
    id = static_cast<int>(~__reduce_max_sync(kEveryLane, is_first ? behind : 0u));
  }
};

// Replaces each value by f(value, its number), by one copy of what f is: an exponential or a
// quotient in float64 is long, and a step's weights drive a kernel's code out of the caches.
template <int kPer, class Function>
__device__ __forceinline__ void ForEachValue(double (&values)[kPer], Function f) {
#pragma unroll 1
  for (int v = 0; v < kPer; ++v) {
    double value = values[0];
#pragma unroll
    for (int u = 1; u < kPer; ++u) value = u == v ? values[u] : value;
    value = f(value, v);
#pragma unroll
    for (int u = 0; u < kPer; ++u) values[u] = u == v ? value : values[u];
  }
}

// Scores of one token by a warp: lane l has experts l, l + 32, ...
template <int kPer>
struct Scores {
  double score[kPer], wanted[kPer];
  bool is_broken;  // whether any of the token's is NaN: no text may come of what is left

  __device__ __forceinline__ void Read(const ChooseParams& p, const float* products, int lane) {
    double most = -INFINITY, sum = 0.0;
#pragma unroll
    for (int v = 0; v < kPer; ++v) {
      const int i = lane + v * kWarp;
      score[v] = i < p.experts ? static_cast<double>(products[i]) : -INFINITY;
      most = fmax(most, score[v]);
    }
#pragma unroll
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
      most = fmax(most, __shfl_xor_sync(kEveryLane, most, distance));
    }
    ForEachValue(score, [&](double value, int v) {
      const double power = exp(p.is_sigmoid ? -value : value - most);
      const double own = p.is_sigmoid || lane + v * kWarp < p.experts ? power : 0.0;
      sum += own;
      return own;
    });
    sum = AddLanes(sum);
    ForEachValue(score, [&](double power, int) {
      return (p.is_sigmoid ? 1.0 : power) / (p.is_sigmoid ? 1.0 + power : sum);
    });
    bool has_nan = false;
#pragma unroll
    for (int v = 0; v < kPer; ++v) {
      const int i = lane + v * kWarp;
      wanted[v] = i < p.experts ? score[v] : -INFINITY;
      if (i < p.experts && p.bias != nullptr) wanted[v] += static_cast<double>(p.bias[i]);
      if (!isnan(wanted[v])) continue;
      has_nan = true;
      wanted[v] = -INFINITY;
    }
    is_broken = __ballot_sync(kEveryLane, has_nan) != 0;
  }

  // Wants nobody but those of the best groups, by the sum of each one's two best.
  __device__ __forceinline__ void KeepGroups(const ChooseParams& p, int lane) {
    const int size = p.experts / p.groups;
    double mine = -INFINITY;  // of the group with the lane's number
#pragma unroll 1
    for (int g = 0; g < p.groups; ++g) {
      double first = -INFINITY, second = -INFINITY;
#pragma unroll
      for (int v = 0; v < kPer; ++v) {
        const int i = lane + v * kWarp;
        if (i >= p.experts || i / size != g) continue;
        second = fmax(second, fmin(first, wanted[v]));
        first = fmax(first, wanted[v]);
      }
#pragma unroll
      for (int distance = kWarp / 2; distance > 0; distance /= 2) {
        const double other = __shfl_xor_sync(kEveryLane, first, distance);
        const double behind = __shfl_xor_sync(kEveryLane, second, distance);
        second = fmax(fmin(first, other), fmax(second, behind));
        first = fmax(first, other);
      }
      if (lane == g) mine = first + second;
    }
    unsigned kept = 0;
#pragma unroll 1
    for (int n = 0; n < p.chosen_groups; ++n) {
      Ranked best;
      if (lane < p.groups && (kept >> lane & 1) == 0) best.See(KeyOf(mine), lane);
      best.Meet();
      kept |= 1u << best.id;
    }
#pragma unroll
    for (int v = 0; v < kPer; ++v) {
      const int i = lane + v * kWarp;
      if (i < p.experts && (kept >> (i / size) & 1) == 0) wanted[v] = -INFINITY;
    }
  }
};

// Chooses for a token, by a warp: in float64, rounded once. Returns the expert that the token takes
// as the lane's number.
template <int kPer>
__device__ __forceinline__ int ChooseExperts(const ChooseParams& p, int64_t token, int lane) {
  Scores<kPer> scores;
  scores.Read(p, p.products + token * p.experts, lane);
  if (p.chosen_groups < p.groups) scores.KeepGroups(p, lane);
  uint64_t keys[kPer];  // of the lane's experts, 0 once taken
#pragma unroll
  for (int v = 0; v < kPer; ++v) {
    keys[v] = lane + v * kWarp < p.experts ? KeyOf(scores.wanted[v]) : 0;
  }
  int mine = 0;
  double own = 0.0, total = 0.0;
#pragma unroll 1
  for (int n = 0; n < p.chosen; ++n) {
    Ranked best;
#pragma unroll
    for (int v = 0; v < kPer; ++v) best.See(keys[v], lane + v * kWarp);
    best.Meet();
    double score = 0.0;
#pragma unroll
    for (int v = 0; v < kPer; ++v) {
      if (best.id != lane + v * kWarp) continue;
      keys[v] = 0;
      score = scores.score[v];
    }
    score = __shfl_sync(kEveryLane, score, best.id % kWarp);
    total += score;
    if (lane == n) {
      mine = best.id;
      own = score;
    }
  }
  if (lane >= p.chosen) return mine;
  if (p.normalises) own /= total < p.least_sum ? p.least_sum : total;
  p.expert[token * p.chosen + lane] = mine;
  p.weight[token * p.chosen + lane] = scores.is_broken ? NAN : static_cast<float>(own * p.scaling);
  return mine;
}

constexpr int kChooseTokens = kChooseThreads / kWarp;  // of a block
constexpr int kPairBits = 8;
static_assert(kChooseTokens * kMostChosen <= 1 << kPairBits);

// Sorts the pairs of a block that has all tokens: `mine` is the expert of the lane's pair of the
// warp's token. A pair stands behind those of lower experts, and of its own with lower numbers.
__device__ __forceinline__ void OrderFew(const ChooseParams& p, int mine, int lane, int token) {
  __shared__ int taken[kChooseTokens * kMostChosen];  // by pair: its expert, then its number
  const int pairs = static_cast<int>(p.tokens) * p.chosen, own = token * p.chosen + lane;
  const bool is_pair = token < p.tokens && lane < p.chosen;
  const int key = mine << kPairBits | own;
  if (is_pair) taken[own] = key;
  __syncthreads();
  const auto count_below = [&](int bound) {
    int count = 0;
#pragma unroll 1
    for (int i = 0; i < pairs; ++i) count += taken[i] < bound;
    return count;
  };
#pragma unroll 1
  for (int e = threadIdx.x; e <= p.experts; e += kChooseThreads) {
    p.starts[e] = count_below(e << kPairBits);
  }
  if (!is_pair) return;
  const int place = count_below(key);
  p.place[own] = place;
  p.row[place] = token;
}

// A warp has a token. Where one block has all tokens it sorts their pairs as well. Grid: (tokens by
// four).
template <int kPer, bool kSorts>
__global__ void __launch_bounds__(kChooseThreads) ChooseKernel(ChooseParams p) {
  WaitForEarlierGrids();
  LetNextGridStart();
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t token = blockIdx.x * static_cast<int64_t>(kChooseTokens) + warp;
  int mine = 0;
  if (token < p.tokens) mine = ChooseExperts<kPer>(p, token, lane);  // the whole warp
  if constexpr (kSorts) OrderFew(p, mine, lane, warp);
}

constexpr int kOrderThreads = 256, kOrderEach = 4;

struct OrderParams {
  const int32_t* expert;  // [pairs]
  int32_t* place;         // [pairs]: where a pair stands
  int32_t* row;           // [pairs]: whose token stands there
  int32_t* starts;        // [experts + 1]
  int64_t pairs;
  int chosen;
};

struct alignas(16) FourExperts {
  int32_t at[kOrderEach];
};

// The experts of pairs first .. first + 3, -1 behind the last.
template <bool kWide>
__device__ __forceinline__ FourExperts ReadExperts(const OrderParams& p, int64_t first) {
  if (kWide && first + kOrderEach <= p.pairs) {
    return *reinterpret_cast<const FourExperts*>(p.expert + first);
  }
  FourExperts four;
#pragma unroll
  for (int i = 0; i < kOrderEach; ++i) four.at[i] = first + i < p.pairs ? p.expert[first + i] : -1;
  return four;
}

// A block has an expert: it counts those before it, and places its own pairs in their order, of
// which a thread has four in a row at a time. Grid: (experts).
template <bool kWide>
__global__ void __launch_bounds__(kOrderThreads) OrderKernel(OrderParams p) {
  constexpr int kWarps = kOrderThreads / kWarp, kAtOnce = kOrderThreads * kOrderEach;
  __shared__ int of_others[kWarps];
  __shared__ int of_warp[2 * kWarps];
  WaitForEarlierGrids();
  LetNextGridStart();
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int expert = static_cast<int>(blockIdx.x);
  int before = 0, mine = 0;
#pragma unroll 4
  for (int64_t first = threadIdx.x * kOrderEach; first < p.pairs; first += kAtOnce) {
    const FourExperts four = ReadExperts<kWide>(p, first);
#pragma unroll
    for (int i = 0; i < kOrderEach; ++i) {
      before += four.at[i] >= 0 && four.at[i] < expert;
      mine += four.at[i] == expert;
    }
  }
  before = __reduce_add_sync(kEveryLane, before);
  mine = __reduce_add_sync(kEveryLane, mine);
  if (lane == 0) {
    of_others[warp] = before;
    of_warp[kWarps + warp] = mine;
  }
  __syncthreads();
  int start = 0, all = 0;
  for (int w = 0; w < kWarps; ++w) {
    start += of_others[w];
    all += of_warp[kWarps + w];
  }
  const int end = start + all;
  if (threadIdx.x == 0) {
    p.starts[expert] = start;
    if (blockIdx.x + 1 == gridDim.x) p.starts[expert + 1] = end;
  }
  int* counts = of_warp;  // of two places, of which one is read while the other is written
  for (int64_t from = 0; start < end; from += kAtOnce) {
    const int64_t first = from + threadIdx.x * kOrderEach;
    const FourExperts four = ReadExperts<kWide>(p, first);
    int of_lanes = 0, before_lane = 0;
#pragma unroll
    for (int i = 0; i < kOrderEach; ++i) {
      const unsigned own = __ballot_sync(kEveryLane, four.at[i] == expert);
      of_lanes += __popc(own);
      before_lane += __popc(own & ((1u << lane) - 1));
    }
    if (lane == 0) counts[warp] = of_lanes;
    __syncthreads();
    int at = start + before_lane;
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) at += counts[w];
      start += counts[w];
    }
    counts = counts == of_warp ? of_warp + kWarps : of_warp;
#pragma unroll
    for (int i = 0; i < kOrderEach; ++i) {
      if (four.at[i] != expert) continue;
      p.place[first + i] = at;
      p.row[at++] = static_cast<int32_t>((first + i) / p.chosen);
    }
  }
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_ROUTES_CUH_
