// The matmuls for Hopper, way by way, and who chooses among them.
#ifndef BATON_OPS_CSRC_CUDA_HOPPER_MATMUL_H_
#define BATON_OPS_CSRC_CUDA_HOPPER_MATMUL_H_

#include "experts.h"

namespace baton_ops::cuda {

// Ways have the same bits. Few: tiles of at most 64 rows, many: of 128, by how many columns they
// have. Turned: of 192 columns, by how many rows.
enum class MatmulWay {
  kFew32,
  kFew48,
  kFew64,
  kFew96,
  kFew128,
  kFew160,
  kFew192,
  kFew256,
  kMany64,
  kMany96,
  kMany128,
  kMany160,
  kMany192,
  kMany256,
  kTurned160,
  kTurned192,
};
constexpr int kMatmulWays = static_cast<int>(MatmulWay::kTurned192) + 1;
constexpr int64_t kMostFewRows = 64;

struct HopperMatmul {
  MatmulInput input;
  Rows out;
  bool is_fp32;        // of out
  bool is_gated;       // then the weight has gates' rows, and as many ups' behind them
  int processors = 0;  // of the device
};

// Rows that lie group by group: group g's are starts[g] .. starts[g + 1] - 1, on the device. The
// product's `out` is what each group's part of the weight has, and these lie one after the other.
// Stride 0 of x: one row, which the only row of each group is.
struct HopperGrouped {
  HopperMatmul product;
  const int32_t* starts;  // [groups + 1], from 0 to all rows
  int64_t groups;
  bool are_known;  // of a gated product, as of GroupedInput
};
Error MatmulGrouped(const HopperGrouped& call, MatmulWay way, Stream stream);

Error MatmulFew(const HopperMatmul& call, MatmulWay way, Stream stream);
Error MatmulMany(const HopperMatmul& call, MatmulWay way, Stream stream);

// Whether the kernels for Hopper take a weight, whatever x is.
bool HopperTakes(const MatmulInput& input);

// As Matmul, by one way, for what they take: what measures them uses it.
Error MatmulBy(MatmulWay way, const MatmulInput& input, const Rows& out, ElementType out_type,
               Stream stream);
Error GateUpSiluBy(MatmulWay way, const MatmulInput& input, const Rows& out, Stream stream);
Error GroupedBy(MatmulWay way, const GroupedInput& input, bool is_gated, const Rows& out,
                Stream stream);

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_CSRC_CUDA_HOPPER_MATMUL_H_
