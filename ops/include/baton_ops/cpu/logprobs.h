// The logprob op over host memory: raw pointers in, raw pointers out, nothing allocated.
#ifndef BATON_OPS_CPU_LOGPROBS_H_
#define BATON_OPS_CPU_LOGPROBS_H_

#include <cstdint>

#include "baton_ops/logprob_rules.h"

namespace baton_ops::cpu {

enum class LogitType { kFloat32, kBFloat16, kFloat16 };

struct LogprobInput {
  const void* logits;  // row r starts at logits + r * row_stride elements
  LogitType type;
  int64_t row_stride;
  int64_t vocab;
  int64_t rows;              // T
  const int32_t* token;      // [T], each in [0, vocab)
  const int32_t* k;          // [T], each in [-1, min(vocab, kMaxTopK)]
  const int32_t* row_index;  // [T] or null for the identity
  const float* inv_temp;     // [T] or null for 1
  RankMode rank_mode;
};

struct LogprobOutput {
  const int32_t* row_offset;   // [T], index of row t in logprob and rank
  const int32_t* topk_offset;  // [T], index of row t's first entry in topk_*
  float* logprob;
  int32_t* rank;
  int32_t* topk_token;
  float* topk_logprob;
};

// Relies on checked input. Results depend on the row alone: not on other rows, not on threads.
void Logprobs(const LogprobInput& input, const LogprobOutput& output);

}  // namespace baton_ops::cpu

#endif  // BATON_OPS_CPU_LOGPROBS_H_
