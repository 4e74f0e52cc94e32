#include "tensor_map.h"

#include <cudaTypedefs.h>
#include <cuda_runtime.h>

namespace baton_ops::cuda {
namespace {

using Encode = PFN_cuTensorMapEncodeTiled_v12000;

Encode FindEncode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  const cudaError_t status = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                              12000, cudaEnableDefault, &found);
  const bool is_there = status == cudaSuccess && found == cudaDriverEntryPointSuccess;
  return is_there ? reinterpret_cast<Encode>(function) : nullptr;
}

}  // namespace

Error Describe(const BFloat16Matrix& matrix, int box_rows, CUtensorMapL2promotion promotion,
               CUtensorMap* map) {
  static const Encode encode = FindEncode();
  if (!encode) return "the driver has no cuTensorMapEncodeTiled";
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(matrix.columns),
                               static_cast<cuuint64_t>(matrix.rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(matrix.stride) * 2};
  const cuuint32_t box[2] = {64, static_cast<cuuint32_t>(box_rows)}, ones[2] = {1, 1};
  const CUresult result =
      encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(matrix.data), sizes,
             strides, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? nullptr : "the driver refuses to describe a matrix";
}

}  // namespace baton_ops::cuda
