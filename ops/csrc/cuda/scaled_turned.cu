#include <algorithm>

#include "baton_ops/scaled_turned.cuh"
#include "experts.h"
#include "hopper_device.h"
#include "hopper_launch.h"
#include "hopper_scaled.h"

namespace baton_ops::cuda {
namespace {

static_assert(kMostExpertsOfLayer <= kMostGroups);

template <class Way>
Error LaunchWay(const ScaledMatmulInput& in, const MatmulOutput& out, int processors,
                Stream stream) {
  CUtensorMap map_x, map_weight, map_beside;
  const ByteStack weight{in.weight.values, std::max<int64_t>(in.experts, 1), in.out, in.in,
                         in.is_gated};
  if (const Error error = DescribeStack(weight, Way::kTileWeight, &map_weight)) return error;
  const bool has_beside = in.beside.rows > 0;
  ByteStack beside = weight;
  if (has_beside) beside.data = in.beside.weight.values;
  if (has_beside) beside.matrices = 1;
  if (const Error error = DescribeStack(beside, Way::kTileWeight, &map_beside)) return error;
  // Of rows that are named one by one how many there are is not known, and nobody loads them by it.
  const int64_t rows = in.row == nullptr ? in.rows + in.beside.rows : 1;
  if (const Error error = DescribeBytes(in.x.values, rows, in.in, Way::kTileX, &map_x)) {
    return error;
  }
  const int64_t groups = DivideUp<int64_t>(in.in, in.group);
  const TurnedInput input{in.x.values,
                          in.x.scales,
                          in.weight.scales,
                          in.row,
                          in.starts,
                          static_cast<int>(in.experts),
                          static_cast<int>(in.in),
                          static_cast<int>(groups),
                          static_cast<int>(in.beside.rows),
                          static_cast<int>(in.rows),
                          in.beside.weight.scales,
                          in.scale_shift};
  const int64_t row_tiles =
      HopperRowTiles(in, Way::kTileX) + DivideUp<int64_t>(in.beside.rows, Way::kTileX);
  const int64_t tiles = row_tiles * DivideUp<int64_t>(in.out, Way::kOutN);
  const HopperGrid grid{static_cast<int>(std::min<int64_t>(tiles, processors)), Way::kThreads,
                        Way::kSharedBytes};
  return LaunchOnHopper<ScaledTurnedKernel<Way>>(grid, stream, map_x, map_weight, map_beside, input,
                                                 out);
}

template <template <int, int, bool> class Tile, int kGroups, int kColumns>
Error Launch(const ScaledMatmulInput& in, const MatmulOutput& out, int processors, Stream stream) {
  using Plain = TurnedWay<Tile<kGroups, kColumns, false>>;
  using Gated = TurnedWay<Tile<kGroups, kColumns, true>>;
  return in.is_gated ? LaunchWay<Gated>(in, out, processors, stream)
                     : LaunchWay<Plain>(in, out, processors, stream);
}

}  // namespace

bool HopperTakesScaled(const ScaledMatmulInput& in, const Rows& out, ElementType out_type) {
  return out_type == ElementType::kBFloat16 && in.in % 16 == 0 && in.out % 8 == 0 &&
         IsOnVector(in.x.values) && IsOnVector(in.weight.values) && IsOnVector(out.data) &&
         out.stride % 8 == 0 && in.experts <= kMostGroups && in.out <= kMostScaledOutputs;
}

Error ScaledTurned(ScaledWay way, const ScaledMatmulInput& in, const Rows& to, int processors,
                   Stream stream) {
  const MatmulOutput out{to.data, to.stride, static_cast<int>(in.rows), static_cast<int>(in.out),
                         false,   true};
  switch (way) {
    case ScaledWay::kAnyGpu:
      break;
    case ScaledWay::k64x32:
      return Launch<TurnedTile, 1, 16>(in, out, processors, stream);
    case ScaledWay::k64x64:
      return Launch<TurnedTile, 1, 32>(in, out, processors, stream);
    case ScaledWay::k128x16:
      return Launch<TurnedTile, 2, 16>(in, out, processors, stream);
    case ScaledWay::k128x32:
      return Launch<TurnedTile, 2, 32>(in, out, processors, stream);
    case ScaledWay::k128x64:
      return Launch<TurnedTile, 2, 64>(in, out, processors, stream);
    case ScaledWay::kStraight128x128:
      return Launch<StraightTile, 2, 128>(in, out, processors, stream);
    case ScaledWay::kRanges64x16:
      return Launch<RangesTile, 4, 16>(in, out, processors, stream);
  }
  return "no way for these scaled rows";
}

}  // namespace baton_ops::cuda
