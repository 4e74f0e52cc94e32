// Launches of the ops of FP8.
#include "baton_ops/quantise.cuh"
#include "baton_ops/scaled_matmul.cuh"
#include "early_launch.h"
#include "element_types.h"
#include "scaled.h"

namespace baton_ops::cuda {
namespace {

constexpr int64_t kMostGridRows = 65535;

template <class E>
Error Quantise(const QuantiseInput& in, const ScaledRows& out, Stream stream) {
  const int64_t groups = DivideUp<int64_t>(in.columns, in.group);
  const QuantiseParams<E> params{static_cast<const E*>(in.x.data),
                                 reinterpret_cast<E4m3*>(out.values),
                                 out.scales,
                                 in.x.stride,
                                 in.columns,
                                 in.group,
                                 groups};
  const int64_t across = DivideUp<int64_t>(groups, kQuantiseWarps);
  const Grid grid{dim3(static_cast<unsigned>(across), static_cast<unsigned>(in.rows)),
                  kQuantiseWarps * kWarp};
  return LaunchEarly(QuantiseKernel<E>, grid, stream, params);
}

static_assert(kScaledGroup == kMatmulRange, "a group is a range");

template <class Out, class Tile>
Error RunTiles(const ScaledParams<Out>& params, Stream stream) {
  const int64_t across = DivideUp<int64_t>(params.out_columns, Tile::kColumns);
  const int64_t down = DivideUp<int64_t>(params.rows, Tile::kRows);
  if (down > kMostGridRows) return "x has too many rows";
  const Grid grid{dim3(static_cast<unsigned>(across), static_cast<unsigned>(down)), kMatmulThreads};
  return params.groups == 1
             ? LaunchEarly(ScaledMatmulKernel<Out, Tile, true>, grid, stream, params)
             : LaunchEarly(ScaledMatmulKernel<Out, Tile, false>, grid, stream, params);
}

template <class Out>
Error MatmulOf(const ScaledMatmulInput& in, const Rows& out, Stream stream) {
  const ScaledParams<Out> params{reinterpret_cast<const E4m3*>(in.x.values),
                                 in.x.scales,
                                 reinterpret_cast<const E4m3*>(in.weight.values),
                                 in.weight.scales,
                                 static_cast<Out*>(out.data),
                                 out.stride,
                                 in.rows,
                                 in.in,
                                 in.out,
                                 DivideUp<int64_t>(in.in, in.group)};
  return in.rows <= SmallMatmulTile::kRows ? RunTiles<Out, SmallMatmulTile>(params, stream)
                                           : RunTiles<Out, LargeMatmulTile>(params, stream);
}

Error CheckGroup(int64_t group, int64_t columns) {
  if (group == columns || group == kScaledGroup) return nullptr;
  return "a group must be 128 columns or a whole row";
}

}  // namespace

Error QuantiseRows(const QuantiseInput& in, const ScaledRows& out, Stream stream) {
  if (in.rows == 0 || in.columns == 0) return nullptr;
  if (in.rows > kMostGridRows) return "x has too many rows";
  if (const Error error = CheckGroup(in.group, in.columns)) return error;
  return ForElement(in.type,
                    [&](auto element) { return Quantise<decltype(element)>(in, out, stream); });
}

Error ScaledMatmul(const ScaledMatmulInput& in, const Rows& out, ElementType out_type,
                   Stream stream) {
  if (in.rows == 0 || in.out == 0) return nullptr;
  if (in.in == 0) return "x must have columns";
  if (const Error error = CheckGroup(in.group, in.in)) return error;
  return ForElement(out_type,
                    [&](auto element) { return MatmulOf<decltype(element)>(in, out, stream); });
}

}  // namespace baton_ops::cuda
