#include "logprob_run.h"

#include <tvm/ffi/error.h>

#include <algorithm>

#include "baton_ops/cpu/logprobs.h"
#include "logprob_arguments.h"

#ifdef BATON_OPS_CUDA
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/extra/cuda/device_guard.h>

#include "cuda/launch.h"
#endif

namespace baton_ops {
namespace {

void CheckInvTemp(const float* inv_temp, int64_t t) {
  if (inv_temp[t] > 0) return;
  TVM_FFI_THROW(ValueError) << "inv_temp[" << t << "] must be above 0, got " << inv_temp[t];
}

// Without an index, token t belongs to row t.
void CheckRowCount(const cpu::LogprobInput& in, int64_t logits_rows) {
  if (!in.row_index && in.rows > logits_rows) {
    TVM_FFI_THROW(ValueError) << "token has " << in.rows << " rows but logits.shape[0] is "
                              << logits_rows << "; pass row_index to gather";
  }
}

void CheckRows(const cpu::LogprobInput& in, int64_t logits_rows) {
  for (int64_t t = 0; t < in.rows; ++t) {
    CheckRange("k", t, in.k[t], -1, kMaxTopK);
    if (in.k[t] < 0) continue;
    if (in.k[t] > in.vocab) {
      TVM_FFI_THROW(ValueError) << "k[" << t << "] must be at most V = " << in.vocab << ", got "
                                << in.k[t];
    }
    CheckRange("token", t, in.token[t], 0, in.vocab - 1);
    if (in.row_index) CheckRange("row_index", t, in.row_index[t], 0, logits_rows - 1);
    if (in.inv_temp) CheckInvTemp(in.inv_temp, t);
  }
}

// The offsets are what keeps writes inside the outputs, so they are not taken on trust.
void CheckOffsets(const cpu::LogprobInput& in, const cpu::LogprobOutput& out) {
  int64_t row = 0;
  int64_t topk = 0;
  for (int64_t t = 0; t <= in.rows; ++t) {
    CheckRange("offsets.row", t, out.row_offset[t], row, row);
    CheckRange("offsets.topk", t, out.topk_offset[t], topk, topk);
    if (t == in.rows) break;
    row += in.k[t] >= 0;
    topk += std::max(in.k[t], 0);
  }
}

void RunOnCpu(const LogprobArguments& a) {
  cpu::LogprobInput in = InputOf(a);
  if (const int32_t* num_rows = NumRowsOf(a)) {
    CheckRange("num_rows", 0, *num_rows, 0, in.rows);
    in.rows = *num_rows;
  }
  CheckRowCount(in, a.logits.size(0));
  CheckRows(in, a.logits.size(0));
  const cpu::LogprobOutput places = OutputOf(a, 0, 0);
  CheckOffsets(in, places);
  const cpu::LogprobOutput out =
      OutputOf(a, places.row_offset[in.rows], places.topk_offset[in.rows]);
  cpu::Logprobs(in, out);
}

#ifdef BATON_OPS_CUDA

cuda::LogitType CudaLogitTypeOf(const TensorView& logits) {
  switch (LogitTypeOf(logits)) {
    case cpu::LogitType::kFloat32:
      return cuda::LogitType::kFloat32;
    case cpu::LogitType::kBFloat16:
      return cuda::LogitType::kBFloat16;
    default:
      return cuda::LogitType::kFloat16;
  }
}

cuda::Workspace WorkspaceOf(const LogprobArguments& a) {
  if (!a.workspace) TVM_FFI_THROW(ValueError) << "workspace must be given for CUDA tensors";
  const Checked checked(*a.workspace, "workspace");
  checked.HasDtype(kUInt8).HasRank(1).IsContiguous().IsOn(a.logits.device());
  checked.HasSizeAtLeast(0, LogprobsWorkspaceBytes(a.logits, a.token.size(0)));
  return {checked.Data<void>(), static_cast<size_t>(a.workspace->size(0))};
}

// Values stay on the device: the kernel reads them, the host only knows shapes.
void RunOnCuda(const LogprobArguments& a) {
  const DLDevice device = a.logits.device();
  const cpu::LogprobInput in = InputOf(a);
  CheckRowCount(in, a.logits.size(0));
  const cpu::LogprobOutput out = OutputOf(a, 0, 0);
  const cuda::LogprobInput device_in{in.logits,      CudaLogitTypeOf(a.logits),
                                     in.row_stride,  in.vocab,
                                     in.rows,        in.token,
                                     in.k,           in.row_index,
                                     in.inv_temp,    NumRowsOf(a),
                                     out.row_offset, out.topk_offset,
                                     in.rank_mode};
  const cuda::LogprobOutput device_out{out.logprob, out.rank, out.topk_token, out.topk_logprob};
  const tvm::ffi::CUDADeviceGuard guard(device.device_id);
  void* stream = TVMFFIEnvGetStream(device.device_type, device.device_id);
  if (const cuda::Error error = cuda::Logprobs(device_in, device_out, WorkspaceOf(a), stream)) {
    TVM_FFI_THROW(RuntimeError) << "logprobs failed on CUDA device " << device.device_id << ": "
                                << error;
  }
}

#else

void RunOnCuda(const LogprobArguments&) {
  TVM_FFI_THROW(RuntimeError)
      << "logits is on a CUDA device, but this build of baton_ops has no CUDA kernels";
}

#endif  // BATON_OPS_CUDA

}  // namespace

void RunLogprobs(ArgumentReader args) {
  const LogprobArguments a(&args);
  CheckLogits(a.logits);
  switch (a.logits.device().device_type) {
    case kDLCPU:
      return RunOnCpu(a);
    case kDLCUDA:
      return RunOnCuda(a);
    default:
      TVM_FFI_THROW(ValueError) << "logits must be on the CPU or a CUDA device, got device type "
                                << a.logits.device().device_type;
  }
}

int64_t LogprobsWorkspaceBytes(TensorView logits, [[maybe_unused]] int64_t rows) {
  CheckLogits(logits);
#ifdef BATON_OPS_CUDA
  if (logits.device().device_type == kDLCUDA) {
    return cuda::LogprobWorkspaceBytes(CudaLogitTypeOf(logits), rows, logits.size(1));
  }
#endif
  return 0;
}

}  // namespace baton_ops
