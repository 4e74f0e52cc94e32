// The logprob op on the device that holds its tensors.
#ifndef BATON_OPS_CSRC_LOGPROB_RUN_H_
#define BATON_OPS_CSRC_LOGPROB_RUN_H_

#include "arguments.h"

namespace baton_ops {

void RunLogprobs(ArgumentReader args);

// Bytes of scratch that the op needs for `rows` tokens over logits like these; 0 on the CPU.
int64_t LogprobsWorkspaceBytes(TensorView logits, int64_t rows);

}  // namespace baton_ops

#endif  // BATON_OPS_CSRC_LOGPROB_RUN_H_
