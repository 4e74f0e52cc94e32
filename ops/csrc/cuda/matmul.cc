// Which kernel multiplies. Between those for Hopper and the generic one the weight, the type and
// the device decide; among those for Hopper, whose bits are the same, what was measured does.
#include <algorithm>
#include <limits>

#include "hopper_device.h"
#include "hopper_matmul.h"

namespace baton_ops::cuda {
namespace {

constexpr int64_t kElements = 8;  // of bf16 in 16 bytes, what the copy engine asks for

// What a way costs for each tile that a multiprocessor has, a step of 64 along K, with weights from
// memory: nanoseconds of an H200.
struct Cost {
  MatmulWay way;
  int rows, columns, cluster;
  bool shares_x;
  double of_tile;
};

constexpr Cost kCosts[] = {
    {MatmulWay::kFew32, 64, 32, 1, false, 118},
    {MatmulWay::kFew48, 64, 48, 1, false, 130},
    {MatmulWay::kFew64, 64, 64, 1, false, 178},
    {MatmulWay::kFew96, 64, 96, 1, false, 250},
    {MatmulWay::kFew128, 64, 128, 1, false, 270},
    {MatmulWay::kMany32, 128, 32, 1, false, 262},
    {MatmulWay::kMany64, 128, 64, 1, false, 310},
    {MatmulWay::kMany96By2, 128, 96, 2, false, 355},
    {MatmulWay::kMany128By2OfX, 128, 128, 2, true, 455},
    {MatmulWay::kMany128By2, 128, 128, 2, false, 440},
    {MatmulWay::kMany192By2, 128, 192, 2, false, 638},
    {MatmulWay::kMany192, 128, 192, 1, false, 640},
    {MatmulWay::kMany256By2, 128, 256, 2, false, 806},
    {MatmulWay::kMany256, 128, 256, 1, false, 805},
};
// Ways for few rows lose against others where a multiprocessor has more than one tile.
constexpr double kFewAgain = 1.2;
constexpr int64_t kMostRowsOfFewWays = 256;

int64_t DivideUp(int64_t a, int64_t b) { return (a + b - 1) / b; }

double CostOf(const Cost& cost, const MatmulInput& in, int processors) {
  int64_t rows = DivideUp(in.rows, cost.rows), columns = DivideUp(in.out, cost.columns);
  if (cost.cluster > 1) {
    int64_t& shared = cost.shares_x ? columns : rows;
    shared = DivideUp(shared, cost.cluster);
  }
  const int64_t turns = DivideUp(rows * columns, processors / cost.cluster);
  const bool is_slower = turns > 1 && cost.way <= MatmulWay::kFew128;
  return static_cast<double>(turns) * cost.of_tile * (is_slower ? kFewAgain : 1);
}

// Up to 64 rows time goes into reading the weight, so what counts is how wide a part of it the
// busiest multiprocessor has; of equal ones the widest tiles.
MatmulWay FewWayFor(const MatmulInput& in, int processors) {
  MatmulWay best{};
  int64_t least = std::numeric_limits<int64_t>::max();
  for (const Cost& cost : kCosts) {
    if (cost.way > MatmulWay::kFew128) break;
    const int64_t width = DivideUp(DivideUp(in.out, cost.columns), processors) * cost.columns;
    if (width <= least) best = cost.way;
    least = std::min(least, width);
  }
  return best;
}

MatmulWay WayFor(const MatmulInput& in, int processors) {
  if (in.rows <= kMostFewRows) return FewWayFor(in, processors);
  const Cost* best = nullptr;
  for (const Cost& cost : kCosts) {
    if (cost.way <= MatmulWay::kFew128 && in.rows > kMostRowsOfFewWays) continue;
    if (!best || CostOf(cost, in, processors) <= CostOf(*best, in, processors)) best = &cost;
  }
  return best->way;
}

Error Check(const MatmulInput& in, const Rows& out, bool is_fp32) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() / 2;
  if (!IsOnVector(in.x.data) || in.x.stride % kElements) {
    return "x must begin and have its rows at multiples of 16 bytes";
  }
  if (!IsOnVector(in.weight)) return "weight must begin at a multiple of 16 bytes";
  if (!IsOnVector(out.data) || out.stride % (is_fp32 ? 2 : kElements)) {
    return "out must begin and have its rows at multiples of 16 bytes";
  }
  return std::max({in.rows, in.in, in.out}) > kMost ? "x or weight is too large" : nullptr;
}

Error RunOnHopper(MatmulWay way, const MatmulInput& in, const Rows& out, bool is_fp32,
                  int processors, Stream stream) {
  if (const Error error = Check(in, out, is_fp32)) return error;
  const HopperMatmul call{in, out, is_fp32, processors};
  return way <= MatmulWay::kFew128 ? MatmulFew(call, way, stream) : MatmulMany(call, way, stream);
}

bool Fits(const MatmulInput& in) {
  return in.type == ElementType::kBFloat16 && in.in > 0 && in.in % kElements == 0 &&
         in.out % kElements == 0;
}

}  // namespace

bool HopperTakes(const MatmulInput& input) { return Fits(input) && CurrentHopper().is_there; }

Error Matmul(const MatmulInput& input, const Rows& out, ElementType out_type, Stream stream) {
  if (input.rows == 0 || input.out == 0) return nullptr;
  const HopperDevice device = CurrentHopper();
  if (!device.is_there || !Fits(input)) return GenericMatmul(input, out, out_type, stream);
  return RunOnHopper(WayFor(input, device.processors), input, out,
                     out_type == ElementType::kFloat32, device.processors, stream);
}

Error MatmulBy(MatmulWay way, const MatmulInput& input, const Rows& out, ElementType out_type,
               Stream stream) {
  if (input.rows == 0 || input.out == 0) return nullptr;
  const HopperDevice device = CurrentHopper();
  if (!device.is_there || !Fits(input)) return "the kernels for Hopper do not take this weight";
  return RunOnHopper(way, input, out, out_type == ElementType::kFloat32, device.processors, stream);
}

}  // namespace baton_ops::cuda
