// The logprob op's arguments: read by name, and checked as far as no device memory is read.
#ifndef BATON_OPS_CSRC_LOGPROB_ARGUMENTS_H_
#define BATON_OPS_CSRC_LOGPROB_ARGUMENTS_H_

#include "arguments.h"
#include "baton_ops/cpu/logprobs.h"

namespace baton_ops {

constexpr int32_t kLogprobArguments = 14;

struct LogprobArguments {
  TensorView logits, token, k;
  std::optional<TensorView> row_index, inv_temp;
  TensorView row_offset, topk_offset;
  std::optional<TensorView> num_rows;
  int64_t rank_mode;
  std::optional<TensorView> workspace;
  TensorView logprob, rank, topk_token, topk_logprob;

  // In this order.
  explicit LogprobArguments(ArgumentReader* args);
};

// Raises TypeError for a dtype that the op does not take.
cpu::LogitType LogitTypeOf(const TensorView& logits);

// Raises ValueError unless `logits` is a matrix with dense rows whose ids fit int32.
void CheckLogits(const TensorView& logits);

// Pointers out of checked tensors; `rows` is the capacity T.
cpu::LogprobInput InputOf(const LogprobArguments& a);

// Raises ValueError if an output is shorter than `rows` or `topk` entries.
cpu::LogprobOutput OutputOf(const LogprobArguments& a, int64_t rows, int64_t topk);

// Null if absent.
const int32_t* NumRowsOf(const LogprobArguments& a);

}  // namespace baton_ops

#endif  // BATON_OPS_CSRC_LOGPROB_ARGUMENTS_H_
