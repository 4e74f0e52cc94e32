// Which kernel multiplies rows of FP8: their bits are the same, so what was measured decides.
#include <algorithm>

#include "hopper_device.h"
#include "hopper_scaled.h"

namespace baton_ops::cuda {
namespace {

// A way's tiles, and what a range of one costs that a multiprocessor has: nanoseconds of an H100.
struct Cost {
  ScaledWay way;
  int64_t weight_rows, x_rows;
  double of_range;
};

constexpr Cost kCosts[] = {
    {ScaledWay::k64x16, 64, 16, 470},   {ScaledWay::k64x32, 64, 32, 500},
    {ScaledWay::k64x64, 64, 64, 600},   {ScaledWay::k64x128, 64, 128, 820},
    {ScaledWay::k128x16, 128, 16, 490}, {ScaledWay::k128x32, 128, 32, 590},
    {ScaledWay::k128x64, 128, 64, 800}, {ScaledWay::k128x128, 128, 128, 1300},
};
constexpr double kStart = 4'000;  // nanoseconds, of one of these
// The kernels for any GPU: nanoseconds that a multiprocessor takes for a number of the weight and a
// tile's rows of x. Up to half a tile they read the weight nearly as fast as memory gives it.
constexpr double kAnyOfNumber = 0.079;
constexpr int64_t kAnyRows = 32;

int64_t DivideUp(int64_t a, int64_t b) { return (a + b - 1) / b; }

double CostOf(const Cost& cost, const ScaledMatmulInput& in, int64_t weight_rows, int processors) {
  const int64_t tiles = DivideUp(weight_rows, cost.weight_rows) * DivideUp(in.rows, cost.x_rows);
  const int64_t ranges = DivideUp(tiles, processors) * DivideUp(in.in, kScaledGroup);
  return kStart + static_cast<double>(ranges) * cost.of_range;
}

ScaledWay DenseWayFor(const ScaledMatmulInput& in, int processors) {
  if (in.rows <= kAnyRows / 2) return ScaledWay::kAnyGpu;
  const int64_t weight_rows = (in.is_gated ? 2 : 1) * in.out;
  ScaledWay best = ScaledWay::kAnyGpu;
  double least = static_cast<double>(weight_rows * in.in * DivideUp(in.rows, kAnyRows)) *
                 kAnyOfNumber / processors;
  for (const Cost& cost : kCosts) {
    const double here = CostOf(cost, in, weight_rows, processors);
    if (here < least) best = cost.way;
    least = std::min(least, here);
  }
  return best;
}

// By how many rows an expert has on average, of 128 experts on an H100.
ScaledWay ExpertsWayFor(const ScaledMatmulInput& in) {
  if (in.rows < in.experts / 4) return in.is_gated ? ScaledWay::kAnyGpu : ScaledWay::kFew32x8;
  const int64_t each = in.rows / in.experts;
  if (each <= 8) return ScaledWay::k128x16;
  if (each <= 24) return ScaledWay::k128x32;
  return each <= 56 ? ScaledWay::k128x64 : ScaledWay::k128x128;
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

Error Run(const ScaledWay* way, const ScaledMatmulInput& in, const Rows& out, ElementType out_type,
          Stream stream) {
  if (in.rows == 0 || in.out == 0) return nullptr;
  if (const Error error = Check(in)) return error;
  const HopperDevice device = CurrentHopper();
  if (in.plain.data != nullptr) {
    if (device.is_there && HopperTakesRow(in)) {
      return ScaledRow(in, out, out_type, device.processors, stream);
    }
    const QuantiseInput rows{in.plain, out_type, in.plain_rows, in.in, in.group};
    if (const Error error = QuantiseRows(rows, in.x, stream)) return error;
  }
  const bool is_taken = device.is_there && HopperTakesScaled(in, out_type);
  const ScaledWay by = way != nullptr ? *way
                       : is_taken     ? WayFor(in, device.processors)
                                      : ScaledWay::kAnyGpu;
  if (by == ScaledWay::kAnyGpu) return ScaledOnAnyGpu(in, out, out_type, stream);
  if (!is_taken) return "the kernels for Hopper do not take this product";
  return by == ScaledWay::kFew32x8 ? ScaledFew(in, out, out_type, device.processors, stream)
                                   : ScaledTurned(by, in, out, out_type, device.processors, stream);
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
