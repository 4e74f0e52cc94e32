// Speculative acceptance over host memory.
#ifndef BATON_OPS_CPU_VERIFY_H_
#define BATON_OPS_CPU_VERIFY_H_

#include <cstdint>

namespace baton_ops::cpu {

// Request b proposed draft[b, :draft_count[b]]; its target rows are
// [cu_rows[b], cu_rows[b] + draft_count[b]], the last one for the bonus token.
struct Drafts {
  int64_t batch;
  int64_t max_drafts;
  const int32_t* draft;        // [batch, max_drafts]
  const int32_t* draft_count;  // [batch]
  const int32_t* cu_rows;      // [batch + 1]
};

struct Acceptance {
  int32_t* n_accepted;  // [batch]
  int32_t* token;       // [batch, max_drafts + 1], -1 after the last emitted token
};

struct TargetProbs {
  const float* probs;  // row r starts at probs + r * row_stride
  int64_t row_stride;
  int64_t vocab;
  const double* uniform;  // [rows], each in [0, 1)
};

// Proposals with a distribution. Without one, a draft is a point mass.
struct DraftProbs {
  const float* probs;              // [batch, max_drafts, vocab]
  const double* residual_uniform;  // [rows], each in [0, 1)
};

enum class Distribution { kNone, kTarget, kDraft };

// The first row found that is not a distribution: a negative or NaN entry, or a sum that is zero or
// not finite.
struct BadDistribution {
  Distribution which = Distribution::kNone;
  int64_t row = -1;  // the target row at which it was needed
};

void VerifyGreedy(const int32_t* target_token, const Drafts& drafts, const Acceptance& out);

BadDistribution VerifySampled(const TargetProbs& target, const DraftProbs* proposal,
                              const Drafts& drafts, const Acceptance& out);

}  // namespace baton_ops::cpu

#endif  // BATON_OPS_CPU_VERIFY_H_
