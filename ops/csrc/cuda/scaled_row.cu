// Launches of the products of FP8 that quantise their one row themselves.
#include <algorithm>

#include "baton_ops/scaled_row.cuh"
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
  const int64_t tiles = in.rows * (in.out / Way::kOutColumns);
  constexpr int kMost = Way::SharedBytes(kMostRowColumns / kScaledRange);
  if (const Error error = AllowSharedMemory<RowScaledKernel<Way>>(kMost)) return error;
  const HopperGrid grid{static_cast<int>(std::min<int64_t>(tiles, processors)), kRowScaledThreads,
                        Way::SharedBytes(params.groups)};
  return LaunchOnHopper<RowScaledKernel<Way>>(
      grid, stream, params, static_cast<const Out*>(in.plain.data), in.are_starts_known);
}

}  // namespace

bool HopperTakesRow(const ScaledMatmulInput& in) {
  const int64_t columns = kFewScaledColumns / (in.is_gated ? 2 : 1);
  const bool fits = in.plain_rows == 1 && in.in % kScaledGroup == 0 && in.in <= kMostRowColumns &&
                    in.group == kScaledGroup && in.out % columns == 0;
  return fits && in.rows <= (in.experts == 0 ? 1 : kMostRowPairs) && IsOnVector(in.plain.data) &&
         IsOnVector(in.weight.values);
}

Error ScaledRow(const ScaledMatmulInput& in, const Rows& out, ElementType out_type, int processors,
                Stream stream) {
  return ForElement(out_type, [&](auto element) {
    using E = decltype(element);
    return in.is_gated ? LaunchWay<RowScaledWay<E, true>>(in, out, processors, stream)
                       : LaunchWay<RowScaledWay<E, false>>(in, out, processors, stream);
  });
}

}  // namespace baton_ops::cuda
