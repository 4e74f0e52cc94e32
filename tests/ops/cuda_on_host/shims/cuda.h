// The part of the driver's interface that describes matrices to the copy engine, on the host.
#ifndef BATON_TESTS_CUDA_ON_HOST_CUDA_H_
#define BATON_TESTS_CUDA_ON_HOST_CUDA_H_

#include <cstdint>

using cuuint32_t = uint32_t;
using cuuint64_t = uint64_t;

enum CUresult { CUDA_SUCCESS, CUDA_ERROR_INVALID_VALUE };
enum CUtensorMapDataType { CU_TENSOR_MAP_DATA_TYPE_UINT8 = 1, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 };
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE };
enum CUtensorMapSwizzle { CU_TENSOR_MAP_SWIZZLE_128B };
enum CUtensorMapL2promotion {
  CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
  CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
};
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE };

// Readable, unlike the driver's. The first dimension's elements are neighbours.
struct CUtensorMap {
  uint32_t rank;
  uint32_t width;  // bytes of an element
  const char* data;
  uint64_t size[5], stride_bytes[5];
  uint32_t box[5];
};

// Refuses what the driver's would of a matrix of bf16 or of bytes, whose widths the types are.
inline CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank,
                                       void* data, const cuuint64_t* size,
                                       const cuuint64_t* stride_bytes, const cuuint32_t* box,
                                       const cuuint32_t* step, CUtensorMapInterleave,
                                       CUtensorMapSwizzle, CUtensorMapL2promotion,
                                       CUtensorMapFloatOOBfill) {
  const auto width = static_cast<uint32_t>(type);
  bool is_fine = reinterpret_cast<uintptr_t>(data) % 16 == 0 && rank <= 5 && box[0] * width <= 128;
  *map = {rank, width, static_cast<const char*>(data), {}, {width}, {}};
  for (cuuint32_t i = 0; i < rank && is_fine; ++i) {
    is_fine = box[i] - 1 < 256 && size[i] - 1 < uint64_t{1} << 32 && step[i] == 1;
    map->size[i] = size[i];
    map->box[i] = box[i];
    if (i == 0) continue;
    is_fine = is_fine && stride_bytes[i - 1] % 16 == 0 && stride_bytes[i - 1] < uint64_t{1} << 40;
    map->stride_bytes[i] = stride_bytes[i - 1];
  }
  return is_fine ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

#endif  // BATON_TESTS_CUDA_ON_HOST_CUDA_H_
