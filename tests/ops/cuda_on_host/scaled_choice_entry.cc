// Which way ScaledMatmul (scaled.cc) takes a product of FP8: what it calls notes that, and computes
// nothing.
#include "rewritten/hopper_scaled.h"

namespace baton_ops::cuda {
namespace {

int taken = -1;
bool is_for_hopper = true;
int quantised = 0, launched = 0;

Error Take(ScaledWay way) {
  launched++;
  taken = static_cast<int>(way);
  return nullptr;
}

}  // namespace

bool HopperTakesScaled(const ScaledMatmulInput&, const Rows&, ElementType) { return is_for_hopper; }
bool HopperTakesRow(const ScaledMatmulInput&) { return false; }

Error QuantiseRows(const QuantiseInput&, const ScaledRows&, Stream) {
  quantised++;
  return nullptr;
}
Error ScaledOnAnyGpu(const ScaledMatmulInput&, const Rows&, ElementType, Stream) {
  return Take(ScaledWay::kAnyGpu);
}
Error ScaledTurned(ScaledWay way, const ScaledMatmulInput&, const Rows&, int, Stream) {
  return Take(way);
}
Error ScaledRow(const ScaledMatmulInput&, const Rows&, int, Stream) {
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

// The second product of so many pairs of some tokens' experts, and beside it what these share,
// which lies right behind; its weight, or that one's scales, begin so many bytes off a vector.
Error host_scaled_beside(int64_t pairs, int64_t tokens, int64_t experts, int weight_off,
                         int scales_off, int* n_launched, int* n_quantised) {
  constexpr int64_t kColumns = 256, kOut = 64;
  alignas(16) static char memory[32];
  static char rows[1 << 22];
  static float scales[1 << 14];
  ScaledMatmulInput in{};
  in.rows = in.plain_rows = pairs;
  in.in = kColumns;
  in.out = kOut;
  in.group = kScaledGroup;
  in.experts = experts;
  in.plain = {rows, kColumns};
  in.x = {reinterpret_cast<uint8_t*>(rows), scales};
  const Rows to{rows, kOut};
  in.beside.rows = tokens;
  in.beside.plain = {rows + pairs * kColumns * 2, kColumns};
  in.beside.x = {in.x.values + pairs * kColumns, scales + pairs * 2};
  in.beside.weight = {reinterpret_cast<uint8_t*>(memory + weight_off),
                      reinterpret_cast<float*>(memory + scales_off)};
  in.beside.out = {rows + pairs * kOut * 2, kOut};
  launched = quantised = 0;
  const Error error = ScaledMatmul(in, to, ElementType::kBFloat16, nullptr);
  *n_launched = launched;
  *n_quantised = quantised;
  return error;
}

}  // extern "C"
