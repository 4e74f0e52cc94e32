// Launches of the ops of FP8.
#include <algorithm>

#include "baton_ops/quantise.cuh"
#include "baton_ops/scaled_matmul.cuh"
#include "early_launch.h"
#include "element_types.h"
#include "hopper_scaled.h"
#include "scaled_launch.h"

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
  constexpr int64_t kFour = alignof(Packed<E, 4>);
  const bool are_fours = in.group == kScaledRange && in.columns % 4 == 0 &&
                         reinterpret_cast<uintptr_t>(out.values) % 4 == 0 &&
                         reinterpret_cast<uintptr_t>(in.x.data) % kFour == 0 &&
                         in.x.stride % 4 == 0;
  const bool are_many = are_fours && in.rows > kRehearsedRows;
  const int64_t of_block = kQuantiseWarps * (are_many ? kManyQuantiseGroups : 1);
  const int64_t across = DivideUp<int64_t>(groups, of_block);
  if (across > kMostGridRows) return "x has too many columns";
  const Grid grid{dim3(static_cast<unsigned>(in.rows), static_cast<unsigned>(across)),
                  kQuantiseWarps * kWarp};
  if (are_many) {
    return LaunchEarly(QuantiseFoursKernel<E, kManyQuantiseGroups>, grid, stream, params);
  }
  if (are_fours) return LaunchEarly(QuantiseFoursKernel<E, 1>, grid, stream, params);
  return groups == 1 ? LaunchEarly(QuantiseKernel<E, true>, grid, stream, params)
                     : LaunchEarly(QuantiseKernel<E, false>, grid, stream, params);
}

static_assert(kScaledGroup == kScaledRange, "a group is a range");

// Tiles of so many rows that a launch has at most: each expert's last may have fewer.
int64_t RowTiles(const ScaledMatmulInput& in, int64_t rows) {
  const int64_t most = DivideUp<int64_t>(in.rows + in.experts * (rows - 1), rows);
  return in.experts == 0 ? DivideUp<int64_t>(in.rows, rows) : std::min(in.rows, most);
}

template <class Kernel, class Out>
Error LaunchTiles(Kernel kernel, const ScaledParams<Out>& params, int64_t down, int64_t columns,
                  Stream stream) {
  const int64_t across = DivideUp<int64_t>(params.out_columns, columns);
  if (across > kMostGridRows) return "weight has too many rows";
  const Grid grid{dim3(static_cast<unsigned>(down), static_cast<unsigned>(across)), kScaledThreads};
  return LaunchEarly(kernel, grid, stream, params);
}

template <class Out, int kBlocks, bool kGated, bool kWide>
Error RunSplit(const ScaledMatmulInput& in, const ScaledParams<Out>& params, Stream stream) {
  using Tile = ScaledTile<Out, kBlocks, kGated, kWide>;
  const int64_t down = RowTiles(in, kBlocks * kScaledBlockRows);
  return LaunchTiles(ScaledSplitKernel<Out, kBlocks, kGated, kWide>, params, down,
                     Tile::kOutColumns, stream);
}

// Where the blocks for many rows are enough for a GPU, and where rows are few for one tile. Both
// are guesses: every choice has the same bits.
constexpr int64_t kEnoughBlocks = 128, kFewOfAnExpert = 12, kManyOfAnExpert = 48;

template <class Out, bool kGated>
Error RunWide(const ScaledMatmulInput& in, const ScaledParams<Out>& params, Stream stream) {
  constexpr int64_t kColumns =
      kManyAcross * ScaledTile<Out, kManyBlocks, kGated, true>::kOutColumns;
  const int64_t down = RowTiles(in, kManyRows);
  const int64_t each = in.experts == 0 ? in.rows : in.rows / in.experts;
  const bool is_many =
      in.experts == 0
          ? down * DivideUp<int64_t>(in.out, kColumns) >= kEnoughBlocks && in.rows > kManyRows
          : each >= kManyOfAnExpert;
  if (is_many) {
    return LaunchTiles(ScaledManyKernel<Out, kGated>, params, down, kColumns, stream);
  }
  return each <= (in.experts == 0 ? kScaledBlockRows : kFewOfAnExpert)
             ? RunSplit<Out, 1, kGated, true>(in, params, stream)
             : RunSplit<Out, 2, kGated, true>(in, params, stream);
}

bool IsOnVectors(const uint8_t* p) { return reinterpret_cast<uintptr_t>(p) % sizeof(Numbers) == 0; }

template <class Out, bool kGated>
Error MatmulOf(const ScaledMatmulInput& in, const Rows& out, Stream stream) {
  const ScaledParams<Out> params = ScaledParamsOf<Out>(in, out);
  const bool is_wide = in.in % static_cast<int64_t>(sizeof(Numbers)) == 0 &&
                       IsOnVectors(in.x.values) && IsOnVectors(in.weight.values);
  return is_wide ? RunWide<Out, kGated>(in, params, stream)
                 : RunSplit<Out, 1, kGated, false>(in, params, stream);
}

}  // namespace

Error QuantiseRows(const QuantiseInput& in, const ScaledRows& out, Stream stream) {
  if (in.rows == 0 || in.columns == 0) return nullptr;
  if (in.rows > kMostScaledRows) return "x has too many rows";
  if (const Error error = CheckScaledGroup(in.group, in.columns)) return error;
  return ForElement(in.type,
                    [&](auto element) { return Quantise<decltype(element)>(in, out, stream); });
}

Error ScaledOnAnyGpu(const ScaledMatmulInput& in, const Rows& out, ElementType out_type,
                     Stream stream) {
  return ForElement(out_type, [&](auto element) {
    using Out = decltype(element);
    return in.is_gated ? MatmulOf<Out, true>(in, out, stream)
                       : MatmulOf<Out, false>(in, out, stream);
  });
}

}  // namespace baton_ops::cuda
