// Element types as template arguments, and what of a matrix can be read 16 bytes at a time. For .cu
// files only.
#ifndef BATON_OPS_CSRC_CUDA_ELEMENT_TYPES_H_
#define BATON_OPS_CSRC_CUDA_ELEMENT_TYPES_H_

#include <cuda_bf16.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "decoder.h"
#include "early_launch.h"

namespace baton_ops::cuda {

constexpr int64_t kVector = 16;  // bytes
constexpr int64_t kMostWarps = int64_t{1} << 30;

inline int64_t ElementBytes(ElementType type) { return type == ElementType::kFloat32 ? 4 : 2; }

// Calls `work` with a value of the type.
template <class Work>
Error ForElement(ElementType type, const Work& work) {
  return type == ElementType::kFloat32 ? work(float{}) : work(__nv_bfloat16{});
}

inline bool IsOnVector(const void* data) {
  return reinterpret_cast<uintptr_t>(data) % kVector == 0;
}

inline bool AreOnVectors(std::initializer_list<const void*> all) {
  return std::all_of(all.begin(), all.end(), IsOnVector);
}

// Whether every row of a matrix begins on a vector and is a whole number of them.
inline bool AreVectors(const Rows& rows, int64_t columns, int64_t element_bytes) {
  return IsOnVector(rows.data) && rows.stride * element_bytes % kVector == 0 &&
         columns * element_bytes % kVector == 0;
}

// A block for each row and each `per_block` of its items.
inline dim3 RowGrid(int64_t rows, int64_t items, int64_t per_block) {
  return dim3(static_cast<unsigned>(rows), static_cast<unsigned>(DivideUp(items, per_block)));
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_CSRC_CUDA_ELEMENT_TYPES_H_
