// E4m3 numbers as halves by plain arithmetic, of baton_ops/mma.cuh itself, under a C name: of that
// header's instructions the one has a stand-in here.
#include "shims/device_language.h"

inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t places) {
  const uint64_t bytes = uint64_t{high} << 32 | low;
  uint32_t chosen = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t place = places >> 4 * i & 7u;
    chosen |= static_cast<uint32_t>(bytes >> 8 * place & 0xffu) << 8 * i;
  }
  return chosen;
}

namespace host_cuda {

inline float NumberOfHalf(uint32_t half) {
  const int exponent = static_cast<int>(half >> 10 & 31u);
  const auto mantissa = static_cast<float>(half & 1023u) + (exponent != 0 ? 1024.0f : 0.0f);
  const float size = exponent == 31 ? NAN : ldexpf(mantissa, max(exponent, 1) - 25);
  return half & 0x8000u ? -size : size;
}

// The nearest, even on ties.
inline uint32_t HalfNearest(float number) {
  const uint32_t sign = signbit(number) ? 0x8000u : 0u;
  const float size = fabsf(number);
  if (!(size < 65520.0f)) return sign | (size != size ? 0x7fffu : 0x7c00u);
  const int exponent = size == 0.0f ? -14 : max(ilogbf(size), -14);
  const auto steps = static_cast<uint32_t>(nearbyintf(ldexpf(size, 10 - exponent)));
  return sign | ((static_cast<uint32_t>(exponent + 14) << 10) + steps);
}

inline uint32_t MultiplyHalves(uint32_t a, uint32_t b) {
  const auto product = [&](int shift) {
    return HalfNearest(NumberOfHalf(a >> shift & 0xffffu) * NumberOfHalf(b >> shift & 0xffffu));
  };
  return product(0) | product(16) << 16;
}

template <class... Arguments>
uint32_t NotCalled(Arguments...) {
  return 0;
}

}  // namespace host_cuda

#include "baton_ops/mma.cuh"

extern "C" {

// Of count words of four numbers: two words each.
void host_halves_of_four(const uint32_t* fours, uint32_t* halves, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    uint32_t pairs[2];
    baton_ops::cuda::HalvesOfFour(fours[i], pairs);
    memcpy(halves + i * 2, pairs, sizeof(pairs));
  }
}
}
