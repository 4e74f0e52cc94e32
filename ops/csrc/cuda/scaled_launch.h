// What kernels that multiply FP8 without tensor maps are told of a product. For .cu files only.
#ifndef BATON_OPS_CSRC_CUDA_SCALED_LAUNCH_H_
#define BATON_OPS_CSRC_CUDA_SCALED_LAUNCH_H_

#include "baton_ops/scaled_tile.cuh"
#include "early_launch.h"
#include "scaled.h"

namespace baton_ops::cuda {

template <class Out>
ScaledParams<Out> ScaledParamsOf(const ScaledMatmulInput& in, const Rows& out) {
  return {in.x.values,
          in.x.scales,
          in.weight.values,
          in.weight.scales,
          static_cast<Out*>(out.data),
          out.stride,
          static_cast<int>(in.rows),
          static_cast<int>(in.in),
          static_cast<int>(in.out),
          static_cast<int>(DivideUp<int64_t>(in.in, in.group)),
          in.row,
          in.starts,
          static_cast<int>(in.experts),
          in.scale_shift};
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_CSRC_CUDA_SCALED_LAUNCH_H_
