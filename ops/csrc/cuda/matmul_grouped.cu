#include <algorithm>

#include "baton_ops/few_turned.cuh"
#include "baton_ops/matmul_grouped.cuh"
#include "hopper_launch.h"
#include "hopper_matmul.h"
#include "matmul_output.h"

namespace baton_ops::cuda {
namespace {

// A group's tiles read its part of the weight again, mostly from the L2 cache; rows of x that a
// tile does not have are loaded for nothing. So a tile has room for half as many again as a group
// has on average.
int RowsOfTile(int64_t rows, int64_t groups) {
  const int64_t wanted = DivideUp<int64_t>(3 * rows, 2 * groups);
  return static_cast<int>(std::min<int64_t>(DivideUp<int64_t>(wanted, 8) * 8, kFewRows));
}

// Both products of an expert have as many rows, so they agree on it.
bool AreFew(const HopperGrouped& call) { return call.product.input.rows <= kFewRows; }

template <int kTileN, bool kGated, class Tile>
Error LaunchTiles(const HopperGrouped& call, int rows, Stream stream) {
  const MatmulInput& in = call.product.input;
  // Behind one row, which is described as such, the copy engine puts zeros, that nobody stores.
  const bool is_one_row = in.x.stride == 0;
  const BFloat16Matrix x{in.x.data, is_one_row ? 1 : in.rows, in.in,
                         is_one_row ? in.in : in.x.stride};
  CUtensorMap map_x, map_weight;
  if (const Error error = Describe(x, rows, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, &map_x)) {
    return error;
  }
  if (const Error error =
          Describe({in.weight, call.groups * in.out, in.in, in.in}, kGated ? kTileN / 2 : kTileN,
                   CU_TENSOR_MAP_L2_PROMOTION_L2_128B, &map_weight)) {
    return error;
  }
  const MatmulOutput out = OutputOf(call.product);
  constexpr int kOutN = GroupedShare<kTileN, kGated, Tile::kIsTurned>::kOutN;
  const int64_t row_tiles = std::min(in.rows, call.groups + in.rows / rows);
  const int64_t tiles = DivideUp<int64_t>(out.n, kOutN) * row_tiles;
  const int blocks = static_cast<int>(std::min<int64_t>(tiles, call.product.processors));
  // With few rows a ring of half a multiprocessor keeps memory busy; so the next product's blocks
  // find room beside this one's, and fill their rings before its end. Hardly a weight is read twice
  // then; the L2 cache is for what is, the kernels' code among it.
  const bool are_few = AreFew(call);
  const int bytes = are_few ? kGroupedHalfBytes : kFewSharedBytes;
  const HopperGrid grid{blocks, kFewThreads, bytes};
  if (const Error error =
          AllowSharedMemory<MatmulGroupedKernel<kTileN, kGated, Tile>>(kFewSharedBytes)) {
    return error;
  }
  return LaunchOnHopper<MatmulGroupedKernel<kTileN, kGated, Tile>>(
      grid, stream, map_x, map_weight, out, static_cast<int>(in.in), call.starts,
      static_cast<int>(call.groups), rows,
      FewRing<kTileN>::StagesFor(rows, Tile::ReadBytes(rows), kGroupedHeadBytes, bytes), is_one_row,
      are_few, are_few && (!kGated || call.are_known));
}

template <int kTileN, bool kGated>
Error LaunchOne(const HopperGrouped& call, Stream stream) {
  const int rows = RowsOfTile(call.product.input.rows, call.groups);
  if constexpr (kTileN <= kTurnedMostN) {
    if (AreFew(call) && rows <= kTurnedRows) {
      return LaunchTiles<kTileN, kGated, FewTurnedTile<kTileN, kGated>>(call, rows, stream);
    }
  }
  return LaunchTiles<kTileN, kGated, FewTile<kTileN, kGated>>(call, rows, stream);
}

template <int kTileN>
Error Launch(const HopperGrouped& call, Stream stream) {
  return call.product.is_gated ? LaunchOne<kTileN, true>(call, stream)
                               : LaunchOne<kTileN, false>(call, stream);
}

}  // namespace

Error MatmulGrouped(const HopperGrouped& call, MatmulWay way, Stream stream) {
  // Which group one is of is looked up by row, where there is room for one of each.
  const MatmulInput& in = call.product.input;
  if (in.x.stride == 0 && in.rows > call.groups) return "one row of x has more places than groups";
  switch (way) {
    case MatmulWay::kFew32:
      return Launch<32>(call, stream);
    case MatmulWay::kFew64:
      return Launch<64>(call, stream);
    case MatmulWay::kFew96:
      return Launch<96>(call, stream);
    case MatmulWay::kFew128:
      return Launch<128>(call, stream);
    case MatmulWay::kFew256:
      return Launch<256>(call, stream);
    default:
      return "no way for groups of rows";
  }
}

}  // namespace baton_ops::cuda
