// Which way ScaledMatmul (scaled.cc) takes a product of FP8: what it calls notes that, and computes
// nothing.
#include "rewritten/hopper_scaled.h"

namespace baton_ops::cuda {
namespace {

int taken = -1;
bool is_for_hopper = true;
int quantised = 0;

Error Take(ScaledWay way) {
  taken = static_cast<int>(way);
  return nullptr;
}

}  // namespace

bool HopperTakesScaled(const ScaledMatmulInput&, ElementType) { return is_for_hopper; }
bool HopperTakesRow(const ScaledMatmulInput&) { return false; }

Error QuantiseRows(const QuantiseInput&, const ScaledRows&, Stream) {
  quantised++;
  return nullptr;
}
Error ScaledOnAnyGpu(const ScaledMatmulInput&, const Rows&, ElementType, Stream) {
  return Take(ScaledWay::kAnyGpu);
}
Error ScaledFew(const ScaledMatmulInput&, const Rows&, ElementType, int, Stream) {
  return Take(ScaledWay::kFew32x8);
}
Error ScaledTurned(ScaledWay way, const ScaledMatmulInput&, const Rows&, ElementType, int, Stream) {
  return Take(way);
}
Error ScaledRow(const ScaledMatmulInput&, const Rows&, ElementType, int, Stream) {
  return "a row of its own kernel has no way";
}

}  // namespace baton_ops::cuda

using namespace baton_ops::cuda;

extern "C" {

int host_scaled_ways() { return kScaledWays; }

void host_gpu(int major, int minor, int processors, bool takes) {
  host_cuda::gpu = {{major, minor, processors}};
  is_for_hopper = takes;
}

// `way` is the one that is asked for, -1 for none; `plain` whether rows are yet to be quantised.
// Returns null or what is wrong.
Error host_scaled_choice(int64_t rows, int64_t columns, int64_t out, bool is_gated, int64_t experts,
                         bool plain, int way, int* found, int* n_quantised) {
  static char memory[16];
  ScaledMatmulInput in{};
  in.rows = in.plain_rows = rows;
  in.in = columns;
  in.out = out;
  in.group = kScaledGroup;
  in.is_gated = is_gated;
  in.experts = experts;
  if (plain) in.plain = {memory, columns};
  const Rows to{memory, out};
  taken = -1;
  quantised = 0;
  const Error error = way < 0 ? ScaledMatmul(in, to, ElementType::kBFloat16, nullptr)
                              : ScaledMatmulBy(static_cast<ScaledWay>(way), in, to,
                                               ElementType::kBFloat16, nullptr);
  *found = taken;
  *n_quantised = quantised;
  return error;
}

}  // extern "C"
