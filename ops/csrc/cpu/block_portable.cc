// Block passes in plain C++, written so that a compiler can vectorise them for any target.
#include <limits>

#include "baton_ops/cpu/block.h"
#include "baton_ops/order.h"
#include "cpu/exp2_poly.h"

namespace baton_ops::cpu {
namespace {

constexpr int kLanes = 8;

float FloatOfHalf(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t exponent = (half >> 10) & 0x1fu;
  const uint32_t mantissa = half & 0x3ffu;
  if (exponent == 0x1fu) return FloatOfBits(sign | 0x7f800000u | (mantissa << 13));
  if (exponent != 0) return FloatOfBits(sign | ((exponent + 112) << 23) | (mantissa << 13));
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
  return sign ? -magnitude : magnitude;
}

// For y in [kExp2Lowest, 0], or NaN.
inline float Exp2(float y) {
  // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low mantissa bits.
  constexpr float kRound = 12582912.0f;
  const float shifted = y + kRound;
  const float f = y - (shifted - kRound);
  float p = kExp2C6;
  p = p * f + kExp2C5;
  p = p * f + kExp2C4;
  p = p * f + kExp2C3;
  p = p * f + kExp2C2;
  p = p * f + kExp2C1;
  p = p * f + 1.0f;
  // A NaN makes a meaningless power here, and stays one in the product.
  return p * FloatOfBits((BitsOfFloat(shifted) << 23) + 0x3f800000u);
}

// As the machine's max instruction has it: if either is a NaN, the second.
inline float Larger(float a, float b) { return a > b ? a : b; }

void FromBfloat16(const uint16_t* source, int count, float* x) {
  for (int i = 0; i < count; ++i) x[i] = FloatOfBits(static_cast<uint32_t>(source[i]) << 16);
}

void FromFloat16(const uint16_t* source, int count, float* x) {
  for (int i = 0; i < count; ++i) x[i] = FloatOfHalf(source[i]);
}

void GroupMax(const float* x, int groups, float* group_max) {
  for (int g = 0; g < groups; ++g, x += kGroupLogits) {
    float best[kGroupLogits / 4];
    for (int j = 0; j < kGroupLogits / 4; ++j) best[j] = -std::numeric_limits<float>::infinity();
    for (int i = 0; i < kGroupLogits; i += kGroupLogits / 4) {
      for (int j = 0; j < kGroupLogits / 4; ++j) best[j] = Larger(x[i + j], best[j]);
    }
    for (int half = kGroupLogits / 8; half > 0; half /= 2) {
      for (int j = 0; j < half; ++j) best[j] = Larger(best[j + half], best[j]);
    }
    group_max[g] = best[0];
  }
}

double GroupSum(const float* x, float max, float scale) {
  float term[kGroupLogits];
  // One loop for both would hold a branch, which compilers do not vectorise.
  for (int i = 0; i < kGroupLogits; ++i) term[i] = Larger(kExp2Lowest, (x[i] - max) * scale);
  for (int i = 0; i < kGroupLogits; ++i) term[i] = Exp2(term[i]);
  float lane[kLanes] = {};
  for (int i = 0; i < kGroupLogits; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) lane[j] += term[i + j];
  }
  double sum = 0;
  for (float value : lane) sum += value;
  return sum;
}

// "Not below" and "not at or below" are also true for a NaN.
bool Means(LogitThreshold threshold, float x) {
  return threshold.strict ? !(x <= threshold.value) : !(x < threshold.value);
}

int GroupCount(const float* x, LogitThreshold threshold) {
  int count = 0;
  for (int i = 0; i < kGroupLogits; ++i) count += Means(threshold, x[i]);
  return count;
}

BlockSum Sum(const float* x, int groups, float max, float scale, LogitThreshold threshold) {
  BlockSum total{0, 0};
  for (int g = 0; g < groups; ++g, x += kGroupLogits) {
    total.sum += GroupSum(x, max, scale);
    total.count += GroupCount(x, threshold);
  }
  return total;
}

void Select(const float* x, LogitThreshold threshold, uint64_t* group_mask) {
  for (int word = 0; word < kGroupLogits / 64; ++word) {
    group_mask[word] = 0;
    for (int bit = 0; bit < 64; ++bit) {
      group_mask[word] |= static_cast<uint64_t>(Means(threshold, x[word * 64 + bit])) << bit;
    }
  }
}

}  // namespace

const BlockKernels kPortableKernels = {"portable", FromBfloat16, FromFloat16,
                                       GroupMax,   Sum,          Select};

}  // namespace baton_ops::cpu
