#include <cuda_runtime.h>

#include <algorithm>

#include "baton_ops/finish_kernel.cuh"
#include "baton_ops/scan_kernel.cuh"
#include "baton_ops/top_p.cuh"
#include "launch.h"

namespace baton_ops::cuda {
namespace {

constexpr size_t kAlignment = 256;
int64_t ElementBytes(LogitType type) { return type == LogitType::kFloat32 ? 4 : 2; }

int64_t DivideUp(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t Parts(LogitType type, int64_t vocab) {
  return DivideUp(vocab * ElementBytes(type), kPartBytes);
}

struct Device {
  int multiprocessors = 0;
  int capability = 0;  // the major number
  Error error = nullptr;
};

Error ErrorOf(cudaError_t status) {
  return status == cudaSuccess ? nullptr : cudaGetErrorString(status);
}

Device CurrentDevice() {
  int id = 0;
  Device device;
  device.error = ErrorOf(cudaGetDevice(&id));
  if (device.error) return device;
  device.error =
      ErrorOf(cudaDeviceGetAttribute(&device.multiprocessors, cudaDevAttrMultiProcessorCount, id));
  if (device.error) return device;
  device.error =
      ErrorOf(cudaDeviceGetAttribute(&device.capability, cudaDevAttrComputeCapabilityMajor, id));
  return device;
}

// Launches a kernel that calls WaitForEarlierGrids: its blocks may become resident early.
Error Launch(void (*kernel)(LogprobParams), const Device& device, dim3 blocks, unsigned threads,
             const LogprobParams& params, cudaStream_t stream) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = dim3(threads);
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = device.capability >= 9 ? 1 : 0;
  return ErrorOf(cudaLaunchKernelEx(&config, kernel, params));
}

Error PlaceWorkspace(const LogprobInput& in, const Workspace& workspace, LogprobParams* p) {
  if (reinterpret_cast<uintptr_t>(workspace.data) % kAlignment != 0) {
    return "workspace must be 256-byte aligned";
  }
  if (workspace.bytes < LogprobWorkspaceBytes(in.type, in.rows, in.vocab)) {
    return "workspace is too small for logits and token";
  }
  p->records = static_cast<PartRecord*>(workspace.data);
  return nullptr;
}

LogprobParams ParamsOf(const LogprobInput& in, const LogprobOutput& out) {
  LogprobParams p{};
  p.logits = static_cast<const char*>(in.logits);
  p.row_bytes = in.row_stride * ElementBytes(in.type);
  p.vocab = static_cast<int32_t>(in.vocab);
  p.rows = static_cast<int32_t>(in.rows);
  p.token = in.token;
  p.k = in.k;
  p.row_index = in.row_index;
  p.inv_temp = in.inv_temp;
  p.num_rows = in.num_rows;
  p.row_offset = in.row_offset;
  p.topk_offset = in.topk_offset;
  p.rank_mode = in.rank_mode;
  p.logprob = out.logprob;
  p.rank = out.rank;
  p.topk_token = out.topk_token;
  p.topk_logprob = out.topk_logprob;
  p.parts = static_cast<int32_t>(Parts(in.type, in.vocab));
  p.groups = static_cast<int32_t>(DivideUp(in.vocab, kGroupLogits));
  p.span = static_cast<int32_t>(DivideUp(p.groups, kMaxSpans));
  p.padding = static_cast<int32_t>(p.parts * (kPartBytes / ElementBytes(in.type)) - in.vocab);
  return p;
}

// More blocks than are resident at once even out what their rows take. But those that find no row
// to scan, because the device counts fewer, cost time too.
constexpr int64_t kBlocksPerResident = 5;
constexpr int64_t kMostGridRows = 65535;

// Each block of a column gets the same number of rows, or one less.
dim3 ScanBlocks(const LogprobParams& p, const Device& device) {
  const int64_t columns = DivideUp(p.parts, kScanWarps);
  const int64_t most = device.multiprocessors * kScanBlocksPerSm * kBlocksPerResident;
  const int64_t rows_per_block = DivideUp(columns * p.rows, most);
  const int64_t rows = std::min(DivideUp(p.rows, rows_per_block), kMostGridRows);
  return dim3(static_cast<unsigned>(columns), static_cast<unsigned>(rows));
}

template <class E>
Error LaunchFor(const LogprobParams& p, cudaStream_t stream) {
  const Device device = CurrentDevice();
  if (device.error) return device.error;
  const dim3 blocks = ScanBlocks(p, device);
  const auto scan = p.row_index ? ScanKernel<E, true> : ScanKernel<E, false>;
  if (const Error error = Launch(scan, device, blocks, kScanThreads, p, stream)) return error;
  return Launch(FinishKernel<E>, device, dim3(p.rows), kFinishThreads, p, stream);
}

}  // namespace

size_t LogprobWorkspaceBytes(LogitType type, int64_t rows, int64_t vocab) {
  const size_t bytes = std::max<int64_t>(rows, 1) * Parts(type, vocab) * sizeof(PartRecord);
  return DivideUp(bytes, kAlignment) * kAlignment;
}

Error Logprobs(const LogprobInput& input, const LogprobOutput& output, const Workspace& workspace,
               Stream stream) {
  if (input.rows == 0 || input.vocab == 0) return nullptr;
  LogprobParams p = ParamsOf(input, output);
  if (const Error error = PlaceWorkspace(input, workspace, &p)) return error;
  switch (input.type) {
    case LogitType::kFloat32:
      return LaunchFor<Float32>(p, static_cast<cudaStream_t>(stream));
    case LogitType::kBFloat16:
      return LaunchFor<BFloat16>(p, static_cast<cudaStream_t>(stream));
    case LogitType::kFloat16:
      return LaunchFor<Float16>(p, static_cast<cudaStream_t>(stream));
  }
  return "logits have an unknown type";
}

Error NormaliseTopP(const LogprobInput& input, const LogprobOutput& output, const float* top_p,
                    Stream stream) {
  if (input.rows == 0 || input.vocab == 0) return nullptr;
  const LogprobParams p = ParamsOf(input, output);
  const auto blocks = static_cast<unsigned>(input.rows);
  const auto on = static_cast<cudaStream_t>(stream);
  switch (input.type) {
    case LogitType::kFloat32:
      TopPKernel<Float32><<<blocks, kTopPThreads, 0, on>>>(p, top_p);
      break;
    case LogitType::kBFloat16:
      TopPKernel<BFloat16><<<blocks, kTopPThreads, 0, on>>>(p, top_p);
      break;
    case LogitType::kFloat16:
      TopPKernel<Float16><<<blocks, kTopPThreads, 0, on>>>(p, top_p);
      break;
  }
  return ErrorOf(cudaGetLastError());
}

}  // namespace baton_ops::cuda
