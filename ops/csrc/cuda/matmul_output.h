// Where a product for Hopper goes, as its kernels are told. For .cu files only.
#ifndef BATON_OPS_CSRC_CUDA_MATMUL_OUTPUT_H_
#define BATON_OPS_CSRC_CUDA_MATMUL_OUTPUT_H_

#include "baton_ops/matmul_tile.cuh"
#include "hopper_device.h"
#include "hopper_matmul.h"

namespace baton_ops::cuda {

inline MatmulOutput OutputOf(const HopperMatmul& call) {
  const int64_t columns = call.is_gated ? call.input.out / 2 : call.input.out;
  const bool is_wide = IsOnVector(call.out.data) && call.out.stride % 8 == 0 && columns % 8 == 0;
  return {
      call.out.data, call.out.stride, static_cast<int>(call.input.rows), static_cast<int>(columns),
      call.is_fp32,  is_wide};
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_CSRC_CUDA_MATMUL_OUTPUT_H_
