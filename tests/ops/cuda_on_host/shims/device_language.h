// The part of CUDA C++ that kernels under test use, over fibers: what is included before anything
// else. Keywords that need more than a macro are rewritten beforehand, see
// baton_testing/host_cuda.py.
#ifndef BATON_TESTS_CUDA_ON_HOST_DEVICE_LANGUAGE_H_
#define BATON_TESTS_CUDA_ON_HOST_DEVICE_LANGUAGE_H_

#include <math.h>

#include <type_traits>

#include "fibers.h"
#include "late.h"

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __syncthreads() host_cuda::SyncThreads(__FILE__, __LINE__)
#define __syncthreads_count(p) host_cuda::SyncThreadsCount(p, __LINE__)
#define __syncthreads_or(p) (host_cuda::SyncThreadsCount(p, __LINE__) != 0)
#define __syncwarp(...) host_cuda::Meet(host_cuda::MyWarp().meeting, __LINE__)
#define __shfl_sync(mask, v, lane) host_cuda::Shuffle(mask, v, lane, __LINE__)
#define __shfl_xor_sync(mask, v, d) host_cuda::Shuffle(mask, v, host_cuda::Lane() ^ (d), __LINE__)
#define __shfl_down_sync(mask, v, d) host_cuda::Shuffle(mask, v, host_cuda::LaneBehind(d), __LINE__)
#define __shfl_up_sync(mask, v, d) host_cuda::Shuffle(mask, v, host_cuda::LaneBefore(d), __LINE__)
#define __ballot_sync(mask, p) host_cuda::Ballot(mask, p, __LINE__)
#define __all_sync(mask, p) (host_cuda::Ballot(mask, p, __LINE__) == 0xffffffffu)
#define __reduce_add_sync(mask, v) \
  host_cuda::Reduce(mask, v, [](auto a, auto b) { return a + b; }, __LINE__)
#define __reduce_max_sync(mask, v) \
  host_cuda::Reduce(mask, v, [](auto a, auto b) { return a > b ? a : b; }, __LINE__)
#define __reduce_min_sync(mask, v) \
  host_cuda::Reduce(mask, v, [](auto a, auto b) { return a < b ? a : b; }, __LINE__)

namespace host_cuda {

inline bool IsSkipped(const char* file, int line) {
  const char* slash = strrchr(file, '/');
  const char* name = slash == nullptr ? file : slash + 1;
  return line == settings.skipped_line && strcmp(name, settings.skipped_file) == 0;
}

inline void SyncThreads(const char* file, int line) {
  if (!IsSkipped(file, line)) Meet(MyBlock().meeting, line);
}

inline int SyncThreadsCount(bool holds, int line) {
  Meeting& meeting = MyBlock().meeting;
  const unsigned turn = meeting.turn % 2;
  meeting.count[turn] += holds;
  Meet(meeting, line);
  return static_cast<int>(MyBlock().meeting.count[turn]);
}

inline unsigned Lane() { return Me().thread % kWarpThreads; }
inline unsigned LaneBefore(unsigned d) { return Lane() < d ? Lane() : Lane() - d; }
inline unsigned LaneBehind(unsigned d) { return Lane() + d > 31 ? Lane() : Lane() + d; }

// All lanes put a value; returns the lanes' values, which stay until all have met again.
template <class T>
inline const uint64_t* Exchange(unsigned mask, T value, int line) {
  static_assert(sizeof(T) <= 8);
  Warp& warp = MyWarp();
  if (mask != 0xffffffffu) Fail("a part of a warp meets", line);
  if (warp.meeting.members != kWarpThreads) Fail("a warp meets without those that ended", line);
  uint64_t* values = warp.value[warp.meeting.turn % 2];
  values[Lane()] = 0;
  memcpy(&values[Lane()], &value, sizeof(T));
  Meet(warp.meeting, line);
  return values;
}

template <class T>
inline T Shuffle(unsigned mask, T value, unsigned lane, int line) {
  memcpy(&value, &Exchange(mask, value, line)[lane % kWarpThreads], sizeof(T));
  return value;
}

inline unsigned Ballot(unsigned mask, bool holds, int line) {
  const uint64_t* values = Exchange(mask, holds, line);
  unsigned bits = 0;
  for (unsigned lane = 0; lane < kWarpThreads; ++lane) bits |= unsigned(values[lane] != 0) << lane;
  return bits;
}

template <class T, class Function>
inline T Reduce(unsigned mask, T value, Function f, int line) {
  static_assert(std::is_integral_v<T> && sizeof(T) == 4);
  const uint64_t* values = Exchange(mask, value, line);
  value = static_cast<T>(values[0]);
  for (unsigned i = 1; i < kWarpThreads; ++i) value = f(value, static_cast<T>(values[i]));
  return value;
}

inline char* MyShared() { return &cluster.shared[Me().block * kSharedBytes]; }

template <class T>
T* DynamicShared() {
  return reinterpret_cast<T*>(MyShared());
}

// The block's variable of this number, poisoned where nobody has written to it.
template <class T>
T& Shared(int number) {
  Block& block = MyBlock();
  for (const auto& [known, at] : block.places) {
    if (known == number) return *reinterpret_cast<T*>(MyShared() + at);
  }
  const size_t at = block.shared_used;
  block.shared_used += (sizeof(T) + 15) / 16 * 16;
  if (block.shared_used > kMostShared) Fail("more shared memory than a block has", number);
  block.places.emplace_back(number, at);
  return *reinterpret_cast<T*>(MyShared() + at);
}

inline void CheckBounds(unsigned most, unsigned = 0) {
  if (blockDim.x > most) Fail("a block has more threads than its launch bounds", int(most));
}

// What stands for the instructions that kernels write as such.
inline uint32_t ClusterRank() { return Me().block; }
inline void ClusterSync(int line) { Meet(cluster.meeting, line); }
inline uint32_t ClusterPlace(uint32_t here, uint32_t rank) {
  if (rank >= cluster.blocks.size()) Fail("no block of this rank is in the cluster", int(rank));
  return static_cast<uint32_t>(here % kSharedBytes + rank * kSharedBytes);
}
// Shared memory of a block of the cluster, which must be there.
inline char* ClusterMemory(uint32_t at) {
  Linger();
  const Block& block = cluster.blocks[at / kSharedBytes];
  if (!block.has_begun) Fail("a block's memory before it has begun", int(at / kSharedBytes));
  if (block.has_ended) Fail("a block's memory behind its end", int(at / kSharedBytes));
  return &cluster.shared[at];
}
template <class T>
inline T ClusterLoad(uint32_t at) {
  T value;
  memcpy(&value, ClusterMemory(at), sizeof(T));
  return value;
}
inline void ClusterStore(uint32_t at, float value) {
  memcpy(ClusterMemory(at), &value, sizeof value);
}
inline float MaxOrNan(float a, float b) { return a != a || b != b ? NAN : a > b ? a : b; }
inline float Reciprocal(float x) { return 1.0f / x; }
inline void Prefetch(const void*) {}
inline void WaitForGrids() {
  Untouched* const untouched = Untouched::current;
  if (untouched != nullptr && !untouched->Holds()) Fail("writes before it waited", 0);
  Me().waited_for_grids = true;
}
inline void LetGridsStart() {
  if (!Me().waited_for_grids) Fail("lets grids start before it waited for those before", 0);
}

}  // namespace host_cuda

struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(8) int2 {
  int x, y;
};
inline int2 make_int2(int x, int y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

template <class A, class B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  return static_cast<T>(b) < static_cast<T>(a) ? static_cast<T>(b) : static_cast<T>(a);
}
template <class A, class B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a);
}

template <class To, class From>
inline To host_cuda_bits(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To bits;
  memcpy(&bits, &value, sizeof(To));
  return bits;
}

inline int __ffs(uint32_t x) { return __builtin_ffs(static_cast<int>(x)); }
inline int __clz(uint32_t x) { return x == 0 ? 32 : __builtin_clz(x); }
inline uint32_t __vcmpne4(uint32_t a, uint32_t b) {
  uint32_t bytes = 0;
  for (uint32_t byte = 0xff; byte != 0; byte <<= 8) bytes |= ((a ^ b) & byte) != 0 ? byte : 0;
  return bytes;
}
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline uint32_t __float_as_uint(float x) { return host_cuda_bits<uint32_t>(x); }
inline float __uint_as_float(uint32_t x) { return host_cuda_bits<float>(x); }
inline double __longlong_as_double(uint64_t x) { return host_cuda_bits<double>(x); }
inline uint64_t __double_as_longlong(double x) { return host_cuda_bits<uint64_t>(x); }
inline double __hiloint2double(int high, int low) {
  return __longlong_as_double(static_cast<uint64_t>(static_cast<uint32_t>(high)) << 32 |
                              static_cast<uint32_t>(low));
}
// Nothing is contracted: the compiler is told so.
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frsqrt_rn(float a) { return static_cast<float>(1.0 / sqrt(static_cast<double>(a))); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }

template <class T>
inline T __ldcg(const T* at) {
  return *at;
}
template <class T>
inline T __ldg(const T* at) {
  return *at;
}
template <class T>
inline void __stcg(T* at, T value) {
  *at = value;
}
inline float __frcp_rn(float x) { return 1.0f / x; }
inline uint32_t __cvta_generic_to_shared(const void* p) {
  return static_cast<uint32_t>(static_cast<const char*>(p) - host_cuda::MyShared());
}
// No other thread runs meanwhile.
template <class T>
inline T atomicAdd(T* at, std::common_type_t<T> value) {
  host_cuda::Linger();
  const T before = *at;
  *at = before + value;
  host_cuda::Tell();
  host_cuda::Linger();
  return before;
}
namespace host_cuda {
inline int AddInOrder(int* at, int value) { return atomicAdd(at, value); }
}  // namespace host_cuda
inline int atomicMax(int* at, int value) {
  const int before = *at;
  *at = max(before, value);
  return before;
}

inline unsigned atomicMax(unsigned* at, unsigned value) {
  const unsigned before = *at;
  *at = max(before, value);
  return before;
}

#endif  // BATON_TESTS_CUDA_ON_HOST_DEVICE_LANGUAGE_H_
