// Stands for baton_ops/warp_mma.cuh: the same fragments, of lanes that are fibers. A copy is made
// when it is waited for, so that who reads before finds what was there.
#ifndef BATON_OPS_WARP_MMA_CUH_
#define BATON_OPS_WARP_MMA_CUH_

#include <cuda_bf16.h>

#include <cstring>
#include <map>
#include <vector>

#include "fibers.h"

namespace baton_ops::cuda {

inline float HalfOf(uint64_t word, int half) {
  const uint32_t bits = static_cast<uint32_t>(word >> 16 * half) << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t ElementOf(const uint64_t* rows, int matrix, int row, int column) {
  uint16_t bits;
  memcpy(&bits, reinterpret_cast<const char*>(rows[8 * matrix + row]) + 2 * column, sizeof bits);
  return bits;
}

inline void LoadMatrices(const void* row, uint32_t (&to)[4]) {
  const uint64_t* rows =
      host_cuda::Exchange(0xffffffffu, reinterpret_cast<uint64_t>(row), __LINE__);
  const int r = host_cuda::Lane() / 4, c = host_cuda::Lane() % 4;
  for (int i = 0; i < 4; ++i) {
    to[i] = ElementOf(rows, i, r, 2 * c) | ElementOf(rows, i, r, 2 * c + 1) << 16;
  }
}

inline void LoadTurnedMatrices(const void* row, uint32_t (&to)[4]) {
  const uint64_t* rows =
      host_cuda::Exchange(0xffffffffu, reinterpret_cast<uint64_t>(row), __LINE__);
  const int r = host_cuda::Lane() / 4, c = host_cuda::Lane() % 4;
  for (int i = 0; i < 4; ++i) {
    to[i] = ElementOf(rows, i, 2 * c, r) | ElementOf(rows, i, 2 * c + 1, r) << 16;
  }
}

inline void MultiplyAdd(const uint32_t (&a)[4], uint32_t b0, uint32_t b1, float (&sum)[4]) {
  uint64_t words[3][32];
  const uint64_t mine[3] = {a[0] | uint64_t{a[1]} << 32, a[2] | uint64_t{a[3]} << 32,
                            b0 | uint64_t{b1} << 32};
  for (int i = 0; i < 3; ++i) {
    memcpy(words[i], host_cuda::Exchange(0xffffffffu, mine[i], __LINE__), sizeof words[i]);
  }
  const int r = host_cuda::Lane() / 4, c = host_cuda::Lane() % 4;
  for (int i = 0; i < 4; ++i) {
    const int below = i / 2, column = 2 * c + i % 2;
    for (int k = 0; k < 16; ++k) {
      const int of = k % 8 / 2, half = k % 2;
      const float x = HalfOf(words[k / 8][4 * r + of] >> 32 * below, half);
      const float y = HalfOf(words[2][4 * column + of] >> 32 * (k / 8), half);
      sum[i] = fmaf(x, y, sum[i]);
    }
  }
}

struct BegunCopy {
  void* to;
  const void* from;
};

inline std::map<const void*, std::vector<BegunCopy>> begun;  // by thread

inline void BeginCopy(void* to, const void* from) { begun[&host_cuda::Me()].push_back({to, from}); }

inline void WaitForCopies() {
  for (const BegunCopy& copy : begun[&host_cuda::Me()]) memcpy(copy.to, copy.from, 16);
  begun[&host_cuda::Me()].clear();
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_WARP_MMA_CUH_
