// How a kernel that calls WaitForEarlierGrids is launched: its blocks may become resident while the
// kernel before it still drains. For .cu files only.
#ifndef BATON_OPS_CSRC_CUDA_EARLY_LAUNCH_H_
#define BATON_OPS_CSRC_CUDA_EARLY_LAUNCH_H_

#include <cuda_runtime.h>

#include "launch.h"

namespace baton_ops::cuda {

inline Error ErrorOf(cudaError_t status) {
  return status == cudaSuccess ? nullptr : cudaGetErrorString(status);
}

template <class T>
constexpr T DivideUp(T a, T b) {
  return (a + b - 1) / b;
}

// The current device's major compute capability, or -1.
inline int Capability() {
  int id = 0, major = 0;
  if (cudaGetDevice(&id) != cudaSuccess) return -1;
  if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, id) != cudaSuccess) {
    return -1;
  }
  return major;
}

// The most shared memory that a block may ask for on the current device: 227 KiB on Hopper GPUs and
// Blackwell's for servers, but 99 on others.
inline size_t MostSharedBytes() {
  int id = 0, bytes = 0;
  if (cudaGetDevice(&id) != cudaSuccess) return 0;
  cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, id);
  return static_cast<size_t>(bytes);
}

struct Grid {
  dim3 blocks;
  unsigned threads;
  size_t shared_bytes = 0;
};

// Every block of `kernel` must call WaitForEarlierGrids before it reads what the kernel before it
// writes, before it writes anything, and before it ends: what comes after it relies on that.
template <class... Parameters, class... Arguments>
Error LaunchEarly(void (*kernel)(Parameters...), const Grid& grid, Stream stream,
                  const Arguments&... arguments) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid.blocks;
  config.blockDim = dim3(grid.threads);
  config.dynamicSmemBytes = grid.shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &early;
  config.numAttrs = Capability() >= 9 ? 1 : 0;
  return ErrorOf(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...));
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_CSRC_CUDA_EARLY_LAUNCH_H_
