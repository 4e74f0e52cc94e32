// What a request's parameters do to a copy of its logits before anything is chosen: bias,
// penalties, masks, in that order. Every operation is rounded as on the CPU, so the results are its
// bits.
//
// As the raw logits pass through here anyway, they are looked at for what a mask would hide.
// Penalties change tokens that were seen and no others, so of what was counted only the bytes that
// say so are read for a whole row: a quarter of what the counts would be.
#ifndef BATON_OPS_PROCESS_CUH_
#define BATON_OPS_PROCESS_CUH_

#include "baton_ops/grid_order.cuh"
#include "baton_ops/row_group.cuh"
#include "baton_ops/row_owner.cuh"

namespace baton_ops::cuda {

constexpr int kProcessThreads = 256;
// What a block looks after: two vectors a thread of what was seen, eight of logits.
constexpr uint32_t kProcessIds = 8192;
constexpr int kMostAssumed = 64;  // drafts of a sequence

struct ProcessParams {
  const float* raw;  // [rows, vocab]
  float* logits;     // [rows, vocab], may be `raw`
  uint8_t* broken;   // [rows]
  uint32_t vocab;
  int32_t batch;
  int32_t max_drafts;
  int32_t slots;
  bool copies_vectors;     // every row of `raw` and `logits` begins at a multiple of 16 bytes
  bool by_vectors;         // every slot of `seen` does
  const int32_t* cu_rows;  // [batch + 1]
  const int32_t* slot;     // [batch], -1: no penalties
  const int32_t* counts;   // [slots, vocab]
  const uint8_t* seen;     // [slots, vocab]
  const int32_t* draft;    // [batch, max_drafts]
  const float* repetition;
  const float* frequency;
  const float* presence;
  const int32_t* bias_starts;  // [batch + 1]
  const int32_t* bias_ids;
  const float* bias;
  int32_t biases;              // how many there is room for
  const int32_t* mask_starts;  // [rows + 1]
  const int32_t* masked;
  int32_t masks;
};

struct Penalty {
  float repetition, frequency, presence;

  __device__ __forceinline__ bool Changes() const {
    return repetition != 1.0f || frequency != 0.0f || presence != 0.0f;
  }
  // Of a token that was seen.
  __device__ __forceinline__ float operator()(float logit, int32_t count) const {
    if (repetition != 1.0f) {
      logit = logit > 0.0f ? __fdiv_rn(logit, repetition) : __fmul_rn(logit, repetition);
    }
    if (frequency != 0.0f) {
      logit = __fsub_rn(logit, __fmul_rn(frequency, static_cast<float>(count)));
    }
    if (presence != 0.0f && count > 0) logit = __fsub_rn(logit, presence);
    return logit;
  }
};

// One row's logits, as far as a block looks after them.
struct ProcessedRow {
  float* logits;
  uint32_t first, last;

  // Whether the block has the token; ids outside the vocabulary are nobody's.
  __device__ __forceinline__ bool Has(int32_t id) const {
    return static_cast<uint32_t>(id) >= first && static_cast<uint32_t>(id) < last;
  }
};

// Copies the block's part of a row. Returns whether this thread met NaN or infinity, which no mask
// can be asked about later; a row of nothing but -infinity stays one, and is found where it is
// drawn from.
__device__ __forceinline__ bool CopyRaw(const ProcessParams& p, const ProcessedRow& row,
                                        int64_t r) {
  constexpr int kVectors = kProcessIds / 4 / kProcessThreads;
  const float* raw = p.raw + r * p.vocab + row.first;
  float* to = row.logits + row.first;
  const uint32_t count = row.last - row.first, vectors = p.copies_vectors ? count / 4 : 0;
  float largest = -INFINITY;
  ForBatches<kProcessThreads, kVectors>(reinterpret_cast<const float4*>(raw), vectors,
                                        [&](const float4(&x)[kVectors], uint32_t first) {
#pragma unroll
                                          for (int i = 0; i < kVectors; ++i) {
                                            const uint32_t at = first + i * kProcessThreads;
                                            largest = MaxOrNan(largest, MaxOrNan(x[i]));
                                            if (at < vectors)
                                              reinterpret_cast<float4*>(to)[at] = x[i];
                                          }
                                        });
  for (uint32_t i = 4 * vectors + threadIdx.x; i < count; i += kProcessThreads) {
    const float x = raw[i];
    largest = MaxOrNan(largest, x);
    to[i] = x;
  }
  return !(largest < INFINITY);
}

__device__ __forceinline__ void AddBias(const ProcessParams& p, const ProcessedRow& row,
                                        int32_t s) {
  const int32_t stop = min(p.bias_starts[s + 1], p.biases);
  for (int32_t i = max(p.bias_starts[s], 0) + static_cast<int32_t>(threadIdx.x); i < stop;
       i += kProcessThreads) {
    const int32_t id = p.bias_ids[i];
    if (row.Has(id)) row.logits[id] = __fadd_rn(row.logits[id], p.bias[i]);
  }
}

__device__ __forceinline__ void Mask(const ProcessParams& p, const ProcessedRow& row, int64_t r) {
  const int32_t stop = min(p.mask_starts[r + 1], p.masks);
  for (int32_t i = max(p.mask_starts[r], 0) + static_cast<int32_t>(threadIdx.x); i < stop;
       i += kProcessThreads) {
    const int32_t id = p.masked[i];
    if (row.Has(id)) row.logits[id] = -INFINITY;
  }
}

// Bit i for each of a word's four bytes that is not zero.
__device__ __forceinline__ uint32_t SeenBits(uint32_t flags) {
  const uint32_t any = __vcmpne4(flags, 0) & 0x08040201u;
  return (any | any >> 8 | any >> 16 | any >> 24) & 0xfu;
}

__device__ __forceinline__ void PenaliseSeen(const ProcessParams& p, const Penalty& penalty,
                                             const ProcessedRow& row, int64_t slot) {
  const uint8_t* seen = p.seen + slot * p.vocab;
  const int32_t* counts = p.counts + slot * p.vocab;
  if (!p.by_vectors) {
    for (uint32_t id = row.first + threadIdx.x; id < row.last; id += kProcessThreads) {
      if (seen[id]) row.logits[id] = penalty(row.logits[id], counts[id]);
    }
    return;
  }
  const auto* vectors = reinterpret_cast<const uint4*>(seen);
  constexpr int kVectors = kProcessIds / 16 / kProcessThreads;
  uint32_t bits = 0;  // of the thread's vectors, 16 each
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const uint32_t at = row.first / 16 + threadIdx.x + i * kProcessThreads;
    if (at >= row.last / 16) break;
    const uint4 x = vectors[at];
    const uint32_t of_vector =
        SeenBits(x.x) | SeenBits(x.y) << 4 | SeenBits(x.z) << 8 | SeenBits(x.w) << 12;
    bits |= of_vector << 16 * i;
  }
  for (; bits != 0; bits &= bits - 1) {
    const uint32_t bit = __ffs(bits) - 1;
    const uint32_t id = row.first + 16 * (threadIdx.x + bit / 16 * kProcessThreads) + bit % 16;
    row.logits[id] = penalty(row.logits[id], counts[id]);
  }
}

// The penalties of a row that assumes the first `assumed` of `draft`: those tokens' logits are kept
// aside, and penalised with what counts them.
__device__ __forceinline__ void Penalise(const ProcessParams& p, const ProcessedRow& row, int32_t s,
                                         int32_t assumed, float (&aside)[kMostAssumed]) {
  const int64_t slot = p.slot[s];
  const Penalty penalty{p.repetition[s], p.frequency[s], p.presence[s]};
  if (slot < 0 || slot >= p.slots || !penalty.Changes()) return;
  const int32_t* draft = p.draft + static_cast<int64_t>(s) * p.max_drafts;
  const auto mine = static_cast<int32_t>(threadIdx.x);
  const int32_t id = mine < assumed ? draft[mine] : -1;
  if (row.Has(id)) aside[mine] = row.logits[id];
  __syncthreads();
  PenaliseSeen(p, penalty, row, slot);
  __syncthreads();
  if (!row.Has(id)) return;
  int32_t count = p.counts[slot * p.vocab + id];
  for (int32_t i = 0; i < assumed; ++i) count += draft[i] == id;
  row.logits[id] = penalty(aside[mine], count);
}

// Block (x, y): ids from x * kProcessIds on of row y.
__global__ void __launch_bounds__(kProcessThreads) ProcessKernel(ProcessParams p, int64_t rows) {
  __shared__ float aside[kMostAssumed];
  WaitForEarlierGrids();
  LetNextGridStart();
  for (int64_t r = blockIdx.y; r < rows; r += gridDim.y) {
    const int32_t s = BlockRequestOf(p.cu_rows, p.batch, r);
    if (s < 0) return;
    const uint32_t first = blockIdx.x * kProcessIds;
    const ProcessedRow row{p.logits + r * p.vocab, first, min(first + kProcessIds, p.vocab)};
    if (CopyRaw(p, row, r)) p.broken[r] |= 1;
    __syncthreads();
    AddBias(p, row, s);
    __syncthreads();
    const auto assumed = static_cast<int32_t>(min(r - p.cu_rows[s], int64_t{p.max_drafts}));
    Penalise(p, row, s, assumed, aside);
    __syncthreads();
    Mask(p, row, r);
    __syncthreads();
  }
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_PROCESS_CUH_
