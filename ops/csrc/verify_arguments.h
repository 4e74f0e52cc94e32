// Checks of the verification ops' arguments.
#ifndef BATON_OPS_CSRC_VERIFY_ARGUMENTS_H_
#define BATON_OPS_CSRC_VERIFY_ARGUMENTS_H_

#include "arguments.h"

namespace baton_ops {

// Reads target_token, draft, draft_count, cu_rows, n_accepted, token.
void RunVerifyGreedy(ArgumentReader args);
constexpr int32_t kVerifyGreedyArguments = 6;

// Reads probs, uniform, draft, draft_count, cu_rows, draft_probs?, residual_uniform?, n_accepted,
// token.
void RunVerifySampled(ArgumentReader args);
constexpr int32_t kVerifySampledArguments = 9;

}  // namespace baton_ops

#endif  // BATON_OPS_CSRC_VERIFY_ARGUMENTS_H_
