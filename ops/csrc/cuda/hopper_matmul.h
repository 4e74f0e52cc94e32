// The matmuls for Hopper, way by way, and who chooses among them.
#ifndef BATON_OPS_CSRC_CUDA_HOPPER_MATMUL_H_
#define BATON_OPS_CSRC_CUDA_HOPPER_MATMUL_H_

#include "decoder.h"

namespace baton_ops::cuda {

// Ways have the same bits. Few rows, at most 64: the width of the tile. Many: width, how many
// blocks of a cluster share, and whether they share x.
enum class MatmulWay {
  kFew32,
  kFew48,
  kFew64,
  kFew96,
  kFew128,
  kMany32,
  kMany64,
  kMany96By2,
  kMany128By2,
  kMany128By2OfX,
  kMany192,
  kMany192By2,
  kMany256,
  kMany256By2,
};
constexpr int kMatmulWays = static_cast<int>(MatmulWay::kMany256By2) + 1;
constexpr int64_t kMostFewRows = 64;

struct HopperMatmul {
  MatmulInput input;
  Rows out;
  bool is_fp32;    // of out
  int processors;  // of the device
};

Error MatmulFew(const HopperMatmul& call, MatmulWay way, Stream stream);
Error MatmulMany(const HopperMatmul& call, MatmulWay way, Stream stream);

// Whether the kernels for Hopper take a weight, whatever x is.
bool HopperTakes(const MatmulInput& input);

// As Matmul, by one way, for what they take: what measures them uses it.
Error MatmulBy(MatmulWay way, const MatmulInput& input, const Rows& out, ElementType out_type,
               Stream stream);

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_CSRC_CUDA_HOPPER_MATMUL_H_
