#include "baton_ops/cpu/verify.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>

#include "baton_ops/cpu/pool.h"

namespace baton_ops::cpu {
namespace {

constexpr int64_t kGroup = 128;
constexpr int64_t kLanes = 8;

// Weights in fp64 by token id, not normalised.
struct TargetWeight {
  const float* p;
  double operator()(int64_t id) const { return p[id]; }
};

// The positive part of p - q, both normalised, times the product of their sums.
struct ResidualWeight {
  const float* p;
  const float* q;
  double p_total;
  double q_total;
  double operator()(int64_t id) const { return std::max(p[id] * q_total - q[id] * p_total, 0.0); }
};

// A group's sum is that of kLanes interleaved partial sums, in a fixed order: fast, and the same
// whatever the batch or thread.
template <typename Weight>
double GroupSum(const Weight& weight, int64_t first, int64_t last) {
  double lane[kLanes] = {};
  int64_t id = first;
  for (; id + kLanes <= last; id += kLanes) {
    for (int64_t j = 0; j < kLanes; ++j) lane[j] += weight(id + j);
  }
  for (; id < last; ++id) lane[0] += weight(id);
  double sum = 0;
  for (double partial : lane) sum += partial;
  return sum;
}

template <typename Weight>
double Total(const Weight& weight, int64_t vocab) {
  double total = 0;
  for (int64_t first = 0; first < vocab; first += kGroup) {
    total += GroupSum(weight, first, std::min(first + kGroup, vocab));
  }
  return total;
}

// The first id in a group that takes the cumulative sum over the target. Rounding can keep the walk
// under a target that the group's sum exceeds: then it is the group's last id with any weight.
template <typename Weight>
int32_t SampleInGroup(const Weight& weight, int64_t first, int64_t last, double before,
                      double target) {
  double cumulative = before;
  int64_t last_positive = first;
  for (int64_t id = first; id < last; ++id) {
    const double mass = weight(id);
    cumulative += mass;
    if (cumulative > target) return static_cast<int32_t>(id);
    if (mass > 0) last_positive = id;
  }
  return static_cast<int32_t>(last_positive);
}

// Inverse CDF: the smallest id whose cumulative sum exceeds uniform * total. Requires total > 0 and
// uniform < 1, so that some group crosses the target: Total adds the same sums in the same order.
template <typename Weight>
int32_t Sample(const Weight& weight, int64_t vocab, double total, double uniform) {
  const double target = std::min(uniform * total, std::nextafter(total, 0.0));
  double before = 0;
  int64_t first = 0;
  for (;; first += kGroup) {
    const int64_t last = std::min(first + kGroup, vocab);
    const double after = before + GroupSum(weight, first, last);
    if (after > target) return SampleInGroup(weight, first, last, before, target);
    before = after;
  }
}

// The sum of a row, or NaN if it is not a distribution.
double DistributionTotal(const float* p, int64_t vocab) {
  int negative = 0;
  for (int64_t id = 0; id < vocab; ++id) negative |= p[id] < 0.0f;
  const double total = Total(TargetWeight{p}, vocab);
  const bool valid = !negative && total > 0 && std::isfinite(total);
  return valid ? total : std::numeric_limits<double>::quiet_NaN();
}

struct Job {
  const TargetProbs& target;
  const DraftProbs* proposal;
  const Drafts& drafts;
  const Acceptance& out;
  std::atomic<int64_t>* bad;  // smallest 2 * target row + (1 if the draft's distribution is bad)
};

void Report(const Job& job, int64_t row, Distribution which) {
  const int64_t found = 2 * row + (which == Distribution::kDraft ? 1 : 0);
  int64_t known = job.bad->load();
  while (found < known && !job.bad->compare_exchange_weak(known, found)) {
  }
}

// What one target row decides: the token to emit, and whether it is the accepted draft.
struct Decision {
  int32_t token;
  bool accepted;
};

constexpr Decision kInvalid{-1, false};

Decision DecidePointMass(const Job& job, int64_t row, int32_t draft) {
  const TargetProbs& target = job.target;
  const float* p = target.probs + row * target.row_stride;
  const double total = DistributionTotal(p, target.vocab);
  if (std::isnan(total)) {
    Report(job, row, Distribution::kTarget);
    return kInvalid;
  }
  const int32_t token = Sample(TargetWeight{p}, target.vocab, total, target.uniform[row]);
  return {token, token == draft};
}

// Accepts with probability min(1, p / q). "<" and not "<=": with u = 0 a draft of probability zero
// must still be refused.
Decision DecideProposal(const Job& job, int64_t row, int64_t proposal_row, int32_t draft) {
  const TargetProbs& target = job.target;
  const float* p = target.probs + row * target.row_stride;
  const float* q = job.proposal->probs + proposal_row * target.vocab;
  const double p_total = DistributionTotal(p, target.vocab);
  const double q_total = DistributionTotal(q, target.vocab);
  if (std::isnan(p_total) || std::isnan(q_total)) {
    Report(job, row, std::isnan(p_total) ? Distribution::kTarget : Distribution::kDraft);
    return kInvalid;
  }
  if (target.uniform[row] * q[draft] * p_total < p[draft] * q_total) return {draft, true};
  const double uniform = job.proposal->residual_uniform[row];
  const ResidualWeight residual{p, q, p_total, q_total};
  const double total = Total(residual, target.vocab);
  // Without a residual p equals q up to rounding, and p itself is the right distribution.
  if (!(total > 0)) return {Sample(TargetWeight{p}, target.vocab, p_total, uniform), false};
  return {Sample(residual, target.vocab, total, uniform), false};
}

void VerifyRequest(const Job& job, int64_t b) {
  const Drafts& drafts = job.drafts;
  const int32_t* draft = drafts.draft + b * drafts.max_drafts;
  int32_t* token = job.out.token + b * (drafts.max_drafts + 1);
  std::fill(token, token + drafts.max_drafts + 1, -1);
  int32_t i = 0;
  for (bool going = true; going; ++i) {
    const int64_t row = drafts.cu_rows[b] + i;
    const bool bonus = i == drafts.draft_count[b];
    const Decision decision = bonus || !job.proposal
                                  ? DecidePointMass(job, row, bonus ? -1 : draft[i])
                                  : DecideProposal(job, row, b * drafts.max_drafts + i, draft[i]);
    token[i] = decision.token;
    going = decision.accepted;
  }
  job.out.n_accepted[b] = i - 1;
}

}  // namespace

void VerifyGreedy(const int32_t* target_token, const Drafts& drafts, const Acceptance& out) {
  for (int64_t b = 0; b < drafts.batch; ++b) {
    const int32_t* draft = drafts.draft + b * drafts.max_drafts;
    const int32_t* target = target_token + drafts.cu_rows[b];
    int32_t* token = out.token + b * (drafts.max_drafts + 1);
    int32_t accepted = 0;
    while (accepted < drafts.draft_count[b] && draft[accepted] == target[accepted]) ++accepted;
    std::fill(token, token + drafts.max_drafts + 1, -1);
    std::copy(target, target + accepted + 1, token);
    out.n_accepted[b] = accepted;
  }
}

BadDistribution VerifySampled(const TargetProbs& target, const DraftProbs* proposal,
                              const Drafts& drafts, const Acceptance& out) {
  constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
  std::atomic<int64_t> bad{kNone};
  const Job job{target, proposal, drafts, out, &bad};
  ParallelFor(
      drafts.batch, target.vocab,
      [](const void* context, int64_t b) { VerifyRequest(*static_cast<const Job*>(context), b); },
      &job);
  const int64_t found = bad.load();
  if (found == kNone) return {};
  return {found % 2 ? Distribution::kDraft : Distribution::kTarget, found / 2};
}

}  // namespace baton_ops::cpu
