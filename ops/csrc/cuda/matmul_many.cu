#include <algorithm>

#include "baton_ops/matmul_many.cuh"
#include "hopper_launch.h"
#include "hopper_matmul.h"
#include "matmul_output.h"

namespace baton_ops::cuda {
namespace {

template <class Way>
Error LaunchWay(const HopperMatmul& call, Stream stream) {
  const MatmulInput& in = call.input;
  constexpr auto kPromotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
  const BFloat16Matrix weight{in.weight, in.out, in.in, in.in};
  const MatmulOutput out = OutputOf(call);
  const ManyTiles<Way> tiles(out.m, out.n);
  CUtensorMap map_x, map_weight;
  if (const Error error =
          Describe({in.x.data, in.rows, in.in, in.x.stride}, tiles.height, kPromotion, &map_x)) {
    return error;
  }
  if (const Error error = Way::kGated && Way::kTurned
                              ? DescribePairs(weight, Way::kBoxWeight, &map_weight)
                              : Describe(weight, Way::kBoxWeight, kPromotion, &map_weight)) {
    return error;
  }
  const HopperGrid grid{std::min(tiles.Count(), call.processors), Way::kThreads, Way::kSharedBytes};
  return LaunchOnHopper<MatmulManyKernel<Way>>(grid, stream, map_x, map_weight, out,
                                               static_cast<int>(in.in));
}

template <int kColumns>
Error Launch(const HopperMatmul& call, Stream stream) {
  return call.is_gated ? LaunchWay<ManyWay<2, kColumns, false, true>>(call, stream)
                       : LaunchWay<ManyWay<2, kColumns, false, false>>(call, stream);
}

// Gates that are no multiple of 8 cannot take turns with their ups: such tiles are not turned.
template <int kRows>
Error LaunchTurned(const HopperMatmul& call, Stream stream) {
  if (!call.is_gated) return LaunchWay<ManyWay<3, kRows, true, false>>(call, stream);
  return call.input.out % 16 == 0 ? LaunchWay<ManyWay<3, kRows, true, true>>(call, stream)
                                  : Launch<192>(call, stream);
}

}  // namespace

Error MatmulMany(const HopperMatmul& call, MatmulWay way, Stream stream) {
  switch (way) {
    case MatmulWay::kMany64:
      return Launch<64>(call, stream);
    case MatmulWay::kMany96:
      return Launch<96>(call, stream);
    case MatmulWay::kMany128:
      return Launch<128>(call, stream);
    case MatmulWay::kMany160:
      return Launch<160>(call, stream);
    case MatmulWay::kMany192:
      return Launch<192>(call, stream);
    case MatmulWay::kMany256:
      return Launch<256>(call, stream);
    case MatmulWay::kTurned160:
      return LaunchTurned<160>(call, stream);
    case MatmulWay::kTurned192:
      return LaunchTurned<192>(call, stream);
    default:
      return "no way for many rows";
  }
}

}  // namespace baton_ops::cuda
