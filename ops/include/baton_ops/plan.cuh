// From what verification emitted to what the logprob op reads, without the host: one block turns
// accept counts and per-request settings into rows, tokens, k, temperatures and output places.
#ifndef BATON_OPS_PLAN_CUH_
#define BATON_OPS_PLAN_CUH_

#include <cstdint>

#include "baton_ops/logprob_rules.h"

namespace baton_ops::cuda {

struct PlanInput {
  int32_t batch;
  int32_t max_drafts;
  int32_t capacity;           // rows that the outputs hold
  const int32_t* n_accepted;  // [batch]
  const int32_t* token;       // [batch, max_drafts + 1]
  const int32_t* cu_rows;     // [batch + 1]
  const int32_t* k;           // [batch]
  const float* temperature;   // [batch] or null for 1
  const int32_t* first_row;   // [batch] or null for 0
  const float* top_p;         // [batch] or null for 1
};

struct PlanOutput {
  int32_t* row_index;    // [capacity]
  int32_t* token;        // [capacity]
  int32_t* k;            // [capacity]
  float* inv_temp;       // [capacity]
  int32_t* row_offset;   // [capacity + 1]
  int32_t* topk_offset;  // [capacity + 1]
  int32_t* num_rows;     // [1]
  float* top_p;          // [capacity] or null
};

// Rows, rows with a logprob, top-k entries.
struct PlanSums {
  int32_t rows, outputs, entries;
  __device__ __forceinline__ PlanSums operator+(const PlanSums& other) const {
    return {rows + other.rows, outputs + other.outputs, entries + other.entries};
  }
};

constexpr int kPlanThreads = 1024;

__device__ __forceinline__ PlanSums ShuffleUp(const PlanSums& sums, int offset) {
  return {__shfl_up_sync(0xffffffffu, sums.rows, offset),
          __shfl_up_sync(0xffffffffu, sums.outputs, offset),
          __shfl_up_sync(0xffffffffu, sums.entries, offset)};
}

// The sums over the block's threads up to and including this one.
__device__ __forceinline__ PlanSums BlockScan(PlanSums sums, PlanSums (&warp_sums)[32]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int offset = 1; offset < 32; offset *= 2) {
    const PlanSums before = ShuffleUp(sums, offset);
    if (lane >= offset) sums = sums + before;
  }
  __syncthreads();
  if (lane == 31) warp_sums[warp] = sums;
  __syncthreads();
  for (int w = 0; w < warp; ++w) sums = sums + warp_sums[w];
  return sums;
}

__device__ __forceinline__ float InverseOf(float temperature) {
  return temperature >= 1e-5f ? 1.0f / temperature : 1.0f;
}

__device__ __forceinline__ void WriteRows(const PlanInput& in, const PlanOutput& out, int32_t b,
                                          int32_t emitted, PlanSums at) {
  const int32_t k = in.k[b];
  const int32_t first_row = in.cu_rows[b] + (in.first_row ? in.first_row[b] : 0);
  const float inv_temp = in.temperature ? InverseOf(in.temperature[b]) : 1.0f;
  for (int32_t i = 0; i < emitted && at.rows < in.capacity; ++i) {
    out.row_index[at.rows] = first_row + i;
    out.token[at.rows] = in.token[static_cast<int64_t>(b) * (in.max_drafts + 1) + i];
    out.k[at.rows] = k;
    out.inv_temp[at.rows] = inv_temp;
    if (out.top_p) out.top_p[at.rows] = in.top_p ? in.top_p[b] : 1.0f;
    out.row_offset[at.rows] = at.outputs;
    out.topk_offset[at.rows] = at.entries;
    at = at + PlanSums{1, k >= 0, max(k, 0)};
  }
}

__global__ void __launch_bounds__(kPlanThreads) PlanKernel(PlanInput in, PlanOutput out) {
  __shared__ PlanSums warp_sums[32];
  PlanSums total{0, 0, 0};
  for (int32_t first = 0; first < in.batch; first += kPlanThreads) {
    const int32_t b = first + static_cast<int32_t>(threadIdx.x);
    const int32_t emitted = b < in.batch ? in.n_accepted[b] + 1 : 0;
    const int32_t k = b < in.batch ? in.k[b] : -1;
    const PlanSums mine{emitted, k >= 0 ? emitted : 0, max(k, 0) * emitted};
    const PlanSums through = BlockScan(mine, warp_sums);
    const PlanSums before{through.rows - mine.rows, through.outputs - mine.outputs,
                          through.entries - mine.entries};
    if (b < in.batch) WriteRows(in, out, b, emitted, total + before);
    for (int w = 0; w < 32; ++w) total = total + warp_sums[w];
  }
  if (threadIdx.x != 0) return;
  *out.num_rows = min(total.rows, in.capacity);
  if (total.rows > in.capacity) return;
  out.row_offset[total.rows] = total.outputs;
  out.topk_offset[total.rows] = total.entries;
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_PLAN_CUH_
