// Stands for baton_ops/wgmma.cuh, whose instruction is written by macros.
#ifndef BATON_OPS_WGMMA_CUH_
#define BATON_OPS_WGMMA_CUH_

#include "hopper.h"

namespace baton_ops::cuda {

template <int kColumns>
struct Wgmma {
  static void Multiply(float (&sums)[kColumns / 2], uint64_t x, uint64_t y, int adds) {
    host_cuda::StartProduct(sums, x, y, kColumns, adds != 0);
  }
};

inline void AddProduct(float (&sums)[64], const uint32_t* x, uint64_t y) {
  host_cuda::StartProduct(sums, 0, y, 128, true, x);
}

struct WgmmaOfTurned {
  static void Add(float (&sums)[4], uint64_t x, uint64_t y) {
    host_cuda::StartProduct(sums, x, y, 8, true, nullptr, host_cuda::Operands::kTurned);
  }
};

template <int kColumns>
struct WgmmaOfE4m3 {
  static void Multiply(float (&sums)[kColumns / 2], uint64_t x, uint64_t y, int adds) {
    host_cuda::StartProduct(sums, x, y, kColumns, adds != 0, nullptr, host_cuda::Operands::kE4m3);
  }
};

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_WGMMA_CUH_
