#include <algorithm>

#include "baton_ops/matmul_many.cuh"
#include "hopper_launch.h"
#include "hopper_matmul.h"

namespace baton_ops::cuda {
namespace {

template <int kTileN, int kCluster, bool kSharesX>
Error Launch(const HopperMatmul& call, Stream stream) {
  using Way = ManyWay<kTileN, kCluster, kSharesX>;
  const MatmulInput& in = call.input;
  CUtensorMap map_x, map_weight;
  if (const Error error = Describe({in.x.data, in.rows, in.in, in.x.stride}, Way::kRowsX,
                                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B, &map_x)) {
    return error;
  }
  if (const Error error = Describe({in.weight, in.out, in.in, in.in}, Way::kRowsWeight,
                                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B, &map_weight)) {
    return error;
  }
  const MatmulOutput out{call.out.data, call.out.stride, static_cast<int>(in.rows),
                         static_cast<int>(in.out), call.is_fp32};
  const int wanted = ManyTiles<Way>(out.m, out.n).Count() * kCluster;
  const int most = call.processors / kCluster * kCluster;
  const HopperGrid grid{std::min(wanted, most), kManyThreads, Way::kSharedBytes, kCluster};
  return LaunchOnHopper<MatmulManyKernel<Way>>(grid, stream, map_x, map_weight, out,
                                               static_cast<int>(in.in));
}

}  // namespace

Error MatmulMany(const HopperMatmul& call, MatmulWay way, Stream stream) {
  switch (way) {
    case MatmulWay::kMany32:
      return Launch<32, 1, false>(call, stream);
    case MatmulWay::kMany64:
      return Launch<64, 1, false>(call, stream);
    case MatmulWay::kMany96By2:
      return Launch<96, 2, false>(call, stream);
    case MatmulWay::kMany128By2:
      return Launch<128, 2, false>(call, stream);
    case MatmulWay::kMany128By2OfX:
      return Launch<128, 2, true>(call, stream);
    case MatmulWay::kMany192:
      return Launch<192, 1, false>(call, stream);
    case MatmulWay::kMany192By2:
      return Launch<192, 2, false>(call, stream);
    case MatmulWay::kMany256:
      return Launch<256, 1, false>(call, stream);
    case MatmulWay::kMany256By2:
      return Launch<256, 2, false>(call, stream);
    default:
      return "no way for many rows";
  }
}

}  // namespace baton_ops::cuda
