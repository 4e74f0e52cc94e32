// The launches of Hopper's matmuls under C names; arguments are laid out by
// baton_testing/host_matmul.py. Returns null or what went wrong.
#include "baton_ops/gate.cuh"
#include "orders.h"
#include "rewritten/hopper_matmul.h"
#include "shims/hopper.h"

using namespace baton_ops::cuda;

constexpr int64_t kFewRows = 64;  // as matmul_few.cuh has it

extern "C" {

void host_settings(uint64_t seed, int planted) {
  host_cuda::settings.seed = seed;
  host_cuda::planted = planted;
}

Error host_matmul(const HopperMatmul* call, int way) {
  const auto by = static_cast<MatmulWay>(way);
  const MatmulInput& in = call->input;
  const auto x = static_cast<const char*>(in.x.data), weight = static_cast<const char*>(in.weight);
  host_cuda::written_before = x;
  host_cuda::readable = {{x, x + ((in.rows - 1) * in.x.stride + in.in) * 2},
                         {weight, weight + in.out * in.in * 2}};
  host_cuda::lets_early = false;
  return by <= MatmulWay::kFew256 ? MatmulFew(*call, by, nullptr) : MatmulMany(*call, by, nullptr);
}

Error host_grouped(const HopperMatmul* call, const int32_t* starts, int64_t groups, int way,
                   int are_known) {
  const MatmulInput& in = call->input;
  const auto x = static_cast<const char*>(in.x.data), weight = static_cast<const char*>(in.weight);
  host_cuda::written_before = x;
  host_cuda::readable = {{x, x + ((in.rows - 1) * in.x.stride + in.in) * 2},
                         {weight, weight + groups * in.out * in.in * 2}};
  host_cuda::lets_early = false;
  // A gated product follows the grid that writes them, unless it is told that they are known;
  // another may read them early if rows are few.
  const bool is_early = (are_known || !call->is_gated) && in.rows <= kFewRows;
  host_cuda::Late late;
  if (!is_early) late.Hide(starts, (groups + 1) * int64_t{sizeof(int32_t)});
  return MatmulGrouped({*call, starts, groups, are_known != 0}, static_cast<MatmulWay>(way),
                       nullptr);
}

// Whether the last launch let the next one start before it had waited itself.
bool host_lets_early() { return host_cuda::lets_early; }

// As the op that takes gates and ups from memory computes it.
void host_silu_mul(const float* gates, const float* ups, float* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = SiluMulOf(gates[i], ups[i]);
}

int host_ways() { return kMatmulWays; }
}
