#include "logprob_arguments.h"

#include <tvm/ffi/dtype.h>
#include <tvm/ffi/error.h>

#include <limits>

namespace baton_ops {
namespace {

RankMode RankModeOf(int64_t mode) {
  if (mode != 0 && mode != 1) {
    TVM_FFI_THROW(ValueError) << "rank_mode must be 0 (AT_LEAST) or 1 (ABOVE_PLUS_ONE), got "
                              << mode;
  }
  return static_cast<RankMode>(mode);
}

}  // namespace

// Members are initialised in the order of their declaration, which is that of the arguments.
LogprobArguments::LogprobArguments(ArgumentReader* args)
    : logits(args->Tensor("logits")),
      token(args->Tensor("token")),
      k(args->Tensor("k")),
      row_index(args->OptionalTensor("row_index")),
      inv_temp(args->OptionalTensor("inv_temp")),
      row_offset(args->Tensor("offsets.row")),
      topk_offset(args->Tensor("offsets.topk")),
      num_rows(args->OptionalTensor("num_rows")),
      rank_mode(args->Int("rank_mode")),
      workspace(args->OptionalTensor("workspace")),
      logprob(args->Tensor("out.logprob")),
      rank(args->Tensor("out.rank")),
      topk_token(args->Tensor("out.topk_token")),
      topk_logprob(args->Tensor("out.topk_logprob")) {}

cpu::LogitType LogitTypeOf(const TensorView& logits) {
  const DLDataType dtype = logits.dtype();
  const bool scalar = dtype.lanes == 1;
  if (scalar && dtype.code == kDLFloat && dtype.bits == 32) return cpu::LogitType::kFloat32;
  if (scalar && dtype.code == kDLFloat && dtype.bits == 16) return cpu::LogitType::kFloat16;
  if (scalar && dtype.code == kDLBfloat && dtype.bits == 16) return cpu::LogitType::kBFloat16;
  TVM_FFI_THROW(TypeError) << "logits must be float32, float16 or bfloat16, got "
                           << tvm::ffi::DLDataTypeToString(dtype);
}

void CheckLogits(const TensorView& logits) {
  Checked(logits, "logits").HasRank(2).HasDenseRows();
  if (logits.size(1) > std::numeric_limits<int32_t>::max()) {
    TVM_FFI_THROW(ValueError) << "logits.shape[1] must fit int32, got " << logits.size(1);
  }
}

cpu::LogprobInput InputOf(const LogprobArguments& a) {
  const DLDevice device = a.logits.device();
  Checked(a.token, "token").HasRank(1);
  const int64_t rows = a.token.size(0);
  cpu::LogprobInput in{};
  in.logits = Checked(a.logits, "logits").Data<const void>();
  in.type = LogitTypeOf(a.logits);
  in.row_stride = a.logits.stride(0);
  in.vocab = a.logits.size(1);
  in.rows = rows;
  in.token = Vector<const int32_t>(a.token, "token", kInt32, rows, device);
  in.k = Vector<const int32_t>(a.k, "k", kInt32, rows, device);
  in.row_index = OptionalVector<const int32_t>(a.row_index, "row_index", kInt32, rows, device);
  in.inv_temp = OptionalVector<const float>(a.inv_temp, "inv_temp", kFloat32, rows, device);
  in.rank_mode = RankModeOf(a.rank_mode);
  return in;
}

cpu::LogprobOutput OutputOf(const LogprobArguments& a, int64_t rows, int64_t topk) {
  const DLDevice device = a.logits.device();
  const int64_t places = a.token.size(0) + 1;
  cpu::LogprobOutput out{};
  out.row_offset = Vector<const int32_t>(a.row_offset, "offsets.row", kInt32, places, device);
  out.topk_offset = Vector<const int32_t>(a.topk_offset, "offsets.topk", kInt32, places, device);
  out.logprob = Output<float>(a.logprob, "out.logprob", kFloat32, rows, device);
  out.rank = Output<int32_t>(a.rank, "out.rank", kInt32, rows, device);
  out.topk_token = Output<int32_t>(a.topk_token, "out.topk_token", kInt32, topk, device);
  out.topk_logprob = Output<float>(a.topk_logprob, "out.topk_logprob", kFloat32, topk, device);
  return out;
}

const int32_t* NumRowsOf(const LogprobArguments& a) {
  return OptionalVector<const int32_t>(a.num_rows, "num_rows", kInt32, 1, a.logits.device());
}

}  // namespace baton_ops
