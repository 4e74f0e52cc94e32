// Speculative acceptance on the device, by the rules of cpu/verify.h: every target row decides its
// own token at once, then each request keeps the leading accepted drafts.
#ifndef BATON_OPS_VERIFY_CUH_
#define BATON_OPS_VERIFY_CUH_

#include <cstdint>

#include "baton_ops/grid_order.cuh"
#include "baton_ops/row_group.cuh"
#include "baton_ops/row_owner.cuh"

namespace baton_ops::cuda {

// As many as let four blocks share a multiprocessor: 64 rows of eight blocks each are there at
// once.
constexpr int kVerifyThreads = 256;
constexpr int kVerifyBlocks = 4;
constexpr int kVerifyWarps = kVerifyThreads / 32;
constexpr int32_t kNoToken = -1;

// How a refused row's token is kept until its request is decided: as a negative number.
__device__ __forceinline__ int32_t Refused(int32_t token) {
  return token < 0 ? static_cast<int32_t>(0x80000000u) : ~token;
}

__device__ __forceinline__ int32_t TokenOfRefused(int32_t refused) {
  return refused == static_cast<int32_t>(0x80000000u) ? kNoToken : ~refused;
}

struct VerifyDrafts {
  int32_t batch;
  int32_t max_drafts;
  const int32_t* draft;        // [batch, max_drafts]
  const int32_t* draft_count;  // [batch]
  const int32_t* cu_rows;      // [batch + 1]
};

struct VerifyProbs {
  const float* probs;  // row r starts at probs + r * row_stride
  int64_t row_stride;
  int32_t vocab;
  int32_t rows;
  const double* uniform;           // [rows]
  const float* draft_probs;        // [batch, max_drafts, vocab] or null
  const double* residual_uniform;  // [rows] or null
};

// kUnroll: weights that a lane loads at once.
struct TargetWeight {
  static constexpr int kUnroll = 8;
  const float* p;
  __device__ __forceinline__ double operator()(int32_t id) const { return p[id]; }
};

struct ResidualWeight {
  static constexpr int kUnroll = 4;
  const float *p, *q;
  double p_total, q_total;
  __device__ __forceinline__ double operator()(int32_t id) const {
    const double mass = p[id] / p_total - q[id] / q_total;
    return mass > 0 ? mass : 0.0;
  }
};

template <int kBlocks>
struct VerifyShared {
  static constexpr int kSums = kBlocks * kVerifyWarps;
  double warp_sum[kVerifyWarps];  // of this block
  double sum[kSums];              // of all the row's warps, in the order of their ids
  double before[kSums];           // what is ahead of each
  double total;
  uint32_t token;
};

__device__ __forceinline__ double WarpSum(double value) {
  for (int offset = 16; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, offset);
  }
  return value;
}

// Each warp of the row's blocks owns an interval of ids, so that cumulative sums cross from warp to
// warp in id order.
struct WarpIds {
  int32_t first, last;
};

template <int kBlocks>
__device__ __forceinline__ WarpIds IdsOfWarp(int32_t vocab) {
  constexpr int32_t kWarps = kBlocks * kVerifyWarps;
  const int32_t interval = ((vocab + kWarps - 1) / kWarps + 31) / 32 * 32;
  const int32_t warp = RowGroup<kBlocks>::Rank() * kVerifyWarps + threadIdx.x / 32;
  const int32_t first = min(warp * interval, vocab);
  return {first, min(first + interval, vocab)};
}

// One warp: adds up the sums of all warps, in an order that they alone decide.
template <int kBlocks>
__device__ __forceinline__ void ScanSums(VerifyShared<kBlocks>& shared) {
  constexpr int kPerLane = (VerifyShared<kBlocks>::kSums + 31) / 32;
  const int lane = threadIdx.x % 32;
  double through = 0;
  for (int i = 0; i < kPerLane; ++i) {
    const int at = lane * kPerLane + i;
    if (at < VerifyShared<kBlocks>::kSums) through += shared.sum[at];
  }
  for (int offset = 1; offset < 32; offset *= 2) {
    const double other = __shfl_up_sync(0xffffffffu, through, offset);
    if (lane >= offset) through += other;
  }
  double before = __shfl_up_sync(0xffffffffu, through, 1);
  if (lane == 0) before = 0;
  if (lane == 31) shared.total = through;
  for (int i = 0; i < kPerLane; ++i) {
    const int at = lane * kPerLane + i;
    if (at >= VerifyShared<kBlocks>::kSums) break;
    shared.before[at] = before;
    before += shared.sum[at];
  }
}

// The row's total, NaN if a weight is negative or NaN. Leaves the warps' sums in shared memory.
template <int kBlocks, class Weight>
__device__ __forceinline__ double RowTotal(const Weight& weight, int32_t vocab,
                                           VerifyShared<kBlocks>& shared) {
  using Group = RowGroup<kBlocks>;
  constexpr int kUnroll = Weight::kUnroll;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const WarpIds ids = IdsOfWarp<kBlocks>(vocab);
  double sum = 0;
  bool is_mass = true;
  for (int32_t first = ids.first + lane; first < ids.last; first += 32 * kUnroll) {
    double masses[kUnroll];  // all on their way at once, those of the last steps too
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      masses[i] = first + 32 * i < ids.last ? weight(first + 32 * i) : 0.0;
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      is_mass &= masses[i] >= 0;
      sum += masses[i];
    }
  }
  sum = WarpSum(is_mass ? sum : NAN);
  Group::Sync();  // nobody reads the sums before any more
  if (lane == 0) shared.warp_sum[warp] = sum;
  Group::Sync();
  for (uint32_t i = threadIdx.x; i < VerifyShared<kBlocks>::kSums; i += kVerifyThreads) {
    const auto* mine = reinterpret_cast<const uint64_t*>(&shared.warp_sum[i % kVerifyWarps]);
    shared.sum[i] = __longlong_as_double(Group::Read(mine, i / kVerifyWarps));
  }
  __syncthreads();
  if (warp == 0) ScanSums(shared);
  __syncthreads();
  return shared.total;
}

// One warp: the smallest id of its interval whose cumulative sum exceeds `target`. Rounding may
// keep the sum from crossing; then the interval's last positive id. A lane has a run of ids and
// goes through it twice, so that no load waits for a sum of other lanes.
template <class Weight>
__device__ __forceinline__ int32_t SampleInterval(const Weight& weight, const WarpIds& ids,
                                                  double before, double target) {
  const int lane = threadIdx.x % 32;
  const int32_t run = (ids.last - ids.first + 31) / 32;
  const int32_t first = min(ids.first + lane * run, ids.last), last = min(first + run, ids.last);
  double through = 0;
#pragma unroll Weight::kUnroll
  for (int32_t id = first; id < last; ++id) through += weight(id);
  for (int offset = 1; offset < 32; offset *= 2) {
    const double other = __shfl_up_sync(0xffffffffu, through, offset);
    if (lane >= offset) through += other;
  }
  double ahead = __shfl_up_sync(0xffffffffu, through, 1);
  ahead = before + (lane == 0 ? 0.0 : ahead);
  int32_t crossed = -1, positive = -1;
#pragma unroll Weight::kUnroll
  for (int32_t id = first; id < last; ++id) {
    const double mass = weight(id);
    ahead += mass;
    if (mass > 0) positive = id;
    if (mass > 0 && ahead > target && crossed < 0) crossed = id;
  }
  const unsigned crossing = __ballot_sync(0xffffffffu, crossed >= 0);
  if (crossing) return __shfl_sync(0xffffffffu, crossed, __ffs(crossing) - 1);
  const unsigned any = __ballot_sync(0xffffffffu, positive >= 0);
  return any ? __shfl_sync(0xffffffffu, positive, 31 - __clz(any)) : ids.first;
}

// Inverse CDF over the row, given RowTotal's sums. Requires total > 0.
template <int kBlocks, class Weight>
__device__ __forceinline__ int32_t RowSample(const Weight& weight, int32_t vocab, double total,
                                             double uniform, VerifyShared<kBlocks>& shared) {
  using Group = RowGroup<kBlocks>;
  const double target = fmin(uniform * total, nextafter(total, 0.0));
  uint32_t chosen = 0;
  for (uint32_t w = threadIdx.x % 32; w < VerifyShared<kBlocks>::kSums; w += 32) {
    if (shared.before[w] <= target && shared.sum[w] > 0) chosen = w;
  }
  chosen = __reduce_max_sync(0xffffffffu, chosen);
  if (Group::Rank() * kVerifyWarps + threadIdx.x / 32 == chosen) {
    const int32_t token =
        SampleInterval(weight, IdsOfWarp<kBlocks>(vocab), shared.before[chosen], target);
    if (threadIdx.x % 32 == 0) shared.token = static_cast<uint32_t>(token);
  }
  Group::Sync();
  return static_cast<int32_t>(Group::Read(&shared.token, chosen / kVerifyWarps));
}

__device__ __forceinline__ bool IsTotal(double total) { return total > 0 && total < INFINITY; }

// What a target row decides: a token, and whether it is the accepted draft. kNoToken where a row is
// not a distribution.
struct RowDecision {
  int32_t token;
  bool accepted;
};

template <int kBlocks>
__device__ __forceinline__ RowDecision DecidePointMass(const VerifyProbs& in, int32_t row,
                                                       int32_t draft,
                                                       VerifyShared<kBlocks>& shared) {
  const TargetWeight p{in.probs + row * in.row_stride};
  const double total = RowTotal(p, in.vocab, shared);
  if (!IsTotal(total)) return {kNoToken, false};
  const int32_t token = RowSample(p, in.vocab, total, in.uniform[row], shared);
  return {token, token == draft};
}

template <int kBlocks>
__device__ __forceinline__ RowDecision DecideProposal(const VerifyProbs& in, int32_t row,
                                                      int64_t proposal, int32_t draft,
                                                      VerifyShared<kBlocks>& shared) {
  const TargetWeight p{in.probs + row * in.row_stride};
  const TargetWeight q{in.draft_probs + proposal * in.vocab};
  const double p_total = RowTotal(p, in.vocab, shared);
  const double q_total = RowTotal(q, in.vocab, shared);
  if (!IsTotal(p_total) || !IsTotal(q_total)) return {kNoToken, false};
  if (draft < 0 || draft >= in.vocab) return {kNoToken, false};
  if (in.uniform[row] * q(draft) * p_total < p(draft) * q_total) return {draft, true};
  const double uniform = in.residual_uniform[row];
  const ResidualWeight residual{p.p, q.p, p_total, q_total};
  const double total = RowTotal(residual, in.vocab, shared);
  if (total > 0) return {RowSample(residual, in.vocab, total, uniform, shared), false};
  // Without a residual p equals q up to rounding, and p itself is the right distribution.
  RowTotal(p, in.vocab, shared);
  return {RowSample(p, in.vocab, p_total, uniform, shared), false};
}

struct DecideParams {
  VerifyDrafts drafts;
  VerifyProbs in;
  int32_t* token;
};

template <int kBlocks>
__device__ __forceinline__ void DecideRow(const DecideParams& p, int32_t row, int32_t b,
                                          VerifyShared<kBlocks>& shared) {
  const int32_t i = row - p.drafts.cu_rows[b], count = p.drafts.draft_count[b];
  if (i > count) return;  // padding
  const bool bonus = i == count;
  const int64_t at = static_cast<int64_t>(b) * p.drafts.max_drafts + i;
  const int32_t draft = bonus ? kNoToken : p.drafts.draft[at];
  const RowDecision decision = bonus || p.in.draft_probs == nullptr
                                   ? DecidePointMass(p.in, row, draft, shared)
                                   : DecideProposal(p.in, row, at, draft, shared);
  if (threadIdx.x != 0 || RowGroup<kBlocks>::Rank() != 0 || i > p.drafts.max_drafts) return;
  p.token[static_cast<int64_t>(b) * (p.drafts.max_drafts + 1) + i] =
      decision.accepted ? decision.token : Refused(decision.token);
}

// kBlocks blocks per target row: write the row's token where the request's row would emit it; a
// refused draft's token is marked as refused.
template <int kBlocks>
__global__ void __launch_bounds__(kVerifyThreads, kVerifyBlocks) DecideKernel(DecideParams p) {
  __shared__ VerifyShared<kBlocks> shared;
  WaitForEarlierGrids();
  LetNextGridStart();
  const auto row = static_cast<int32_t>(RowGroup<kBlocks>::Row());
  const int32_t b = BlockRequestOf(p.drafts.cu_rows, p.drafts.batch, row);
  if (b < 0) return;
  DecideRow<kBlocks>(p, row, b, shared);
  RowGroup<kBlocks>::Sync();  // the others may still read this block's memory
}

// One thread per request: keeps the leading accepted drafts and the first refusal's token.
__global__ void AcceptKernel(VerifyDrafts drafts, int32_t* n_accepted, int32_t* token) {
  WaitForEarlierGrids();
  LetNextGridStart();
  const int32_t b = blockIdx.x * blockDim.x + threadIdx.x;
  if (b >= drafts.batch) return;
  int32_t* row = token + static_cast<int64_t>(b) * (drafts.max_drafts + 1);
  int32_t accepted = 0;
  while (accepted < drafts.draft_count[b] && row[accepted] >= 0) ++accepted;
  row[accepted] = TokenOfRefused(row[accepted]);
  for (int32_t i = accepted + 1; i <= drafts.max_drafts; ++i) row[i] = kNoToken;
  n_accepted[b] = accepted;
}

__global__ void VerifyGreedyKernel(const int32_t* target_token, VerifyDrafts drafts,
                                   int32_t* n_accepted, int32_t* token) {
  WaitForEarlierGrids();
  LetNextGridStart();
  const int32_t b = blockIdx.x * blockDim.x + threadIdx.x;
  if (b >= drafts.batch) return;
  const int32_t* draft = drafts.draft + static_cast<int64_t>(b) * drafts.max_drafts;
  const int32_t* target = target_token + drafts.cu_rows[b];
  int32_t* row = token + static_cast<int64_t>(b) * (drafts.max_drafts + 1);
  int32_t accepted = 0;
  while (accepted < drafts.draft_count[b] && draft[accepted] == target[accepted]) ++accepted;
  for (int32_t i = 0; i <= drafts.max_drafts; ++i) row[i] = i <= accepted ? target[i] : kNoToken;
  n_accepted[b] = accepted;
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_VERIFY_CUH_
