// The CUDA ops of FP8 as plain functions, see decoder.h. Numbers are e4m3, one byte each; a scale
// is of a group of them along a row: of `group` columns, of which the last may have fewer.
#ifndef BATON_OPS_CSRC_CUDA_SCALED_H_
#define BATON_OPS_CSRC_CUDA_SCALED_H_

#include "decoder.h"

namespace baton_ops::cuda {

// Groups are of so many columns, or of a whole row.
constexpr int64_t kScaledGroup = 128;

struct ScaledRows {
  uint8_t* values;  // [rows, columns], contiguous
  float* scales;    // [rows, groups], contiguous
};

struct QuantiseInput {
  Rows x;
  ElementType type;
  int64_t rows;
  int64_t columns;
  int64_t group;
};
Error QuantiseRows(const QuantiseInput& input, const ScaledRows& out, Stream stream);

struct ScaledMatmulInput {
  ScaledRows x;       // [rows, in]
  ScaledRows weight;  // [out, in]
  int64_t rows;
  int64_t in;
  int64_t out;
  int64_t group;
};
// Any shape; out is float32 or bfloat16.
Error ScaledMatmul(const ScaledMatmulInput& input, const Rows& out, ElementType out_type,
                   Stream stream);

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_CSRC_CUDA_SCALED_H_
