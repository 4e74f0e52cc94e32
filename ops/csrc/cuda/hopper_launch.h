// How the host launches kernels for Hopper, and describes matrices to the copy engine. For .cu
// files only.
#ifndef BATON_OPS_CSRC_CUDA_HOPPER_LAUNCH_H_
#define BATON_OPS_CSRC_CUDA_HOPPER_LAUNCH_H_

#include <cuda.h>
#include <cuda_runtime.h>

#include <atomic>

#include "early_launch.h"
#include "tensor_map.h"

namespace baton_ops::cuda {

struct HopperGrid {
  int blocks;
  int threads;
  int shared_bytes;
};

// Once for a kernel and device: more than 48 KiB of shared memory must be asked for, the most that
// it is launched with. Besides, all that a multiprocessor has is for shared memory: else it may
// have as much as one block needs, and the next kernel's wait until it is idle.
template <auto kKernel>
Error AllowSharedMemory(int bytes) {
  constexpr int kDevices = 64;
  static std::atomic<bool> is_allowed[kDevices];
  int device = 0;
  if (const Error error = ErrorOf(cudaGetDevice(&device))) return error;
  if (device < kDevices && is_allowed[device].load(std::memory_order_relaxed)) return nullptr;
  if (const Error error =
          ErrorOf(cudaFuncSetAttribute(kKernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                       cudaSharedmemCarveoutMaxShared))) {
    return error;
  }
  const Error error =
      ErrorOf(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  if (!error && device < kDevices) is_allowed[device].store(true, std::memory_order_relaxed);
  return error;
}

// Launches a kernel whose every block waits for earlier grids before it ends: its blocks may become
// resident while the kernel before it still drains.
template <auto kKernel, class... Arguments>
Error LaunchOnHopper(const HopperGrid& grid, Stream stream, const Arguments&... arguments) {
  if (const Error error = AllowSharedMemory<kKernel>(grid.shared_bytes)) return error;
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(grid.blocks);
  config.blockDim = dim3(grid.threads);
  config.dynamicSmemBytes = grid.shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &early;
  config.numAttrs = 1;
  return ErrorOf(cudaLaunchKernelEx(&config, kKernel, arguments...));
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_CSRC_CUDA_HOPPER_LAUNCH_H_
