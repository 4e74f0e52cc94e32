// What every implementation of the logprob op must agree on besides the order of logits.
#ifndef BATON_OPS_LOGPROB_RULES_H_
#define BATON_OPS_LOGPROB_RULES_H_

#include "baton_ops/order.h"

namespace baton_ops {

// Largest per-row k.
constexpr int kMaxTopK = 64;

// Stands for log 0: a record's logprob is finite unless the row has no normaliser.
constexpr float kLowestLogprob = -3.40282346638528859812e+38f;

enum class RankMode : int {
  kAtLeast = 0,       // count of logits >= the sampled one, itself included
  kAbovePlusOne = 1,  // 1 + count of logits above the sampled one
};

// Temperatures below 1e-5 mean 1: such a row was decoded greedily and its logprobs are the model's
// own. The device cannot raise, so it treats the values that the host refuses (<= 0, NaN) alike.
BATON_HD float EffectiveInvTemp(float inv_temp) {
  return (inv_temp > 0.0f && inv_temp <= 1e5f) ? inv_temp : 1.0f;
}

}  // namespace baton_ops

#endif  // BATON_OPS_LOGPROB_RULES_H_
