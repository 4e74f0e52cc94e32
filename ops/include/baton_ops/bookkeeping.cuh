// What a step leaves for the next one, and the uniforms of its rows: a thread or a block for each.
#ifndef BATON_OPS_BOOKKEEPING_CUH_
#define BATON_OPS_BOOKKEEPING_CUH_

#include <cstdint>

#include "baton_ops/grid_order.cuh"
#include "baton_ops/row_owner.cuh"

namespace baton_ops::cuda {

constexpr unsigned kBookkeepingThreads = 128;

// The finaliser of SplitMix64 (Steele, Lea, Flood 2014).
__device__ __forceinline__ uint64_t Finalised(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// The uniform in [0, 1) of an output position, as on the CPU.
__device__ __forceinline__ double UniformAt(uint64_t seed, uint64_t position) {
  const uint64_t state = Finalised(seed) + (position + 1) * 0x9E3779B97F4A7C15u;
  return static_cast<double>(Finalised(state) >> 11) * 0x1p-53;
}

struct UniformsParams {
  int32_t batch;
  int32_t rows;
  const int64_t* seeds;      // [batch]
  const int64_t* positions;  // [batch]
  const int32_t* cu_rows;    // [batch + 1]
  double* out;               // [rows]
};

// One thread per row.
__global__ void __launch_bounds__(kBookkeepingThreads) UniformsKernel(UniformsParams p) {
  WaitForEarlierGrids();
  LetNextGridStart();
  const int32_t row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= p.rows || row >= p.cu_rows[p.batch]) return;
  const int32_t s = RequestOf(p.cu_rows, p.batch, row);
  const int64_t position = p.positions[s] + (row - p.cu_rows[s]);
  p.out[row] = UniformAt(static_cast<uint64_t>(p.seeds[s]), static_cast<uint64_t>(position));
}

// What verification wrote.
struct AcceptedTokens {
  int32_t batch;
  int32_t columns;            // max_drafts + 1
  const int32_t* n_accepted;  // [batch]
  const int32_t* token;       // [batch, columns]
};

struct TokenCounts {
  const int32_t* slot;  // [batch]
  int32_t slots;
  int32_t vocab;
  int32_t* counts;  // [slots, vocab]
  uint8_t* seen;    // [slots, vocab]
};

// One thread per token.
__global__ void __launch_bounds__(kBookkeepingThreads)
    CountTokensKernel(AcceptedTokens in, TokenCounts out) {
  WaitForEarlierGrids();
  LetNextGridStart();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const auto s = static_cast<int32_t>(i / in.columns);
  if (s >= in.batch || i % in.columns > in.n_accepted[s]) return;
  const int32_t slot = out.slot[s], token = in.token[i];
  if (slot < 0 || slot >= out.slots || token < 0 || token >= out.vocab) return;
  const int64_t at = static_cast<int64_t>(slot) * out.vocab + token;
  atomicAdd(out.counts + at, 1);
  out.seen[at] = 1;
}

// One thread per token and per draft that may have been rejected.
__global__ void __launch_bounds__(kBookkeepingThreads)
    ScatterTokensKernel(AcceptedTokens in, const int32_t* count, const int32_t* starts,
                        int32_t* tokens, int64_t n_tokens) {
  WaitForEarlierGrids();
  LetNextGridStart();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const auto s = static_cast<int32_t>(i / in.columns);
  if (s >= in.batch || starts[s] < 0) return;
  const auto j = static_cast<int32_t>(i % in.columns);
  if (j > max(count[s], in.n_accepted[s])) return;
  const int64_t at = static_cast<int64_t>(starts[s]) + j;
  if (at < n_tokens) tokens[at] = j <= in.n_accepted[s] ? in.token[i] : 0;
}

struct DraftSeeds {
  const int32_t* starts;
  const int32_t* first;
  int32_t* rows;
  int32_t* positions;
  int32_t* contexts;  // or null
  int32_t ahead;
};

// One thread per sequence.
__global__ void __launch_bounds__(kBookkeepingThreads)
    SeedDraftsKernel(const int32_t* n_accepted, int32_t batch, DraftSeeds seeds) {
  WaitForEarlierGrids();
  LetNextGridStart();
  const int32_t s = blockIdx.x * blockDim.x + threadIdx.x;
  if (s >= batch) return;
  const bool is_there = seeds.starts[s] >= 0;
  seeds.rows[s] = is_there ? seeds.starts[s] + n_accepted[s] : -1;
  const int32_t position = is_there ? seeds.first[s] + n_accepted[s] + seeds.ahead : -1;
  seeds.positions[s] = position;
  if (seeds.contexts) seeds.contexts[s] = position + 1;
}

struct NextFed {
  int32_t* tokens;    // [batch * (1 + drafts)]
  int32_t* position;  // as tokens
  int32_t* contexts;  // [batch], and those below
  int32_t* first;
  int32_t* count;
  int64_t* draws;
  int32_t* draft;  // [batch, columns]
  int32_t columns;
};

struct AdvanceParams {
  AcceptedTokens in;
  const int32_t* starts;  // [batch]
  const int32_t* drafts;  // [n_drafts, stride], -1 from where a sequence has none
  int32_t n_drafts;
  int32_t stride;
  const int32_t* first;  // [batch], may be out.first
  const int64_t* draws;  // [batch], may be out.draws
  NextFed out;
};

// How many drafts a sequence has: those before the first -1.
__device__ __forceinline__ int32_t DraftsOf(const AdvanceParams& p, int32_t s) {
  int32_t count = 0;
  while (count < p.n_drafts && p.drafts[static_cast<int64_t>(count) * p.stride + s] >= 0) ++count;
  return count;
}

// One thread per sequence: it reads its own places before it writes them.
__global__ void __launch_bounds__(kBookkeepingThreads) AdvanceKernel(AdvanceParams p) {
  WaitForEarlierGrids();
  LetNextGridStart();
  const int32_t s = blockIdx.x * blockDim.x + threadIdx.x;
  if (s >= p.in.batch) return;
  const bool is_there = p.starts[s] >= 0;
  const int32_t accepted = p.in.n_accepted[s], q_len = p.n_drafts + 1;
  const int32_t count = is_there ? DraftsOf(p, s) : 0;
  const int32_t first = is_there ? p.first[s] + accepted + 1 : 0;
  p.out.first[s] = first;
  p.out.draws[s] = is_there ? p.draws[s] + accepted + 1 : 0;
  p.out.count[s] = count;
  p.out.contexts[s] = is_there ? first + q_len : 0;
  const int64_t at = static_cast<int64_t>(s) * q_len;
  const int64_t newest = static_cast<int64_t>(s) * p.in.columns + accepted;
  p.out.tokens[at] = is_there ? p.in.token[newest] : 0;
  p.out.position[at] = first;
  for (int32_t k = 0; k < p.out.columns; ++k) {
    const bool has_draft = k < count;
    const int32_t draft = has_draft ? p.drafts[static_cast<int64_t>(k) * p.stride + s] : -1;
    p.out.draft[static_cast<int64_t>(s) * p.out.columns + k] = draft;
    if (k >= p.n_drafts) continue;
    p.out.tokens[at + 1 + k] = has_draft ? draft : 0;
    p.out.position[at + 1 + k] = is_there ? first + 1 + k : 0;
  }
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_BOOKKEEPING_CUH_
