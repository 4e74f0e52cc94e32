#include <cuda_runtime.h>

#include <algorithm>

#include "baton_ops/pack.cuh"
#include "baton_ops/plan.cuh"
#include "baton_ops/verify.cuh"
#include "early_launch.h"
#include "launch.h"
#include "row_launch.h"

namespace baton_ops::cuda {
namespace {

constexpr unsigned kRequestThreads = 128;

Error LastError() {
  const cudaError_t status = cudaGetLastError();
  return status == cudaSuccess ? nullptr : cudaGetErrorString(status);
}

unsigned BlocksFor(int64_t items, int64_t per_block) {
  return static_cast<unsigned>((items + per_block - 1) / per_block);
}

VerifyDrafts DraftsOf(const DraftInput& in) {
  return {static_cast<int32_t>(in.batch), static_cast<int32_t>(in.max_drafts), in.draft,
          in.draft_count, in.cu_rows};
}

}  // namespace

Error VerifyGreedy(const int32_t* target_token, const DraftInput& drafts,
                   const VerifyOutput& output, Stream stream) {
  if (drafts.batch == 0) return nullptr;
  const Grid grid{dim3(BlocksFor(drafts.batch, kRequestThreads)), kRequestThreads};
  return LaunchEarly(VerifyGreedyKernel, grid, stream, target_token, DraftsOf(drafts),
                     output.n_accepted, output.token);
}

Error VerifySampled(const ProbsInput& probs, const DraftInput& drafts, const VerifyOutput& output,
                    Stream stream) {
  if (drafts.batch == 0 || probs.rows == 0) return nullptr;
  const VerifyDrafts requests = DraftsOf(drafts);
  const VerifyProbs rows{probs.probs,
                         probs.row_stride,
                         static_cast<int32_t>(probs.vocab),
                         static_cast<int32_t>(probs.rows),
                         probs.uniform,
                         probs.draft_probs,
                         probs.residual_uniform};
  const unsigned blocks = BlocksOfRow(probs.vocab);
  const auto kernel = blocks > 1 ? DecideKernel<kRowBlocks> : DecideKernel<1>;
  const ClusterGrid grid{probs.rows, blocks, kVerifyThreads};
  if (const Error error =
          LaunchRows(kernel, grid, DecideParams{requests, rows, output.token}, stream)) {
    return error;
  }
  const Grid deciders{dim3(BlocksFor(drafts.batch, kRequestThreads)), kRequestThreads};
  return LaunchEarly(AcceptKernel, deciders, stream, requests, output.n_accepted, output.token);
}

Error Plan(const StepInput& input, const StepOutput& output, Stream stream) {
  const PlanInput in{static_cast<int32_t>(input.batch),
                     static_cast<int32_t>(input.max_drafts),
                     static_cast<int32_t>(input.capacity),
                     input.n_accepted,
                     input.token,
                     input.cu_rows,
                     input.k,
                     input.temperature,
                     input.first_row,
                     input.top_p};
  const PlanOutput out{output.row_index,  output.token,       output.k,        output.inv_temp,
                       output.row_offset, output.topk_offset, output.num_rows, output.top_p};
  PlanKernel<<<1, kPlanThreads, 0, static_cast<cudaStream_t>(stream)>>>(in, out);
  return LastError();
}

Error Pack(const ColumnsInput& input, void* packed, int64_t capacity_words, Stream stream) {
  if (capacity_words < kPackHeaderWords) return "packed is smaller than its header";
  const PackInput in{static_cast<int32_t>(input.batch),
                     static_cast<int32_t>(input.rows),
                     input.num_rows,
                     input.row_offset,
                     input.topk_offset,
                     input.n_accepted,
                     input.token,
                     reinterpret_cast<const uint32_t*>(input.columns.logprob),
                     input.columns.rank,
                     input.columns.topk_token,
                     reinterpret_cast<const uint32_t*>(input.columns.topk_logprob)};
  constexpr int64_t kWordsPerThread = 4;
  constexpr unsigned kMostBlocks = 64;
  const unsigned blocks =
      std::min(kMostBlocks, BlocksFor(capacity_words, kPackThreads * kWordsPerThread));
  PackKernel<<<blocks, kPackThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      in, static_cast<uint32_t*>(packed), capacity_words);
  return LastError();
}

}  // namespace baton_ops::cuda
