#include <algorithm>

#include "baton_ops/few_turned.cuh"
#include "hopper_launch.h"
#include "hopper_matmul.h"
#include "matmul_output.h"

namespace baton_ops::cuda {
namespace {

// Of a multiprocessor, so much of the weight is asked for at once before x is there: enough to keep
// memory busy. All that a ring has room for would be five microseconds' reading, which whoever
// computes x would wait behind with each of its loads.
constexpr int kWindowBytes = 40 * 1024;

template <int kTileN, bool kGated, class Tile>
Error LaunchTiles(const HopperMatmul& call, Stream stream) {
  const MatmulInput& in = call.input;
  const int row_tiles = static_cast<int>(DivideUp<int64_t>(in.rows, kFewRows));
  const int rows = static_cast<int>(DivideUp<int64_t>(in.rows, 8 * row_tiles) * 8);
  CUtensorMap map_x, map_weight;
  if (const Error error = Describe({in.x.data, in.rows, in.in, in.x.stride}, rows,
                                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B, &map_x)) {
    return error;
  }
  // Boxes of the weight are as wide as one read; more would be read twice.
  if (const Error error = Describe({in.weight, in.out, in.in, in.in}, kGated ? kTileN / 2 : kTileN,
                                   CU_TENSOR_MAP_L2_PROMOTION_L2_128B, &map_weight)) {
    return error;
  }
  const int tiles = static_cast<int>(DivideUp<int64_t>(in.out, kTileN)) * row_tiles;
  using Ring = FewRing<kTileN>;
  const HopperGrid grid{std::min(tiles, call.processors), kFewThreads, kFewSharedBytes};
  constexpr int kWindow = std::max(2, kWindowBytes / (kFewBoxes<kTileN> * Ring::kWeightBytes));
  return LaunchOnHopper<MatmulFewKernel<kTileN, kGated, Tile>>(
      grid, stream, map_x, map_weight, OutputOf(call), static_cast<int>(in.in), row_tiles, rows,
      Ring::StagesFor(rows, Tile::ReadBytes(rows)), kWindow);
}

template <int kTileN, bool kGated>
Error LaunchOne(const HopperMatmul& call, Stream stream) {
  if constexpr (kTileN <= kTurnedMostN) {
    if (call.input.rows <= kTurnedRows) {
      return LaunchTiles<kTileN, kGated, FewTurnedTile<kTileN, kGated>>(call, stream);
    }
  }
  return LaunchTiles<kTileN, kGated, FewTile<kTileN, kGated>>(call, stream);
}

template <int kTileN>
Error Launch(const HopperMatmul& call, Stream stream) {
  return call.is_gated ? LaunchOne<kTileN, true>(call, stream)
                       : LaunchOne<kTileN, false>(call, stream);
}

}  // namespace

Error MatmulFew(const HopperMatmul& call, MatmulWay way, Stream stream) {
  switch (way) {
    case MatmulWay::kFew32:
      return Launch<32>(call, stream);
    case MatmulWay::kFew48:
      return Launch<48>(call, stream);
    case MatmulWay::kFew64:
      return Launch<64>(call, stream);
    case MatmulWay::kFew96:
      return Launch<96>(call, stream);
    case MatmulWay::kFew128:
      return Launch<128>(call, stream);
    case MatmulWay::kFew160:
      return Launch<160>(call, stream);
    case MatmulWay::kFew192:
      return Launch<192>(call, stream);
    case MatmulWay::kFew256:
      return Launch<256>(call, stream);
    default:
      return "no way for few rows";
  }
}

}  // namespace baton_ops::cuda
