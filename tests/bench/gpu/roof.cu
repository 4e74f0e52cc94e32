// How fast memory can be read, and copied, by kernels that do nothing else.
#include <cuda_runtime.h>

#include <cstdint>

namespace {

constexpr int kThreads = 512, kAtOnce = 8;

__global__ __launch_bounds__(kThreads) void read(const uint4* from, size_t n, uint32_t* out) {
  uint32_t bits = 0;
  const size_t step = static_cast<size_t>(gridDim.x) * kThreads * kAtOnce;
  for (size_t i = blockIdx.x * static_cast<size_t>(kThreads * kAtOnce) + threadIdx.x; i < n;
       i += step) {
    uint4 got[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      got[j] = i + j * kThreads < n ? __ldcs(from + i + j * kThreads) : uint4{};
    }
#pragma unroll
    for (const uint4& x : got) bits |= x.x ^ x.y ^ x.z ^ x.w;
  }
  if (bits == 0x12345678u) *out = bits;  // unlikely, which the compiler does not know
}

__global__ __launch_bounds__(kThreads) void copy(const uint4* from, size_t n, uint4* to) {
  const size_t step = static_cast<size_t>(gridDim.x) * kThreads * kAtOnce;
  for (size_t i = blockIdx.x * static_cast<size_t>(kThreads * kAtOnce) + threadIdx.x; i < n;
       i += step) {
    uint4 got[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (i + j * kThreads < n) got[j] = __ldcs(from + i + j * kThreads);
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (i + j * kThreads < n) __stcs(to + i + j * kThreads, got[j]);
    }
  }
}

}  // namespace

// Both take a number of 16-byte pieces, and run as many programs as they are told.
extern "C" int read_all(const void* from, void* out, int pieces, int programs, void* stream) {
  read<<<programs, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      static_cast<const uint4*>(from), pieces, static_cast<uint32_t*>(out));
  return cudaGetLastError();
}

extern "C" int copy_all(const void* from, void* to, int pieces, int programs, void* stream) {
  copy<<<programs, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      static_cast<const uint4*>(from), pieces, static_cast<uint4*>(to));
  return cudaGetLastError();
}
