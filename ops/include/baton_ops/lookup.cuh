// Drafts by lookup: what followed the last time a sequence's ending occurred, a block for each.
#ifndef BATON_OPS_LOOKUP_CUH_
#define BATON_OPS_LOOKUP_CUH_

#include <cstdint>

#include "baton_ops/bookkeeping.cuh"
#include "baton_ops/grid_order.cuh"

namespace baton_ops::cuda {

constexpr unsigned kLookUpThreads = 256;
// Of an n-gram. A match is one word, its size above its place, so that the greatest is the longest
// and of these the latest.
constexpr int32_t kMostLookedUp = 16;
constexpr int32_t kPlaceBits = 27;

struct LookUpParams {
  AcceptedTokens in;
  const int32_t* starts;  // [batch]
  const int32_t* first;   // [batch], the position of the newest token that was fed
  const int32_t* slot;    // [batch]
  int32_t* history;       // [slots, length]
  int32_t slots;
  int32_t length;
  int32_t shortest;
  int32_t longest;
  int32_t* drafts;   // [n_before + n_wanted, stride]
  int32_t n_before;  // made by others, which stand behind the history
  int32_t n_wanted;
  int32_t stride;
};

// The last tokens of a history and the drafts behind it, the last one first; returns how many.
__device__ __forceinline__ int32_t EndingOf(const LookUpParams& p, const int32_t* history,
                                            int32_t n_tokens, int32_t s, int32_t* ending) {
  const int32_t n_ending = min(p.longest, n_tokens + p.n_before);
  for (int32_t i = 0; i < n_ending; ++i) {
    const int32_t draft = p.n_before - 1 - i;
    ending[i] = draft >= 0 ? p.drafts[static_cast<int64_t>(draft) * p.stride + s]
                           : history[n_tokens + draft];
  }
  return n_ending;
}

// How many tokens before `end` are the ending's.
__device__ __forceinline__ int32_t MatchAt(const int32_t* history, int32_t end,
                                           const int32_t* ending, int32_t n_ending) {
  int32_t size = 0;
  while (size < min(n_ending, end) && history[end - 1 - size] == ending[size]) ++size;
  return size;
}

// Writes what stood behind place `at`, and behind the history's end the drafts, itself included.
__device__ __forceinline__ void CopyOn(const LookUpParams& p, const int32_t* history,
                                       int32_t n_tokens, int32_t s, int32_t at) {
  for (int32_t i = 0; i < p.n_wanted; ++i) {
    const int32_t place = at + i;
    int32_t* to = p.drafts + static_cast<int64_t>(p.n_before + i) * p.stride + s;
    *to = place < n_tokens ? history[place]
                           : p.drafts[static_cast<int64_t>(place - n_tokens) * p.stride + s];
  }
}

// One block per sequence. The newest tokens join its history first.
__global__ void __launch_bounds__(kLookUpThreads) LookUpKernel(LookUpParams p) {
  __shared__ int32_t ending[kMostLookedUp];
  __shared__ int32_t n_ending;
  __shared__ uint32_t best;
  WaitForEarlierGrids();
  LetNextGridStart();
  const auto s = static_cast<int32_t>(blockIdx.x), thread = static_cast<int32_t>(threadIdx.x);
  const int32_t slot = p.slot[s], accepted = p.in.n_accepted[s], behind = p.first[s] + 1;
  const int32_t n_tokens = behind + accepted + 1;
  if (p.starts[s] < 0 || slot < 0 || slot >= p.slots || n_tokens > p.length) {
    for (int32_t i = thread; i < p.n_wanted; i += kLookUpThreads) {
      p.drafts[static_cast<int64_t>(p.n_before + i) * p.stride + s] = -1;
    }
    return;
  }
  int32_t* history = p.history + static_cast<int64_t>(slot) * p.length;
  for (int32_t i = thread; i <= accepted; i += kLookUpThreads) {
    history[behind + i] = p.in.token[static_cast<int64_t>(s) * p.in.columns + i];
  }
  __syncthreads();
  if (thread == 0) {
    n_ending = EndingOf(p, history, n_tokens, s, ending);
    best = 0;
  }
  __syncthreads();
  const int32_t last = ending[0];
  uint32_t found = 0;
#pragma unroll 4
  for (int32_t end = thread + 1; end < n_tokens; end += kLookUpThreads) {
    if (history[end - 1] != last) continue;
    const auto size = static_cast<uint32_t>(MatchAt(history, end, ending, n_ending));
    found = max(found, size << kPlaceBits | static_cast<uint32_t>(end));
  }
  if (found >> kPlaceBits >= static_cast<uint32_t>(p.shortest)) atomicMax(&best, found);
  __syncthreads();
  if (thread) return;
  if (best) {
    CopyOn(p, history, n_tokens, s, static_cast<int32_t>(best & ((1u << kPlaceBits) - 1)));
    return;
  }
  for (int32_t i = 0; i < p.n_wanted; ++i) {
    p.drafts[static_cast<int64_t>(p.n_before + i) * p.stride + s] = -1;
  }
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_LOOKUP_CUH_
