// One streaming pass over a row yields its maximum, sum of exponentials, rank count and the k
// groups of 128 logits with the largest maxima; the top k then come from those groups alone.
//
// Why k groups suffice, ties included: order groups by (maximum descending, index ascending). A
// group outside the first k is preceded by k groups whose maxima come before each of its elements,
// because groups are disjoint intervals of ids. (Dr. Top-k, arXiv 2109.08219, prunes the same way.)
#include "baton_ops/cpu/logprobs.h"

#include <cmath>
#include <limits>

#include "baton_ops/cpu/block.h"
#include "baton_ops/cpu/pool.h"
#include "baton_ops/cpu/settings.h"
#include "baton_ops/cpu/top_keys.h"

namespace baton_ops::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr double kLog2E = 1.4426950408889634;

// A row as blocks of fp32: memory itself where possible, otherwise a copy on the caller's stack.
class RowReader {
 public:
  RowReader(const LogprobInput& input, int64_t row, const BlockKernels& kernels)
      : type_(input.type), vocab_(input.vocab), kernels_(kernels) {
    const int64_t element_bytes = type_ == LogitType::kFloat32 ? 4 : 2;
    base_ = static_cast<const char*>(input.logits) + row * input.row_stride * element_bytes;
  }

  int64_t vocab() const { return vocab_; }

  // `count` logits from `first` on, padded with -inf to whole groups. Valid until the next call
  // with the same buffer of kBlockLogits floats.
  const float* Read(int64_t first, int count, float* buffer) const {
    const bool whole_groups = count % kGroupLogits == 0;
    if (type_ == LogitType::kFloat32 && whole_groups) return Floats() + first;
    Convert(first, count, buffer);
    for (int i = count; i % kGroupLogits != 0; ++i) buffer[i] = -kInfinity;
    return buffer;
  }

  float At(int64_t id) const {
    float value;
    Convert(id, 1, &value);
    return value;
  }

 private:
  const float* Floats() const { return reinterpret_cast<const float*>(base_); }
  const uint16_t* Halves() const { return reinterpret_cast<const uint16_t*>(base_); }

  void Convert(int64_t first, int count, float* out) const {
    switch (type_) {
      case LogitType::kFloat32:
        std::memcpy(out, Floats() + first, count * sizeof(float));
        break;
      case LogitType::kBFloat16:
        kernels_.from_bfloat16(Halves() + first, count, out);
        break;
      case LogitType::kFloat16:
        kernels_.from_float16(Halves() + first, count, out);
        break;
    }
  }

  LogitType type_;
  int64_t vocab_;
  const BlockKernels& kernels_;
  const char* base_;
};

struct RowSummary {
  float max = -kInfinity;  // NaNs left out
  double sum = 0;          // of exp((x - max) * inv_temp)
  int64_t count = 0;       // logits at or above the threshold
};

// A NaN is above +inf, which no comparison with a float can say.
LogitThreshold ThresholdFor(float sampled, RankMode mode) {
  if (std::isnan(sampled)) return {kInfinity, true};
  return {sampled, mode == RankMode::kAbovePlusOne};
}

int32_t RankOf(float sampled, int64_t count, RankMode mode) {
  if (mode == RankMode::kAtLeast) return static_cast<int32_t>(count);
  return std::isnan(sampled) ? 1 : static_cast<int32_t>(count + 1);
}

void OfferGroup(const float* x, float group_max, bool has_nan, int64_t group, TopKeys* groups) {
  uint32_t ordered = OrderedValue(group_max);
  for (int i = 0; has_nan && i < kGroupLogits; ++i) ordered = std::max(ordered, OrderedValue(x[i]));
  const uint64_t key = OrderedKey(ordered, static_cast<uint32_t>(group));
  if (groups->Admits(key)) groups->Insert(key);
}

// Moves the sum to a new maximum. A maximum of -inf means that nothing was summed yet.
void RaiseMax(float max, float scale, RowSummary* summary) {
  if (!(max > summary->max)) return;
  const double shift = (static_cast<double>(summary->max) - max) * scale;
  summary->sum = summary->max == -kInfinity ? 0.0 : summary->sum * std::exp2(shift);
  summary->max = max;
}

void ScanBlock(const float* x, int64_t first, int groups, float scale, LogitThreshold threshold,
               const BlockKernels& kernels, RowSummary* summary, TopKeys* top_groups) {
  float group_max[kBlockGroups];
  kernels.group_max(x, groups, group_max);
  // All of them before the sum, which is taken relative to the largest and so never overflows.
  for (int g = 0; g < groups; ++g) RaiseMax(group_max[g], scale, summary);
  const float max = summary->max == -kInfinity ? 0.0f : summary->max;
  const BlockSum block = kernels.sum(x, groups, max, scale, threshold);
  summary->sum += block.sum;
  summary->count += block.count;
  if (top_groups == nullptr) return;
  const bool has_nan = std::isnan(block.sum);
  for (int g = 0; g < groups; ++g) {
    OfferGroup(x + g * kGroupLogits, group_max[g], has_nan, first / kGroupLogits + g, top_groups);
  }
}

RowSummary Scan(const RowReader& row, float scale, LogitThreshold threshold,
                const BlockKernels& kernels, TopKeys* top_groups) {
  float buffer[kBlockLogits];
  RowSummary summary;
  for (int64_t first = 0; first < row.vocab(); first += kBlockLogits) {
    const int count = static_cast<int>(std::min<int64_t>(kBlockLogits, row.vocab() - first));
    const int groups = (count + kGroupLogits - 1) / kGroupLogits;
    const float* x = row.Read(first, count, buffer);
    ScanBlock(x, first, groups, scale, threshold, kernels, &summary, top_groups);
    // The padding is -inf too: it adds nothing to the sum, but may be at the threshold.
    const bool counts_padding = !threshold.strict && threshold.value == -kInfinity;
    if (counts_padding) summary.count -= groups * kGroupLogits - count;
  }
  return summary;
}

// log softmax of one row, in fp64 with the maximum kept apart from the log of the sum, so that a
// large common offset costs no accuracy.
class Normaliser {
 public:
  Normaliser(const RowSummary& summary, float inv_temp)
      : max_(summary.max), inv_temp_(inv_temp), log_sum_(std::log(summary.sum)) {}

  float Logprob(float logit) const {
    if (logit == -kInfinity) return kLowestLogprob;
    const double logprob = (static_cast<double>(logit) - max_) * inv_temp_ - log_sum_;
    return logprob < kLowestLogprob ? kLowestLogprob : static_cast<float>(logprob);
  }

 private:
  double max_;
  double inv_temp_;
  double log_sum_;
};

// Offers the logits of a group that the floor means.
void GatherGroup(const RowReader& row, int64_t group, LogitThreshold floor,
                 const BlockKernels& kernels, TopKeys* best) {
  float buffer[kGroupLogits];
  uint64_t mask[kGroupLogits / 64];
  const int64_t first = group * kGroupLogits;
  const int count = static_cast<int>(std::min<int64_t>(kGroupLogits, row.vocab() - first));
  const float* x = row.Read(first, count, buffer);
  kernels.select(x, floor, mask);
  for (int word = 0; word < kGroupLogits / 64; ++word) {
    for (uint64_t left = mask[word]; left != 0; left &= left - 1) {
      const int i = word * 64 + __builtin_ctzll(left);
      if (i >= count) return;
      const uint64_t key = OrderedKey(OrderedValue(x[i]), static_cast<uint32_t>(first + i));
      if (best->Admits(key)) best->Insert(key);
    }
  }
}

LogitThreshold AtLeast(uint64_t key) {
  return ThresholdFor(ValueOfOrdered(OrderedOfKey(key)), RankMode::kAtLeast);
}

// The k best tokens, largest first, out of the best groups.
TopKeys GatherTopK(const RowReader& row, const BlockKernels& kernels, int k, TopKeys* groups) {
  groups->SortDescending();
  // Each of the k groups holds an element at its maximum, so k elements reach the smallest of them.
  LogitThreshold floor{-kInfinity, false};
  if (groups->full()) floor = AtLeast((*groups)[k - 1]);
  TopKeys best(k);
  for (int g = 0; g < groups->size(); ++g) {
    GatherGroup(row, IdOfKey((*groups)[g]), floor, kernels, &best);
    if (best.full()) floor = AtLeast(best.smallest());
  }
  best.SortDescending();
  return best;
}

void WriteTopK(const TopKeys& best, const Normaliser& normaliser, int32_t* token, float* logprob) {
  for (int i = 0; i < best.size(); ++i) {
    token[i] = static_cast<int32_t>(IdOfKey(best[i]));
    logprob[i] = normaliser.Logprob(ValueOfOrdered(OrderedOfKey(best[i])));
  }
}

struct Job {
  const LogprobInput& input;
  const LogprobOutput& output;
  const BlockKernels& kernels;
};

void RunRow(const Job& job, int64_t t) {
  const LogprobInput& in = job.input;
  const int k = in.k[t];
  if (k < 0) return;
  const RowReader row(in, in.row_index ? in.row_index[t] : t, job.kernels);
  const float inv_temp = in.inv_temp ? EffectiveInvTemp(in.inv_temp[t]) : 1.0f;
  const float sampled = row.At(in.token[t]);
  const float scale = static_cast<float>(inv_temp * kLog2E);
  const LogitThreshold threshold = ThresholdFor(sampled, in.rank_mode);
  TopKeys groups(k);
  const RowSummary summary = Scan(row, scale, threshold, job.kernels, k > 0 ? &groups : nullptr);
  const Normaliser normaliser(summary, inv_temp);
  const LogprobOutput& out = job.output;
  const int32_t slot = out.row_offset[t];
  out.logprob[slot] = normaliser.Logprob(sampled);
  out.rank[slot] = RankOf(sampled, summary.count, in.rank_mode);
  if (k == 0) return;
  const int32_t first = out.topk_offset[t];
  const TopKeys best = GatherTopK(row, job.kernels, k, &groups);
  WriteTopK(best, normaliser, out.topk_token + first, out.topk_logprob + first);
}

}  // namespace

void Logprobs(const LogprobInput& input, const LogprobOutput& output) {
  const Job job{input, output, ActiveKernels()};
  ParallelFor(
      input.rows, input.vocab,
      [](const void* context, int64_t t) { RunRow(*static_cast<const Job*>(context), t); }, &job);
}

}  // namespace baton_ops::cpu
