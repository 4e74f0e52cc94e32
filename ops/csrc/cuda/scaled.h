// The CUDA ops of FP8 as plain functions, see decoder.h. Numbers are e4m3, one byte each; a scale
// is of a group of them along a row: of `group` columns, of which the last may have fewer.
#ifndef BATON_OPS_CSRC_CUDA_SCALED_H_
#define BATON_OPS_CSRC_CUDA_SCALED_H_

#include "decoder.h"

namespace baton_ops::cuda {

// Groups are of so many columns, or of a whole row.
constexpr int64_t kScaledGroup = 128;
constexpr int kBlockShift = 7;  // of rows of a weight that share a scale: a block has as many rows
static_assert(1 << kBlockShift == kScaledGroup);

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

// A product of some rows more, of as many columns as the others' and a weight as large as an
// expert's. Where x's rows have none of their own each of x is one of these too. Of more than one
// row it is made in the same launch where these, their room and what comes of them lie right behind
// the others'; then each of the others is an expert's.
struct ScaledBeside {
  Rows plain;         // what its rows are made of
  ScaledRows x;       // room for them
  ScaledRows weight;  // values are null where there is no such product
  Rows out;
  int64_t rows;
};

struct ScaledMatmulInput {
  ScaledRows x;       // [rows, in]; with `row` of any number
  ScaledRows weight;  // [out, in], gated [2 out, in]; of experts one after the other
  int64_t rows;       // of the output
  int64_t in;
  int64_t out;  // columns of the output
  int64_t group;
  // Of weights, also of that beside: 1 << scale_shift rows that follow each other have a scale in
  // common, which is stored once; 0, or kBlockShift of groups of kScaledGroup, where each matrix,
  // gates and ups too, has whole blocks.
  int scale_shift;
  bool is_gated;       // silu(gate) * up; the weight has gates' rows, and as many ups' behind them
  const int32_t* row;  // [rows]: which of x each is, or null: that of its number
  const int32_t* starts;  // [experts + 1]: where each expert's rows begin; or null
  int64_t experts;        // 0 where there are none
  // What x's rows are made of, of the output's type, and how many; or null: they are made. Then x
  // is room, of which nobody may rely on what it holds behind this.
  Rows plain;
  int64_t plain_rows;
  bool are_starts_known;  // of these: written before the kernel before this one let it start
  ScaledBeside beside;    // of experts; like them of plain rows
};
// Any shape; out is float32 or bfloat16.
Error ScaledMatmul(const ScaledMatmulInput& input, const Rows& out, ElementType out_type,
                   Stream stream);

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_CSRC_CUDA_SCALED_H_
