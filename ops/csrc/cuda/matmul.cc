// Which kernel multiplies. Between those for Hopper and the generic one the weight, the type and
// the device decide; among those for Hopper, whose bits are the same, what was measured does.
#include <algorithm>
#include <limits>

#include "experts.h"
#include "hopper_device.h"
#include "hopper_matmul.h"

namespace baton_ops::cuda {
namespace {

constexpr int64_t kElements = 8;  // of bf16 in 16 bytes, what the copy engine asks for

// A way's tiles, and what one costs that a multiprocessor has, a step of 64 along K: nanoseconds of
// an H200.
struct Cost {
  MatmulWay way;
  int rows, columns;
  double of_tile;
};

constexpr Cost kCosts[] = {
    {MatmulWay::kFew32, 64, 32, 118},       {MatmulWay::kFew48, 64, 48, 135},
    {MatmulWay::kFew64, 64, 64, 157},       {MatmulWay::kFew96, 64, 96, 200},
    {MatmulWay::kFew128, 64, 128, 225},     {MatmulWay::kFew160, 64, 160, 262},
    {MatmulWay::kFew192, 64, 192, 290},     {MatmulWay::kFew256, 64, 256, 345},
    {MatmulWay::kMany64, 128, 64, 240},     {MatmulWay::kMany96, 128, 96, 290},
    {MatmulWay::kMany128, 128, 128, 355},   {MatmulWay::kMany160, 128, 160, 440},
    {MatmulWay::kMany192, 128, 192, 520},   {MatmulWay::kMany256, 128, 256, 690},
    {MatmulWay::kTurned160, 160, 192, 650}, {MatmulWay::kTurned192, 192, 192, 800},
};
// What all multiprocessors together read of the L2 cache in a nanosecond.
constexpr double kCacheBytes = 13'000;
constexpr int64_t kMostRowsOfFewWays = 512;
// A turned tile of a gated product is not stored behind the next one's products: an estimated
// twentieth more, which no cost above has. With more rows the costs promise less, mostly under 1 %.
constexpr int64_t kMostRowsOfTurnedGates = 384;

int64_t DivideUp(int64_t a, int64_t b) { return (a + b - 1) / b; }

double CostOf(const Cost& cost, const MatmulInput& in, int processors) {
  constexpr double kStepBytes = 128;  // of a row of x or of the weight
  const int64_t rows = DivideUp(in.rows, cost.rows), tiles = rows * DivideUp(in.out, cost.columns);
  const int64_t height = DivideUp(DivideUp(in.rows, rows), 8) * 8;
  const double bytes = static_cast<double>(std::min<int64_t>(tiles, processors)) * kStepBytes *
                       static_cast<double>(height + cost.columns);
  return static_cast<double>(DivideUp(tiles, processors)) *
         std::max(cost.of_tile, bytes / kCacheBytes);
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

// Among rows that are many, those of a gated product store a tile while the next is multiplied, for
// which tiles of 256 columns leave too few registers.
MatmulWay WayFor(const MatmulInput& in, bool is_gated, int processors) {
  if (in.rows <= kMostFewRows) return FewWayFor(in, processors);
  const Cost* best = nullptr;
  for (const Cost& cost : kCosts) {
    if (cost.way <= MatmulWay::kFew256 && in.rows > kMostRowsOfFewWays) continue;
    if (cost.way == MatmulWay::kMany256 && is_gated) continue;
    const bool is_turned = cost.way >= MatmulWay::kTurned160;
    if (is_turned && is_gated && in.rows > kMostRowsOfTurnedGates) continue;
    if (!best || CostOf(cost, in, processors) <= CostOf(*best, in, processors)) best = &cost;
  }
  return best->way;
}

Error Check(const HopperMatmul& call) {
  const MatmulInput& in = call.input;
  const Rows& out = call.out;
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() / 2;
  if (!IsOnVector(in.x.data) || in.x.stride % kElements) {
    return "x must begin and have its rows at multiples of 16 bytes";
  }
  if (!IsOnVector(in.weight)) return "weight must begin at a multiple of 16 bytes";
  if (!call.is_gated && (!IsOnVector(out.data) || out.stride % (call.is_fp32 ? 2 : kElements))) {
    return "out must begin and have its rows at multiples of 16 bytes";
  }
  return std::max({in.rows, in.in, in.out}) > kMost ? "x or weight is too large" : nullptr;
}

Error RunOnHopper(MatmulWay way, const HopperMatmul& call, Stream stream) {
  if (const Error error = Check(call)) return error;
  return way <= MatmulWay::kFew256 ? MatmulFew(call, way, stream) : MatmulMany(call, way, stream);
}

bool Fits(const MatmulInput& in) {
  return in.type == ElementType::kBFloat16 && in.in > 0 && in.in % kElements == 0 &&
         in.out % kElements == 0;
}

constexpr Error kNotTaken = "the kernels for Hopper do not take this weight";

// Runs a product by one way, or by the quickest; kNotTaken where there is none.
Error Run(const MatmulWay* way, HopperMatmul call, Stream stream) {
  const MatmulInput& in = call.input;
  if (in.rows == 0 || in.out == 0) return nullptr;
  const HopperDevice device = CurrentHopper();
  if (!device.is_there || !Fits(in)) return kNotTaken;
  call.processors = device.processors;
  return RunOnHopper(way ? *way : WayFor(in, call.is_gated, call.processors), call, stream);
}

// Time goes into reading the weights of the experts that are there, which tiles of 128 columns do
// best. With many rows of each expert wider tiles read x less often, and with few tiles narrower
// ones are more: measured on an H200 for 1 to 2,048 tokens of Qwen3-30B-A3B's layer
// (docs/benchmarks/mixtures.md). Of a single token, whose rows are all experts', gates and ups by
// 96 columns share out more evenly: there are about as many tiles as multiprocessors, or twice as
// many.
MatmulWay GroupedWayFor(const GroupedInput& in, bool is_gated, int processors) {
  const int64_t rows = in.product.rows, many = is_gated ? 16 : 64;
  if (rows >= many * in.groups) return MatmulWay::kFew256;
  if (is_gated && in.product.x.stride == 0) return MatmulWay::kFew96;
  const int64_t row_tiles = std::min(rows, in.groups + rows / kMostFewRows);
  for (const MatmulWay way : {MatmulWay::kFew128, MatmulWay::kFew64}) {
    const int64_t columns = kCosts[static_cast<int>(way)].columns;
    if (DivideUp(in.product.out, columns) * row_tiles * 10 >= processors * 7) return way;
  }
  return MatmulWay::kFew32;
}

// By one way, or by the quickest, or by the generic kernel.
Error RunGrouped(const MatmulWay* way, const GroupedInput& in, bool is_gated, const Rows& out,
                 Stream stream) {
  if (in.product.rows == 0 || in.product.out == 0) return nullptr;
  const HopperDevice device = CurrentHopper();
  if (!device.is_there || !Fits(in.product)) return GenericGrouped(in, is_gated, out, stream);
  const HopperMatmul product{in.product, out, false, is_gated, device.processors};
  if (const Error error = Check(product)) return error;
  const HopperGrouped call{product, in.starts, in.groups, in.are_known};
  return MatmulGrouped(call, way ? *way : GroupedWayFor(in, is_gated, device.processors), stream);
}

}  // namespace

bool HopperTakes(const MatmulInput& input) { return Fits(input) && CurrentHopper().is_there; }

Error Matmul(const MatmulInput& input, const Rows& out, ElementType out_type, Stream stream) {
  const bool is_fp32 = out_type == ElementType::kFloat32;
  const Error error = Run(nullptr, {input, out, is_fp32, false}, stream);
  return error == kNotTaken ? GenericMatmul(input, out, out_type, stream) : error;
}

Error MatmulBy(MatmulWay way, const MatmulInput& input, const Rows& out, ElementType out_type,
               Stream stream) {
  return Run(&way, {input, out, out_type == ElementType::kFloat32, false}, stream);
}

Error GroupedMatmul(const GroupedInput& input, const Rows& out, Stream stream) {
  return RunGrouped(nullptr, input, false, out, stream);
}

Error GroupedGateUpSilu(const GroupedInput& input, const Rows& out, Stream stream) {
  return RunGrouped(nullptr, input, true, out, stream);
}

Error GroupedBy(MatmulWay way, const GroupedInput& input, bool is_gated, const Rows& out,
                Stream stream) {
  return RunGrouped(&way, input, is_gated, out, stream);
}

Error GateUpSilu(const MatmulInput& input, const Rows& out, Stream stream) {
  const Error error = Run(nullptr, {input, out, false, true}, stream);
  return error == kNotTaken ? GenericGateUpSilu(input, out, stream) : error;
}

Error GateUpSiluBy(MatmulWay way, const MatmulInput& input, const Rows& out, Stream stream) {
  return Run(&way, {input, out, false, true}, stream);
}

}  // namespace baton_ops::cuda
