// Which kernel multiplies rows of FP8. Of all rows of a product either Hopper's do, whose bits are
// the same, so that what was measured decides, or those for any GPU.
#include <algorithm>
#include <cstdint>
#include <iterator>
#include <utility>

#include "experts.h"
#include "hopper_device.h"
#include "hopper_scaled.h"

namespace baton_ops::cuda {
namespace {

// A way's tiles, what a range of one costs that a multiprocessor has, and what a launch does:
// nanoseconds of an H200.
struct Cost {
  ScaledWay way;
  int64_t weight_rows, x_rows;
  double of_range, of_launch = 2'600;
};

constexpr Cost kCosts[] = {
    {ScaledWay::k64x32, 64, 32, 205},       {ScaledWay::k64x64, 64, 64, 275},
    {ScaledWay::k128x16, 128, 16, 205},     {ScaledWay::k128x32, 128, 32, 245},
    {ScaledWay::k128x64, 128, 64, 295},     {ScaledWay::kStraight128x128, 128, 128, 405},
    {ScaledWay::kRanges64x16, 64, 16, 195},
};
constexpr double kBytes = 4'040;  // that memory gives in a nanosecond

int64_t DivideUp(int64_t a, int64_t b) { return (a + b - 1) / b; }

// What a product takes, and of equals what it would if memory gave more.
using Nanoseconds = std::pair<double, double>;

Nanoseconds CostOf(const Cost& cost, const ScaledMatmulInput& in, int processors) {
  const int64_t weight_rows = (in.is_gated ? 2 : 1) * in.out;
  const int64_t tiles = DivideUp(weight_rows, cost.weight_rows) * DivideUp(in.rows, cost.x_rows);
  const int64_t ranges = DivideUp(tiles, processors) * DivideUp(in.in, kScaledGroup);
  const double chain = static_cast<double>(ranges) * cost.of_range;
  const double bytes = static_cast<double>(weight_rows * in.in) / kBytes;
  return {cost.of_launch + std::max(chain, bytes), chain};
}

ScaledWay DenseWayFor(const ScaledMatmulInput& in, int processors) {
  const auto less = [&](const Cost& a, const Cost& b) {
    return CostOf(a, in, processors) < CostOf(b, in, processors);
  };
  return std::min_element(std::begin(kCosts), std::end(kCosts), less)->way;
}

// By how many rows an expert has on average, of 128 experts on an H200.
ScaledWay ExpertsWayFor(const ScaledMatmulInput& in) {
  const int64_t each = in.rows / in.experts;
  if (each <= 9) return ScaledWay::k128x16;
  if (each <= 26) return ScaledWay::k128x32;
  return each <= 52 ? ScaledWay::k128x64 : ScaledWay::kStraight128x128;
}

ScaledWay WayFor(const ScaledMatmulInput& in, int processors) {
  return in.experts == 0 ? DenseWayFor(in, processors) : ExpertsWayFor(in);
}

Error Check(const ScaledMatmulInput& in) {
  if (in.in == 0) return "x must have columns";
  if (in.rows > kMostScaledRows) return "x has too many rows";
  if (in.in > kMostScaledRows) return "x has too many columns";
  return CheckScaledGroup(in.group, in.in);
}

// What is beside experts, as a product of its own.
ScaledMatmulInput AloneOf(const ScaledMatmulInput& in) {
  ScaledMatmulInput alone = in;
  alone.x = in.beside.x;
  alone.weight = in.beside.weight;
  alone.plain = in.beside.plain;
  alone.rows = alone.plain_rows = in.beside.rows;
  alone.row = alone.starts = nullptr;
  alone.experts = 0;
  alone.beside = {};
  return alone;
}

// Whether rows lie right behind so many others, elements of so many bytes.
bool LieBehind(const Rows& rows, const Rows& before, int64_t count, int64_t of_element) {
  return rows.stride == before.stride &&
         rows.data == static_cast<const char*>(before.data) + count * before.stride * of_element;
}

// Whether what is beside experts has the rows of x that these have, and the room for them.
bool IsOfTheSameRows(const ScaledMatmulInput& in) {
  const ScaledBeside& beside = in.beside;
  return beside.plain.data == in.plain.data && beside.plain.stride == in.plain.stride &&
         beside.rows == in.plain_rows && beside.x.values == in.x.values &&
         beside.x.scales == in.x.scales;
}

// Quantises rows, and so many behind them.
Error QuantisePlain(const ScaledMatmulInput& in, int64_t behind, ElementType type, Stream stream) {
  const QuantiseInput rows{in.plain, type, in.plain_rows + behind, in.in, in.group};
  return QuantiseRows(rows, in.x, stream);
}

// Whether what is beside experts lies as those have it that multiply it with them.
bool LiesBehind(const ScaledMatmulInput& in, const Rows& out, ElementType type) {
  const ScaledBeside& beside = in.beside;
  const int64_t of_element = type == ElementType::kFloat32 ? 4 : 2;
  if (!IsOnVector(beside.weight.values) || !IsOnVector(beside.weight.scales)) return false;
  if (in.experts >= kMostExpertsOfLayer) return false;  // it is counted as an expert more
  if (!LieBehind(beside.out, out, in.rows, of_element)) return false;
  if (in.row != nullptr) return IsOfTheSameRows(in);
  const int64_t groups = (in.in + in.group - 1) / in.group;
  return LieBehind(beside.plain, in.plain, in.plain_rows, of_element) &&
         beside.x.values == in.x.values + in.plain_rows * in.in &&
         beside.x.scales == in.x.scales + in.plain_rows * groups;
}

Error Run(const ScaledWay* way, ScaledMatmulInput in, const Rows& out, ElementType out_type,
          Stream stream) {
  if (in.rows == 0 || in.out == 0) return nullptr;
  if (const Error error = Check(in)) return error;
  const HopperDevice device = CurrentHopper();
  const bool is_taken = device.is_there && HopperTakesScaled(in, out, out_type);
  if (is_taken && in.plain.data != nullptr && HopperTakesRow(in)) {
    return ScaledRow(in, out, device.processors, stream);
  }
  const ScaledWay by = way != nullptr ? *way
                       : is_taken     ? WayFor(in, device.processors)
                                      : ScaledWay::kAnyGpu;
  if (in.beside.rows > 0 &&
      !(is_taken && by != ScaledWay::kAnyGpu && LiesBehind(in, out, out_type))) {
    ScaledMatmulInput alone = AloneOf(in);
    if (IsOfTheSameRows(in)) {
      if (const Error error = QuantisePlain(in, 0, out_type, stream)) return error;
      alone.plain = in.plain = {};
    }
    if (const Error error = Run(way, alone, in.beside.out, out_type, stream)) return error;
    in.beside = {};
  }
  if (in.plain.data != nullptr) {
    const int64_t behind = in.row == nullptr ? in.beside.rows : 0;
    if (const Error error = QuantisePlain(in, behind, out_type, stream)) return error;
  }
  if (by == ScaledWay::kAnyGpu) return ScaledOnAnyGpu(in, out, out_type, stream);
  if (!is_taken) return "the kernels for Hopper do not take this product";
  return ScaledTurned(by, in, out, device.processors, stream);
}

}  // namespace

Error ScaledMatmul(const ScaledMatmulInput& in, const Rows& out, ElementType out_type,
                   Stream stream) {
  return Run(nullptr, in, out, out_type, stream);
}

Error ScaledMatmulBy(ScaledWay way, const ScaledMatmulInput& in, const Rows& out,
                     ElementType out_type, Stream stream) {
  return Run(&way, in, out, out_type, stream);
}

}  // namespace baton_ops::cuda
