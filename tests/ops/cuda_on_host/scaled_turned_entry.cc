// The products of FP8 for Hopper under a C name; arguments are laid out by
// baton_testing/host_scaled.py. Returns null or what went wrong.
#include <vector>

#include "scaled_words.h"
#include "shims/hopper.h"

using namespace baton_ops::cuda;

extern "C" {

// `weight_bytes`: how many there are of the weight, of all experts together.
Error host_scaled_turned(const int64_t* words, int way, int processors, int64_t weight_bytes) {
  ScaledCall call(words);
  const auto weight = reinterpret_cast<const char*>(call.in.weight.values);
  const auto x = reinterpret_cast<const char*>(call.in.x.values);
  host_cuda::written_before = x + call.in.in;  // where halves begin
  host_cuda::readable[0] = {x, x + call.in.rows * BytesOfRow(call.in.in, true)};
  host_cuda::readable[1] = {weight, weight + weight_bytes};
  // The grid before writes where experts' rows begin.
  const int64_t starts = call.in.experts == 0 ? 0 : call.in.experts + 1;
  std::vector<int32_t> seen(static_cast<size_t>(starts), -1);
  host_cuda::late = {seen.data(), call.in.starts, starts};
  if (starts > 0) call.in.starts = seen.data();
  const auto by = static_cast<ScaledWay>(way);
  if (!HopperTakesScaled(call.in, call.type)) return "not taken";
  return ScaledTurned(by, call.in, call.out, call.type, processors, nullptr);
}

int host_scaled_ways() { return kScaledWays; }
}
