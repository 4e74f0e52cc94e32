// Launches of the products of FP8 for few rows.
#include <algorithm>

#include "baton_ops/scaled_few.cuh"
#include "element_types.h"
#include "hopper_launch.h"
#include "hopper_scaled.h"
#include "scaled_launch.h"

namespace baton_ops::cuda {
namespace {

template <class Way>
Error LaunchWay(const ScaledMatmulInput& in, const Rows& out, int processors, Stream stream) {
  using Out = typename Way::Out;
  const ScaledParams<Out> params = ScaledParamsOf<Out>(in, out);
  const int64_t tiles =
      HopperRowTiles(in, kFewScaledRows) * DivideUp<int64_t>(in.out, int64_t{Way::kOutColumns});
  const int64_t room = kFewScaledBlocks * int64_t{processors};
  const HopperGrid grid{static_cast<int>(std::min(tiles, room)), kFewScaledThreads,
                        Way::kSharedBytes};
  // An expert's second product, behind the first.
  const bool are_starts_early = !in.is_gated;
  return LaunchOnHopper<FewScaledKernel<Way>>(grid, stream, params, are_starts_early);
}

}  // namespace

Error ScaledFew(const ScaledMatmulInput& in, const Rows& out, ElementType out_type, int processors,
                Stream stream) {
  return ForElement(out_type, [&](auto element) {
    using E = decltype(element);
    return in.is_gated ? LaunchWay<FewScaledWay<E, true>>(in, out, processors, stream)
                       : LaunchWay<FewScaledWay<E, false>>(in, out, processors, stream);
  });
}

}  // namespace baton_ops::cuda
