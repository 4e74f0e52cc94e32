// What the CUDA runtime tells of the device, and no more: a GPU of a kind that a test sets.
#ifndef BATON_TESTS_CUDA_ON_HOST_GPU_H_
#define BATON_TESTS_CUDA_ON_HOST_GPU_H_

// Instead of the whole runtime.
#define BATON_TESTS_CUDA_ON_HOST_CUDA_RUNTIME_H_

enum cudaError_t { cudaSuccess };
enum cudaDeviceAttr {
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrComputeCapabilityMinor,
  cudaDevAttrMultiProcessorCount,
};

namespace host_cuda {
struct Gpu {
  int of[3];  // by cudaDeviceAttr
};
inline Gpu gpu{{9, 0, 132}};
}  // namespace host_cuda

inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = host_cuda::gpu.of[attribute];
  return cudaSuccess;
}

#endif  // BATON_TESTS_CUDA_ON_HOST_GPU_H_
