// How kernels that norm rows are launched: what they are told, and how many threads have a row,
// which the order of the sum follows from. For .cu files only.
#ifndef BATON_OPS_CSRC_CUDA_NORM_LAUNCH_H_
#define BATON_OPS_CSRC_CUDA_NORM_LAUNCH_H_

#include <algorithm>

#include "baton_ops/row_norm.cuh"
#include "decoder.h"
#include "early_launch.h"
#include "element_types.h"

namespace baton_ops::cuda {

template <class E>
NormParams<E> NormParamsOf(const AddNormInput& in, const Rows& out) {
  return {static_cast<const E*>(in.x.data),
          static_cast<E*>(in.residual.data),
          static_cast<const E*>(in.weight),
          static_cast<E*>(out.data),
          in.x.stride,
          in.residual.stride,
          out.stride,
          in.columns,
          in.eps};
}

inline unsigned NormThreads(int64_t columns) {
  const int64_t warps = DivideUp<int64_t>(DivideUp<int64_t>(columns, kChunk), kWarp);
  return static_cast<unsigned>(std::min<int64_t>(warps * kWarp, kMostNormThreads));
}

// Whether all is read and written 16 bytes at a time.
inline bool IsNormWide(const AddNormInput& in, const Rows& out) {
  const int64_t bytes = ElementBytes(in.type);
  return in.columns % kChunk == 0 && AreVectors(in.x, in.columns, bytes) &&
         AreVectors(in.residual, in.columns, bytes) && IsOnVector(in.weight) &&
         AreVectors(out, in.columns, bytes);
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_CSRC_CUDA_NORM_LAUNCH_H_
