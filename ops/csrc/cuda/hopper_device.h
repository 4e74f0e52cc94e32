// Whether the current device is one for Hopper's kernels, and what they ask of memory.
#ifndef BATON_OPS_CSRC_CUDA_HOPPER_DEVICE_H_
#define BATON_OPS_CSRC_CUDA_HOPPER_DEVICE_H_

#include <cuda_runtime.h>

#include <cstdint>

namespace baton_ops::cuda {

struct HopperDevice {
  bool is_there = false;
  int processors = 0;
};

inline HopperDevice CurrentHopper() {
  int id = 0, major = 0, minor = 0;
  HopperDevice device;
  if (cudaGetDevice(&id) != cudaSuccess) return device;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, id);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, id);
  cudaDeviceGetAttribute(&device.processors, cudaDevAttrMultiProcessorCount, id);
  device.is_there = major == 9 && minor == 0;
  return device;
}

// What the copy engine asks of an address.
inline bool IsOnVector(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_CSRC_CUDA_HOPPER_DEVICE_H_
