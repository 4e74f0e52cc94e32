// Exports of the ops that exist on CUDA only: they keep a decode step on the device between
// verification and the copy to the host.
#include "arguments.h"
#include "export_support.h"
#include "launch.h"
#include "logprob_arguments.h"

namespace baton_ops {
namespace {

struct Requests {
  DLDevice device;
  cuda::DraftInput drafts;
  cuda::VerifyOutput output;
};

// Reads draft, draft_count, cu_rows, n_accepted, token.
Requests ReadRequests(ArgumentReader* args) {
  const TensorView draft = args->Tensor("draft");
  RequireCuda(draft, "draft");
  Requests r{draft.device(), {}, {}};
  const Checked checked(draft, "draft");
  checked.HasDtype(kInt32).HasRank(2).IsContiguous();
  const int64_t batch = draft.size(0), most = draft.size(1);
  const TensorView count = args->Tensor("draft_count");
  const TensorView cu_rows = args->Tensor("cu_rows");
  r.drafts = {batch, most, checked.Data<const int32_t>(),
              Vector<const int32_t>(count, "draft_count", kInt32, batch, r.device),
              Vector<const int32_t>(cu_rows, "cu_rows", kInt32, batch + 1, r.device)};
  const TensorView n_accepted = args->Tensor("n_accepted");
  const TensorView token = args->Tensor("token");
  r.output = {Vector<int32_t>(n_accepted, "n_accepted", kInt32, batch, r.device),
              Matrix<int32_t>(token, "token", kInt32, batch, most + 1, r.device)};
  return r;
}

// Reads target_token and what ReadRequests does.
void RunVerifyGreedyOnCuda(ArgumentReader args) {
  const TensorView target = args.Tensor("target_token");
  const Requests r = ReadRequests(&args);
  const int32_t* tokens =
      Vector<const int32_t>(target, "target_token", kInt32, target.numel(), r.device);
  const tvm::ffi::CUDADeviceGuard guard(r.device.device_id);
  Raise("verify_greedy", cuda::VerifyGreedy(tokens, r.drafts, r.output, StreamOf(r.device)));
}

// Reads probs, uniform, draft_probs?, residual_uniform? and what ReadRequests does.
void RunVerifySampledOnCuda(ArgumentReader args) {
  const TensorView probs = args.Tensor("probs");
  const TensorView uniform = args.Tensor("uniform");
  const auto draft_probs = args.OptionalTensor("draft_probs");
  const auto residual = args.OptionalTensor("residual_uniform");
  const Requests r = ReadRequests(&args);
  const Checked checked(probs, "probs");
  checked.HasDtype(kFloat32).HasRank(2).HasDenseRows().IsOn(r.device);
  const int64_t rows = probs.size(0), vocab = probs.size(1);
  if (!draft_probs != !residual) {
    TVM_FFI_THROW(ValueError) << "draft_probs and residual_uniform must be given together";
  }
  cuda::ProbsInput in{checked.Data<const float>(),
                      probs.stride(0),
                      vocab,
                      rows,
                      Vector<const double>(uniform, "uniform", kFloat64, rows, r.device),
                      nullptr,
                      nullptr};
  if (draft_probs) {
    const Checked proposal(*draft_probs, "draft_probs");
    proposal.HasDtype(kFloat32).HasRank(3).HasSize(0, r.drafts.batch);
    proposal.HasSize(1, r.drafts.max_drafts).HasSize(2, vocab).IsContiguous().IsOn(r.device);
    in.draft_probs = proposal.Data<const float>();
    in.residual_uniform =
        Vector<const double>(*residual, "residual_uniform", kFloat64, rows, r.device);
  }
  const tvm::ffi::CUDADeviceGuard guard(r.device.device_id);
  Raise("verify_sampled", cuda::VerifySampled(in, r.drafts, r.output, StreamOf(r.device)));
}

// Reads n_accepted, token, cu_rows, k, temperature?, first_row?, top_p?, row_index, row_token,
// row_k, inv_temp, row_offset, topk_offset, num_rows, row_top_p?.
void RunPlan(ArgumentReader args) {
  const TensorView n_accepted = args.Tensor("n_accepted");
  RequireCuda(n_accepted, "n_accepted");
  const DLDevice on = n_accepted.device();
  const TensorView token = args.Tensor("token"), cu_rows = args.Tensor("cu_rows");
  const TensorView k = args.Tensor("k");
  const auto temperature = args.OptionalTensor("temperature");
  const auto first_row = args.OptionalTensor("first_row"), top_p = args.OptionalTensor("top_p");
  const int64_t batch = n_accepted.numel();
  Checked(token, "token").HasRank(2);
  cuda::StepInput in{};
  in.batch = batch;
  in.max_drafts = token.size(1) - 1;
  in.n_accepted = Vector<const int32_t>(n_accepted, "n_accepted", kInt32, batch, on);
  in.token = Matrix<const int32_t>(token, "token", kInt32, batch, token.size(1), on);
  in.cu_rows = Vector<const int32_t>(cu_rows, "cu_rows", kInt32, batch + 1, on);
  in.k = Vector<const int32_t>(k, "k", kInt32, batch, on);
  in.temperature = OptionalVector<const float>(temperature, "temperature", kFloat32, batch, on);
  in.first_row = OptionalVector<const int32_t>(first_row, "first_row", kInt32, batch, on);
  in.top_p = OptionalVector<const float>(top_p, "top_p", kFloat32, batch, on);
  const TensorView row_index = args.Tensor("row_index");
  const int64_t capacity = in.capacity = row_index.numel();
  cuda::StepOutput out{};
  out.row_index = Vector<int32_t>(row_index, "row_index", kInt32, capacity, on);
  out.token = Vector<int32_t>(args.Tensor("row_token"), "row_token", kInt32, capacity, on);
  out.k = Vector<int32_t>(args.Tensor("row_k"), "row_k", kInt32, capacity, on);
  out.inv_temp = Vector<float>(args.Tensor("inv_temp"), "inv_temp", kFloat32, capacity, on);
  out.row_offset =
      Vector<int32_t>(args.Tensor("offsets.row"), "offsets.row", kInt32, capacity + 1, on);
  out.topk_offset =
      Vector<int32_t>(args.Tensor("offsets.topk"), "offsets.topk", kInt32, capacity + 1, on);
  out.num_rows = Vector<int32_t>(args.Tensor("num_rows"), "num_rows", kInt32, 1, on);
  const auto row_top_p = args.OptionalTensor("row_top_p");
  out.top_p = OptionalVector<float>(row_top_p, "row_top_p", kFloat32, capacity, on);
  const tvm::ffi::CUDADeviceGuard guard(on.device_id);
  Raise("plan", cuda::Plan(in, out, StreamOf(on)));
}

// Reads n_accepted, token, offsets.row, offsets.topk, num_rows?, logprob, rank, topk_token,
// topk_logprob, packed.
void RunPack(ArgumentReader args) {
  const TensorView n_accepted = args.Tensor("n_accepted");
  RequireCuda(n_accepted, "n_accepted");
  const DLDevice on = n_accepted.device();
  const TensorView token = args.Tensor("token");
  cuda::ColumnsInput in{};
  in.batch = n_accepted.numel();
  in.rows = token.numel();
  in.n_accepted = Vector<const int32_t>(n_accepted, "n_accepted", kInt32, in.batch, on);
  in.token = Vector<const int32_t>(token, "token", kInt32, in.rows, on);
  in.row_offset =
      Vector<const int32_t>(args.Tensor("offsets.row"), "offsets.row", kInt32, in.rows + 1, on);
  in.topk_offset =
      Vector<const int32_t>(args.Tensor("offsets.topk"), "offsets.topk", kInt32, in.rows + 1, on);
  const auto num_rows = args.OptionalTensor("num_rows");
  in.num_rows = OptionalVector<const int32_t>(num_rows, "num_rows", kInt32, 1, on);
  in.columns.logprob = Output<float>(args.Tensor("logprob"), "logprob", kFloat32, 0, on);
  in.columns.rank = Output<int32_t>(args.Tensor("rank"), "rank", kInt32, 0, on);
  in.columns.topk_token = Output<int32_t>(args.Tensor("topk_token"), "topk_token", kInt32, 0, on);
  in.columns.topk_logprob =
      Output<float>(args.Tensor("topk_logprob"), "topk_logprob", kFloat32, 0, on);
  const TensorView packed = args.Tensor("packed");
  int32_t* words = Output<int32_t>(packed, "packed", kInt32, 4, on);
  const tvm::ffi::CUDADeviceGuard guard(on.device_id);
  Raise("pack", cuda::Pack(in, words, packed.numel(), StreamOf(on)));
}

cuda::LogitType LogitTypeOnCuda(const TensorView& logits) {
  switch (LogitTypeOf(logits)) {
    case cpu::LogitType::kFloat32:
      return cuda::LogitType::kFloat32;
    case cpu::LogitType::kFloat16:
      return cuda::LogitType::kFloat16;
    default:
      return cuda::LogitType::kBFloat16;
  }
}

// Reads logits, token, k, row_index?, inv_temp?, offsets.row, offsets.topk, num_rows?, top_p,
// logprob, topk_token, topk_logprob.
void RunNormaliseTopP(ArgumentReader args) {
  const TensorView logits = args.Tensor("logits");
  RequireCuda(logits, "logits");
  const DLDevice on = logits.device();
  CheckLogits(logits);
  const TensorView token = args.Tensor("token"), k = args.Tensor("k");
  const auto row_index = args.OptionalTensor("row_index");
  const auto inv_temp = args.OptionalTensor("inv_temp");
  const int64_t rows = token.numel();
  cuda::LogprobInput in{};
  in.logits = Checked(logits, "logits").Data<const void>();
  in.type = LogitTypeOnCuda(logits);
  in.row_stride = logits.stride(0);
  in.vocab = logits.size(1);
  in.rows = rows;
  in.token = Vector<const int32_t>(token, "token", kInt32, rows, on);
  in.k = Vector<const int32_t>(k, "k", kInt32, rows, on);
  in.row_index = OptionalVector<const int32_t>(row_index, "row_index", kInt32, rows, on);
  in.inv_temp = OptionalVector<const float>(inv_temp, "inv_temp", kFloat32, rows, on);
  in.row_offset =
      Vector<const int32_t>(args.Tensor("offsets.row"), "offsets.row", kInt32, rows + 1, on);
  in.topk_offset =
      Vector<const int32_t>(args.Tensor("offsets.topk"), "offsets.topk", kInt32, rows + 1, on);
  const auto num_rows = args.OptionalTensor("num_rows");
  in.num_rows = OptionalVector<const int32_t>(num_rows, "num_rows", kInt32, 1, on);
  const float* top_p = Vector<const float>(args.Tensor("top_p"), "top_p", kFloat32, rows, on);
  cuda::LogprobOutput out{};
  out.logprob = Output<float>(args.Tensor("logprob"), "logprob", kFloat32, 0, on);
  out.topk_token = Output<int32_t>(args.Tensor("topk_token"), "topk_token", kInt32, 0, on);
  out.topk_logprob = Output<float>(args.Tensor("topk_logprob"), "topk_logprob", kFloat32, 0, on);
  const tvm::ffi::CUDADeviceGuard guard(on.device_id);
  Raise("normalise_top_p", cuda::NormaliseTopP(in, out, top_p, StreamOf(on)));
}

}  // namespace
}  // namespace baton_ops

BATON_EXPORT_CUDA(cuda_verify_greedy, 6, RunVerifyGreedyOnCuda)
BATON_EXPORT_CUDA(cuda_verify_sampled, 9, RunVerifySampledOnCuda)
BATON_EXPORT_CUDA(cuda_plan, 15, RunPlan)
BATON_EXPORT_CUDA(cuda_pack, 10, RunPack)
BATON_EXPORT_CUDA(cuda_normalise_top_p, 12, RunNormaliseTopP)
