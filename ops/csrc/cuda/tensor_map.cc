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

// `sizes` are of elements of `width` bytes, `strides` of all dimensions but the first, in elements.
template <cuuint32_t kRank>
Error DescribeAs(CUtensorMapDataType type, int64_t width, const void* data,
                 const cuuint64_t (&sizes)[kRank], const int64_t (&strides)[kRank - 1],
                 const cuuint32_t (&box)[kRank], CUtensorMapL2promotion promotion,
                 CUtensorMap* map) {
  static const Encode encode = FindEncode();
  if (!encode) return "the driver has no cuTensorMapEncodeTiled";
  cuuint64_t bytes[kRank - 1];
  cuuint32_t ones[kRank];
  for (cuuint32_t i = 0; i < kRank; ++i) ones[i] = 1;
  for (cuuint32_t i = 0; i + 1 < kRank; ++i) bytes[i] = static_cast<cuuint64_t>(strides[i] * width);
  const CUresult result = encode(map, type, kRank, const_cast<void*>(data), sizes, bytes, box, ones,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? nullptr : "the driver refuses to describe a matrix";
}

constexpr CUtensorMapDataType kBFloat16 = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                              kBytes = CU_TENSOR_MAP_DATA_TYPE_UINT8;

cuuint64_t Size(int64_t elements) { return static_cast<cuuint64_t>(elements); }

}  // namespace

Error Describe(const BFloat16Matrix& matrix, int box_rows, CUtensorMapL2promotion promotion,
               CUtensorMap* map) {
  return DescribeAs<2>(kBFloat16, 2, matrix.data, {Size(matrix.columns), Size(matrix.rows)},
                       {matrix.stride}, {64, static_cast<cuuint32_t>(box_rows)}, promotion, map);
}

Error DescribePairs(const BFloat16Matrix& matrix, int box_rows, CUtensorMap* map) {
  const int64_t half = matrix.rows / 2;
  return DescribeAs<4>(kBFloat16, 2, matrix.data, {Size(matrix.columns), 8, 2, Size(half / 8)},
                       {matrix.stride, half * matrix.stride, 8 * matrix.stride},
                       {64, 8, 2, static_cast<cuuint32_t>(box_rows) / 16},
                       CU_TENSOR_MAP_L2_PROMOTION_L2_256B, map);
}

Error DescribeStack(const ByteStack& stack, int box_rows, CUtensorMap* map) {
  constexpr int64_t kBlock = 8;
  const int64_t turns = stack.is_paired ? 2 : 1, half = stack.rows * stack.columns;
  const auto blocks = static_cast<cuuint32_t>(box_rows / (turns * kBlock));
  return DescribeAs<5>(kBytes, 1, stack.data,
                       {Size(stack.columns), Size(kBlock), Size(turns), Size(stack.rows / kBlock),
                        Size(stack.matrices)},
                       {stack.columns, half, kBlock * stack.columns, turns * half},
                       {128, kBlock, static_cast<cuuint32_t>(turns), blocks, 1},
                       CU_TENSOR_MAP_L2_PROMOTION_L2_256B, map);
}

Error DescribeBytes(const void* data, int64_t rows, int64_t columns, int box_rows,
                    CUtensorMap* map) {
  return DescribeAs<2>(kBytes, 1, data, {Size(columns), Size(rows)}, {columns},
                       {128, static_cast<cuuint32_t>(box_rows)}, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                       map);
}

}  // namespace baton_ops::cuda
