// The gated activation of an element, silu(gate) * up, in fp32: silu is rounded, then the product.
#ifndef BATON_OPS_GATE_CUH_
#define BATON_OPS_GATE_CUH_

namespace baton_ops::cuda {

__device__ __forceinline__ float SiluMulOf(float gate, float up) {
  const float silu = __fdiv_rn(gate, __fadd_rn(1.0f, expf(-gate)));
  return __fmul_rn(silu, up);
}

// The same bits, for a gate that is a bf16, without the branch and the call that a division of any
// two numbers has: a product under way would have to wait for a call. The quotient is corrected as
// a division's is where its operands are neither very large nor very small. A quarter of both keeps
// the reciprocal from being subnormal; of tiny gates the divisor is 2 and all of it exact. Where
// the correction makes NaN, the gate or the divisor is infinite, and the first estimate is right.
__device__ __forceinline__ float SiluMulInLine(float gate, float up) {
  const float quarter = __fmul_rn(gate, 0.25f), divisor = __fmaf_rn(expf(-gate), 0.25f, 0.25f);
  float estimate;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(estimate) : "f"(divisor));
  const float error = __fmaf_rn(-divisor, estimate, 1.0f);
  const float reciprocal = __fmaf_rn(estimate, error, estimate);
  const float quotient = __fmul_rn(quarter, reciprocal);
  // Negated, so that zeros keep their sign.
  const float remainder = __fmaf_rn(divisor, quotient, -quarter);
  const float corrected = __fmaf_rn(-remainder, reciprocal, quotient);
  const float silu = corrected == corrected ? corrected : __fmul_rn(quarter, estimate);
  return __fmul_rn(silu, up);
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_GATE_CUH_
