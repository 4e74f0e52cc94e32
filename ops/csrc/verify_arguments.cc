#include "verify_arguments.h"

#include <tvm/ffi/error.h>

#include <algorithm>
#include <limits>

#include "baton_ops/cpu/verify.h"

namespace baton_ops {
namespace {

struct DraftTensors {
  TensorView draft, draft_count, cu_rows;

  explicit DraftTensors(ArgumentReader& args)
      : draft(args.Tensor("draft")),
        draft_count(args.Tensor("draft_count")),
        cu_rows(args.Tensor("cu_rows")) {}
};

void RequireCpu(const TensorView& tensor, const char* name) {
  if (tensor.device().device_type == kDLCPU) return;
  TVM_FFI_THROW(ValueError) << name << " must be on the CPU, got device type "
                            << tensor.device().device_type;
}

void CheckDraftRows(const cpu::Drafts& drafts, int64_t target_rows, int64_t vocab) {
  int64_t rows = 0;
  for (int64_t b = 0; b < drafts.batch; ++b) {
    CheckRange("cu_rows", b, drafts.cu_rows[b], rows, rows);
    CheckRange("draft_count", b, drafts.draft_count[b], 0, drafts.max_drafts);
    for (int64_t i = 0; i < drafts.draft_count[b]; ++i) {
      const int64_t at = b * drafts.max_drafts + i;
      CheckRange("draft (flattened)", at, drafts.draft[at], 0, vocab - 1);
    }
    rows += drafts.draft_count[b] + 1;
  }
  CheckRange("cu_rows", drafts.batch, drafts.cu_rows[drafts.batch], rows, rows);
  if (rows != target_rows) {
    TVM_FFI_THROW(ValueError) << "cu_rows[" << drafts.batch
                              << "] must be the number of target rows " << target_rows << ", got "
                              << rows;
  }
}

cpu::Drafts CheckDrafts(const DraftTensors& t, DLDevice device) {
  const Checked draft(t.draft, "draft");
  draft.HasDtype(kInt32).HasRank(2).IsContiguous().IsOn(device);
  const int64_t batch = t.draft.size(0);
  return {batch, t.draft.size(1), draft.Data<const int32_t>(),
          Vector<const int32_t>(t.draft_count, "draft_count", kInt32, batch, device),
          Vector<const int32_t>(t.cu_rows, "cu_rows", kInt32, batch + 1, device)};
}

cpu::Acceptance CheckAcceptance(ArgumentReader& args, const cpu::Drafts& drafts, DLDevice device) {
  const TensorView n_accepted = args.Tensor("n_accepted");
  const TensorView tokens = args.Tensor("token");
  const Checked token(tokens, "token");
  token.HasDtype(kInt32).HasRank(2).HasSize(0, drafts.batch).HasSize(1, drafts.max_drafts + 1);
  token.IsContiguous().IsOn(device);
  return {Vector<int32_t>(n_accepted, "n_accepted", kInt32, drafts.batch, device),
          token.Data<int32_t>()};
}

const double* CheckUniform(const TensorView& tensor, const char* name, int64_t rows,
                           DLDevice device) {
  const double* uniform = Vector<const double>(tensor, name, kFloat64, rows, device);
  for (int64_t r = 0; r < rows; ++r) {
    if (uniform[r] >= 0.0 && uniform[r] < 1.0) continue;
    TVM_FFI_THROW(ValueError) << name << "[" << r << "] must be in [0, 1), got " << uniform[r];
  }
  return uniform;
}

cpu::DraftProbs CheckDraftProbs(const std::optional<TensorView>& probs,
                                const std::optional<TensorView>& residual,
                                const cpu::Drafts& drafts, const TensorView& target) {
  if (!probs != !residual) {
    TVM_FFI_THROW(ValueError) << "draft_probs and residual_uniform must be given together";
  }
  if (!probs) return {nullptr, nullptr};
  const Checked checked(*probs, "draft_probs");
  checked.HasDtype(kFloat32).HasRank(3).HasSize(0, drafts.batch).HasSize(1, drafts.max_drafts);
  checked.HasSize(2, target.size(1)).IsContiguous().IsOn(target.device());
  return {checked.Data<const float>(),
          CheckUniform(*residual, "residual_uniform", target.size(0), target.device())};
}

void Refuse(const cpu::BadDistribution& bad, const cpu::Drafts& drafts) {
  const char* why = "must be non-negative with a positive, finite sum";
  if (bad.which == cpu::Distribution::kTarget) {
    TVM_FFI_THROW(ValueError) << "probs[" << bad.row << "] " << why;
  }
  const int32_t* end = drafts.cu_rows + drafts.batch + 1;
  const int64_t b = std::upper_bound(drafts.cu_rows, end, bad.row) - drafts.cu_rows - 1;
  TVM_FFI_THROW(ValueError) << "draft_probs[" << b << ", " << bad.row - drafts.cu_rows[b] << "] "
                            << why;
}

}  // namespace

void RunVerifyGreedy(ArgumentReader args) {
  const TensorView target = args.Tensor("target_token");
  const DraftTensors tensors(args);
  RequireCpu(target, "target_token");
  const DLDevice device = target.device();
  const int32_t* target_token =
      Vector<const int32_t>(target, "target_token", kInt32, target.numel(), device);
  const cpu::Drafts drafts = CheckDrafts(tensors, device);
  const cpu::Acceptance out = CheckAcceptance(args, drafts, device);
  constexpr int64_t kAnyToken = int64_t{std::numeric_limits<int32_t>::max()} + 1;
  CheckDraftRows(drafts, target.numel(), kAnyToken);
  cpu::VerifyGreedy(target_token, drafts, out);
}

void RunVerifySampled(ArgumentReader args) {
  const TensorView probs = args.Tensor("probs");
  const TensorView uniform = args.Tensor("uniform");
  const DraftTensors tensors(args);
  const std::optional<TensorView> draft_probs = args.OptionalTensor("draft_probs");
  const std::optional<TensorView> residual = args.OptionalTensor("residual_uniform");
  RequireCpu(probs, "probs");
  const DLDevice device = probs.device();
  const Checked checked(probs, "probs");
  checked.HasDtype(kFloat32).HasRank(2).HasDenseRows();
  const cpu::Drafts drafts = CheckDrafts(tensors, device);
  const cpu::Acceptance out = CheckAcceptance(args, drafts, device);
  CheckDraftRows(drafts, probs.size(0), probs.size(1));
  const cpu::TargetProbs target{checked.Data<const float>(), probs.stride(0), probs.size(1),
                                CheckUniform(uniform, "uniform", probs.size(0), device)};
  const cpu::DraftProbs proposal = CheckDraftProbs(draft_probs, residual, drafts, probs);
  const cpu::BadDistribution bad =
      cpu::VerifySampled(target, proposal.probs ? &proposal : nullptr, drafts, out);
  if (bad.which != cpu::Distribution::kNone) Refuse(bad, drafts);
}

}  // namespace baton_ops
