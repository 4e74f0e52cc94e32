// The products of FP8 for Hopper under a C name; arguments are laid out by
// baton_testing/host_scaled.py. Returns null or what went wrong.
#include "baton_ops/gate.cuh"
#include "scaled_words.h"
#include "shims/hopper.h"

using namespace baton_ops::cuda;

extern "C" {

void host_plant(int fault) { host_cuda::planted = fault; }

// How many rows there are of x, and of the weight, of all experts together. `beside`: values and
// scales of a weight that so many of the output's last rows are multiplied with, or nulls.
Error host_scaled_turned(const int64_t* words, int way, int processors, int64_t x_rows,
                         int64_t weight_rows, void* const* beside, int64_t beside_rows) {
  ScaledCall call(words);
  ScaledMatmulInput& in = call.in;
  in.rows -= beside_rows;
  in.beside.rows = beside_rows;
  in.beside.weight = {static_cast<uint8_t*>(beside[0]), static_cast<float*>(beside[1])};
  const int64_t groups = (in.in + in.group - 1) / in.group, of_scale = sizeof(float);
  const auto range = [](const void* begin, int64_t bytes) {
    const auto first = static_cast<const char*>(begin);
    return std::pair{first, first + bytes};
  };
  host_cuda::written_before = in.x.values;
  host_cuda::readable = {
      range(in.x.values, x_rows * in.in), range(in.x.scales, x_rows * groups * of_scale),
      range(in.weight.values, weight_rows * in.in),
      range(in.weight.scales, (weight_rows >> in.scale_shift) * groups * of_scale)};
  if (beside_rows > 0) {
    const int64_t rows = (in.is_gated ? 2 : 1) * in.out;
    host_cuda::readable.push_back(range(beside[0], rows * in.in));
    host_cuda::readable.push_back(range(beside[1], (rows >> in.scale_shift) * groups * of_scale));
  }
  // The grid before writes x; one before it, where experts' rows begin.
  host_cuda::Late late;
  late.Hide(in.x.values, x_rows * in.in);
  late.Hide(in.x.scales, x_rows * groups * of_scale);
  if (in.row != nullptr) late.Hide(in.row, in.rows * int64_t{sizeof(int32_t)}, 0);
  if (!HopperTakesScaled(in, call.out, call.type)) return "the product is not taken";
  return ScaledTurned(static_cast<ScaledWay>(way), in, call.out, processors, nullptr);
}

// Of rows that are not quantised yet. `beside`: a row, values and scales of its weight, its output;
// or nulls.
Error host_scaled_row(const int64_t* words, const void* plain, int64_t plain_rows, int processors,
                      int64_t weight_rows, bool is_known, void* const* beside) {
  ScaledCall call(words);
  ScaledMatmulInput& in = call.in;
  const int64_t of_element = call.type == ElementType::kFloat32 ? 4 : 2;
  in.plain = {const_cast<void*>(plain), in.in};
  in.plain_rows = plain_rows;
  in.are_starts_known = is_known;
  in.beside.plain = {beside[0], in.in};
  in.beside.weight = {static_cast<uint8_t*>(beside[1]), static_cast<float*>(beside[2])};
  in.beside.out = {beside[3], in.out};
  in.beside.rows = beside[1] == nullptr ? 0 : 1;
  const auto range = [](const void* begin, int64_t bytes) {
    const auto first = static_cast<const char*>(begin);
    return std::pair{first, first + bytes};
  };
  const int64_t groups = (in.in + in.group - 1) / in.group, of_scale = sizeof(float);
  const int64_t rows_beside = beside[1] == nullptr ? 0 : (in.is_gated ? 2 : 1) * in.out;
  host_cuda::readable = {
      range(in.weight.values, weight_rows * in.in),
      range(in.weight.scales, (weight_rows >> in.scale_shift) * groups * of_scale),
      range(beside[1], rows_beside * in.in),
      range(beside[2], (rows_beside >> in.scale_shift) * groups * of_scale)};
  host_cuda::Late late;
  late.Hide(plain, plain_rows * in.in * of_element);
  if (beside[0] != nullptr && beside[0] != plain) late.Hide(beside[0], in.in * of_element);
  if (in.experts > 0 && !is_known) {
    late.Hide(in.starts, (in.experts + 1) * int64_t{sizeof(int32_t)});
  }
  if (!HopperTakesScaled(in, call.out, call.type)) return "the product is not taken";
  if (!HopperTakesRow(in)) return "the row is not taken";
  return ScaledRow(in, call.out, processors, nullptr);
}

int host_scaled_ways() { return kScaledWays; }

// Adds sums times scales to totals, rounded once for both.
void host_add_scaled(const float* sums, const float* scales, float* totals, int64_t count) {
  for (int64_t i = 0; i < count; ++i) totals[i] = fmaf(sums[i], scales[i], totals[i]);
}

// As the op that takes gates and ups from memory computes it.
void host_silu_mul(const float* gates, const float* ups, float* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = SiluMulOf(gates[i], ups[i]);
}
}
