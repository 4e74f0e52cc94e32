// Coefficients of 2^f = 1 + f * (c1 + f * (c2 + ...)) on [-0.5, 0.5]: the minimax polynomial of
// degree 6 in relative error with p(0) = 1 fixed (linear programme over 4,001 Chebyshev points);
// 2.0e-9 in exact arithmetic, 9.7e-8 in fp32.
#ifndef BATON_OPS_CPU_EXP2_POLY_H_
#define BATON_OPS_CPU_EXP2_POLY_H_

namespace baton_ops::cpu {

constexpr float kExp2C1 = 0x1.62e430p-1f;
constexpr float kExp2C2 = 0x1.ebfbdcp-3f;
constexpr float kExp2C3 = 0x1.c6aee8p-5f;
constexpr float kExp2C4 = 0x1.3b2d36p-7f;
constexpr float kExp2C5 = 0x1.5f3f02p-10f;
constexpr float kExp2C6 = 0x1.420d1ap-13f;

// Smaller exponents are raised to this one, which keeps 2^y a normal number; a row of 2^31 logits
// gains less than 1e-27 of its largest term by it.
constexpr float kExp2Lowest = -125.0f;

}  // namespace baton_ops::cpu

#endif  // BATON_OPS_CPU_EXP2_POLY_H_
