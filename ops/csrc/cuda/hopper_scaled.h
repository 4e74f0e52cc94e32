// The products of FP8, way by way, and who chooses among them.
#ifndef BATON_OPS_CSRC_CUDA_HOPPER_SCALED_H_
#define BATON_OPS_CSRC_CUDA_HOPPER_SCALED_H_

#include <algorithm>

#include "scaled.h"

namespace baton_ops::cuda {

// Of a product, and columns: with what lies behind the last of a tile they are 32-bit numbers.
constexpr int64_t kMostScaledRows = int64_t{1} << 30;
// Of the weight, or of gates: tiles of as many of x's rows as go together are counted so, too.
constexpr int64_t kMostScaledOutputs = int64_t{1} << 28;

// For any GPU, or on Hopper by tiles: so many rows of the weight, of x; of the last, warpgroups
// have ranges of their own. kStraight's tiles are not turned. Those on Hopper have the same bits.
enum class ScaledWay {
  kAnyGpu,
  k64x32,
  k64x64,
  k128x16,
  k128x32,
  k128x64,
  kStraight128x128,
  kRanges64x16,
};
constexpr int kScaledWays = static_cast<int>(ScaledWay::kRanges64x16) + 1;

Error ScaledOnAnyGpu(const ScaledMatmulInput& in, const Rows& out, ElementType out_type,
                     Stream stream);

// Tiles of so many rows at most: each expert's last may have fewer.
inline int64_t HopperRowTiles(const ScaledMatmulInput& in, int64_t rows) {
  if (in.experts == 0) return (in.rows + rows - 1) / rows;
  return std::min(in.rows, in.experts + in.rows / rows);
}

// Whether the ways on Hopper take a product, whatever its rows and on whatever GPU: of bf16.
bool HopperTakesScaled(const ScaledMatmulInput& in, const Rows& out, ElementType out_type);
// By one of these, on so many multiprocessors.
Error ScaledTurned(ScaledWay way, const ScaledMatmulInput& in, const Rows& out, int processors,
                   Stream stream);

// The same of a single row of x that is not quantised yet: whether it is taken, of what they take.
bool HopperTakesRow(const ScaledMatmulInput& in);
Error ScaledRow(const ScaledMatmulInput& in, const Rows& out, int processors, Stream stream);

// As ScaledMatmul, by one way: what measures them uses it.
Error ScaledMatmulBy(ScaledWay way, const ScaledMatmulInput& in, const Rows& out,
                     ElementType out_type, Stream stream);

// Null, or what is wrong with a group of so many of these columns.
inline Error CheckScaledGroup(int64_t group, int64_t columns) {
  if (group == columns || group == kScaledGroup) return nullptr;
  return "a group must be 128 columns or a whole row";
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_CSRC_CUDA_HOPPER_SCALED_H_
