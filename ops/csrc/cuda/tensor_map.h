// Descriptions of matrices for the copy engine. The driver's function that makes them is found at
// run time, so that the library loads where there is no driver.
#ifndef BATON_OPS_CSRC_CUDA_TENSOR_MAP_H_
#define BATON_OPS_CSRC_CUDA_TENSOR_MAP_H_

#include <cuda.h>

#include <cstdint>

#include "launch.h"

namespace baton_ops::cuda {

// A matrix of bf16, 16-byte aligned, whose rows are `stride` elements apart, a multiple of 8.
struct BFloat16Matrix {
  const void* data;
  int64_t rows;
  int64_t columns;
  int64_t stride;
};

// Describes it in boxes of 64 columns; what lies outside of it is read as zeros. `promotion`: how
// much of memory the L2 cache reads at once.
Error Describe(const BFloat16Matrix& matrix, int box_rows, CUtensorMapL2promotion promotion,
               CUtensorMap* map);

// Describes its two halves, whose rows are a multiple of 8, as pairs of blocks of 8 rows, one of
// each half: so boxes of `box_rows` rows take them in turns.
Error DescribePairs(const BFloat16Matrix& matrix, int box_rows, CUtensorMap* map);

// Matrices of bytes one behind the other, 16-byte aligned, columns a multiple of 16.
struct ByteStack {
  const void* data;
  int64_t matrices;
  int64_t rows;  // of each
  int64_t columns;
  bool is_paired;  // each has as many rows again behind these
};

// Describes them in boxes of 128 columns and `box_rows` rows of one of them, by blocks of 8 rows,
// of which rows are a multiple; where it is paired a block of either half comes in turn.
Error DescribeStack(const ByteStack& stack, int box_rows, CUtensorMap* map);

// Describes rows of bytes, 16-byte aligned, columns a multiple of 16, in boxes of 128 columns.
Error DescribeBytes(const void* data, int64_t rows, int64_t columns, int box_rows,
                    CUtensorMap* map);

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_CSRC_CUDA_TENSOR_MAP_H_
