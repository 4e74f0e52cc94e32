// Launches of the products of FP8 that quantise their one row themselves.
#include <algorithm>

#include "baton_ops/scaled_row.cuh"
#include "element_types.h"
#include "hopper_launch.h"
#include "hopper_scaled.h"
#include "scaled_launch.h"

namespace baton_ops::cuda {
namespace {

// Whether each of experts' rows has one of x, instead of all of them the one.
bool HasOwnRows(const ScaledMatmulInput& in) { return in.experts > 0 && in.plain_rows > 1; }

template <class Way>
Error LaunchWay(const ScaledMatmulInput& in, const Rows& out, int processors, Stream stream) {
  using Out = typename Way::Out;
  const ScaledParams<Out> params = ScaledParamsOf<Out>(in, out);
  const ScaledBeside& beside = in.beside;
  const bool has_beside = beside.weight.values != nullptr;
  const int64_t columns = in.out / Way::kOutColumns;
  const int64_t tiles = (in.rows + (has_beside ? 1 : 0)) * columns;
  RowScaledRows rows{
      static_cast<const Out*>(in.plain.data), 0, 0, in.are_starts_known,
      RowScaledBeside{static_cast<const Out*>(beside.plain.data), beside.weight.values,
                      beside.weight.scales, static_cast<Out*>(beside.out.data)}};
  int64_t blocks = std::min<int64_t>(tiles, processors);
  if (HasOwnRows(in)) {
    const int64_t chunk = std::min(columns, DivideUp<int64_t>(tiles, processors));
    rows.stride = in.plain.stride;
    rows.chunk = static_cast<int>(chunk);
    blocks = DivideUp(tiles, chunk);
  }
  constexpr int kMost = Way::SharedBytes(kMostRowColumns / kScaledRange, 1);
  static_assert(kMost >= Way::SharedBytes(kMostRowColumns / kScaledRange / 2, 2));
  if (const Error error = AllowSharedMemory<RowScaledKernel<Way>>(kMost)) return error;
  const HopperGrid grid{static_cast<int>(blocks), kRowThreads,
                        Way::SharedBytes(params.groups, rows.chunk > 0 ? 2 : 1)};
  return LaunchOnHopper<RowScaledKernel<Way>>(grid, stream, params, rows);
}

}  // namespace

bool HopperTakesRow(const ScaledMatmulInput& in) {
  const bool has_own = HasOwnRows(in);
  const int64_t columns = kRowTile / (in.is_gated ? 2 : 1);
  const int64_t most_rows = in.experts == 0 ? 1 : has_own ? kMostOwnRows : kMostRowPairs;
  const int64_t most_columns = has_own ? kMostRowColumns / 2 : kMostRowColumns;
  const bool fits = in.in % kScaledGroup == 0 && in.in <= most_columns &&
                    in.group == kScaledGroup && in.out % columns == 0 && in.rows <= most_rows;
  const bool is_one = in.plain_rows == 1 && IsOnVector(in.plain.data);
  const bool is_each =
      has_own && in.row == nullptr && in.plain_rows == in.rows && AreVectors(in.plain, in.in, 4);
  const ScaledBeside& beside = in.beside;
  const bool is_same = has_own || beside.plain.data == in.plain.data;
  const bool fits_beside = beside.weight.values == nullptr ||
                           (beside.rows == 1 && is_same && IsOnVector(beside.plain.data) &&
                            IsOnVector(beside.x.values) && IsOnVector(beside.weight.values) &&
                            IsOnVector(beside.out.data));
  return fits && (is_one || is_each) && IsOnVector(in.weight.values) && fits_beside;
}

Error ScaledRow(const ScaledMatmulInput& in, const Rows& out, int processors, Stream stream) {
  return in.is_gated ? LaunchWay<RowScaledWay<true>>(in, out, processors, stream)
                     : LaunchWay<RowScaledWay<false>>(in, out, processors, stream);
}

}  // namespace baton_ops::cuda
