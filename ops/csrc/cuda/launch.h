// The CUDA ops as plain functions: raw device pointers, sizes, the caller's stream. Nothing is
// allocated, nothing is read back, so every call can be captured in a CUDA graph.
#ifndef BATON_OPS_CSRC_CUDA_LAUNCH_H_
#define BATON_OPS_CSRC_CUDA_LAUNCH_H_

#include <cstddef>
#include <cstdint>

#include "baton_ops/logprob_rules.h"

namespace baton_ops::cuda {

// A cudaStream_t, so that callers need no CUDA header.
using Stream = void*;

// Null, or a static message that says what failed.
using Error = const char*;

enum class LogitType { kFloat32, kBFloat16, kFloat16 };

struct LogprobInput {
  const void* logits;  // row r starts at logits + r * row_stride elements
  LogitType type;
  int64_t row_stride;
  int64_t vocab;
  int64_t rows;                // T, which with vocab alone decides the shape of the launch
  const int32_t* token;        // [T]
  const int32_t* k;            // [T]
  const int32_t* row_index;    // [T] or null for the identity
  const float* inv_temp;       // [T] or null for 1
  const int32_t* num_rows;     // [1] or null for T
  const int32_t* row_offset;   // [T + 1], exclusive sums of k >= 0
  const int32_t* topk_offset;  // [T + 1], exclusive sums of max(k, 0)
  RankMode rank_mode;
};

struct LogprobOutput {
  float* logprob;
  int32_t* rank;
  int32_t* topk_token;
  float* topk_logprob;
};

// Scratch memory, 256-byte aligned, zeroed before its first call. A call leaves it fit for the
// next, of any shape. Calls that share a workspace must not run at the same time. Offsets that
// contradict k, or a call that was cut short, call for zeroing it anew.
struct Workspace {
  void* data;
  size_t bytes;
};

// Bytes that suffice for up to `rows` rows of up to `vocab` logits.
size_t LogprobWorkspaceBytes(LogitType type, int64_t rows, int64_t vocab);

Error Logprobs(const LogprobInput& input, const LogprobOutput& output, const Workspace& workspace,
               Stream stream);

// After Logprobs, with the same input and output: renormalises the rows whose top_p is in (0, 1) to
// their nucleus. Reads those rows up to six times.
Error NormaliseTopP(const LogprobInput& input, const LogprobOutput& output, const float* top_p,
                    Stream stream);

struct DraftInput {
  int64_t batch;
  int64_t max_drafts;
  const int32_t* draft;        // [batch, max_drafts]
  const int32_t* draft_count;  // [batch]
  const int32_t* cu_rows;      // [batch + 1]
};

struct ProbsInput {
  const float* probs;  // [rows, vocab], row r starts at probs + r * row_stride
  int64_t row_stride;
  int64_t vocab;
  int64_t rows;
  const double* uniform;           // [rows]
  const float* draft_probs;        // [batch, max_drafts, vocab] or null
  const double* residual_uniform;  // [rows], with draft_probs
};

struct VerifyOutput {
  int32_t* n_accepted;  // [batch]
  int32_t* token;       // [batch, max_drafts + 1]
};

Error VerifyGreedy(const int32_t* target_token, const DraftInput& drafts,
                   const VerifyOutput& output, Stream stream);

// A row that is not a distribution emits -1, which ends its request's acceptance there.
Error VerifySampled(const ProbsInput& probs, const DraftInput& drafts, const VerifyOutput& output,
                    Stream stream);

// What the logprob op reads, from what verification wrote. Rows beyond `capacity` are dropped.
struct StepInput {
  int64_t batch;
  int64_t max_drafts;
  int64_t capacity;
  const int32_t* n_accepted;  // [batch]
  const int32_t* token;       // [batch, max_drafts + 1]
  const int32_t* cu_rows;     // [batch + 1]
  const int32_t* k;           // [batch]
  const float* temperature;   // [batch] or null for 1
  const int32_t* first_row;   // [batch], added to a request's rows, or null for 0
  const float* top_p;         // [batch] or null for 1
};

struct StepOutput {
  int32_t* row_index;    // [capacity]
  int32_t* token;        // [capacity]
  int32_t* k;            // [capacity]
  float* inv_temp;       // [capacity]
  int32_t* row_offset;   // [capacity + 1]
  int32_t* topk_offset;  // [capacity + 1]
  int32_t* num_rows;     // [1]
  float* top_p;          // [capacity] or null
};

Error Plan(const StepInput& input, const StepOutput& output, Stream stream);

struct ColumnsInput {
  int64_t batch;
  int64_t rows;
  const int32_t* num_rows;  // [1] or null for `rows`
  const int32_t* row_offset;
  const int32_t* topk_offset;
  const int32_t* n_accepted;  // [batch]
  const int32_t* token;       // [rows]
  LogprobOutput columns;
};

// Writes words B, T, L, K, n_accepted[B], token[T], logprob[L], rank[L], topk_token[K],
// topk_logprob[K] without gaps. Words past `capacity_words` are dropped.
Error Pack(const ColumnsInput& input, void* packed, int64_t capacity_words, Stream stream);

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_CSRC_CUDA_LAUNCH_H_
