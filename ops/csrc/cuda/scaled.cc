// Which kernel multiplies rows of FP8: their bits are the same, so what was measured decides.
#include "hopper_device.h"
#include "hopper_scaled.h"

namespace baton_ops::cuda {
namespace {

ScaledWay WayFor(const ScaledMatmulInput& in) {
  const int64_t each = in.experts == 0 ? in.rows : in.rows / in.experts;
  if (each <= 16) return ScaledWay::kAnyGpu;
  return each <= 32 ? ScaledWay::k64x32 : each <= 64 ? ScaledWay::k64x64 : ScaledWay::k128x128;
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
  const bool is_taken = device.is_there && HopperTakesScaled(in, out_type);
  const ScaledWay by = way != nullptr ? *way : is_taken ? WayFor(in) : ScaledWay::kAnyGpu;
  if (by == ScaledWay::kAnyGpu) return ScaledOnAnyGpu(in, out, out_type, stream);
  if (!is_taken) return "the kernels for Hopper do not take this product";
  return ScaledTurned(by, in, out, out_type, device.processors, stream);
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
