// Block passes for AVX2 + FMA + F16C. The functions carry their target themselves, so no flag can
// leak these instructions into code that runs on an older processor.
#include "baton_ops/cpu/block.h"

#if defined(__x86_64__)

#include <immintrin.h>

#include "baton_ops/order.h"
#include "cpu/exp2_poly.h"

#define BATON_AVX2 __attribute__((target("avx2,fma,f16c")))
#define BATON_AVX2_INLINE BATON_AVX2 __attribute__((always_inline)) inline

namespace baton_ops::cpu {
namespace {

constexpr int kLanes = 8;

BATON_AVX2 void FromBfloat16(const uint16_t* source, int count, float* x) {
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i));
    const __m256i wide = _mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16);
    _mm256_storeu_ps(x + i, _mm256_castsi256_ps(wide));
  }
  for (; i < count; ++i) x[i] = FloatOfBits(static_cast<uint32_t>(source[i]) << 16);
}

BATON_AVX2 void FromFloat16(const uint16_t* source, int count, float* x) {
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i));
    _mm256_storeu_ps(x + i, _mm256_cvtph_ps(bits));
  }
  for (; i < count; ++i) x[i] = _cvtsh_ss(source[i]);
}

BATON_AVX2_INLINE float LargestLane(__m256 v) {
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  m = _mm_max_ss(m, _mm_movehdup_ps(m));
  return _mm_cvtss_f32(m);
}

BATON_AVX2 void GroupMax(const float* x, int groups, float* group_max) {
  const __m256 lowest = _mm256_set1_ps(-__builtin_inff());
  for (int g = 0; g < groups; ++g, x += kGroupLogits) {
    __m256 a = lowest;
    __m256 b = lowest;
    for (int i = 0; i < kGroupLogits; i += 2 * kLanes) {
      // max_ps returns its second operand when either is a NaN: NaNs drop out.
      a = _mm256_max_ps(_mm256_loadu_ps(x + i), a);
      b = _mm256_max_ps(_mm256_loadu_ps(x + i + kLanes), b);
    }
    group_max[g] = LargestLane(_mm256_max_ps(a, b));
  }
}

// For y <= 0 or NaN; a NaN stays one.
BATON_AVX2_INLINE __m256 Exp2(__m256 y) {
  y = _mm256_max_ps(_mm256_set1_ps(kExp2Lowest), y);
  const __m256i n = _mm256_cvtps_epi32(y);
  const __m256 f = _mm256_sub_ps(y, _mm256_cvtepi32_ps(n));
  __m256 p = _mm256_set1_ps(kExp2C6);
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(kExp2C5));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(kExp2C4));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(kExp2C3));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(kExp2C2));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(kExp2C1));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(1.0f));
  const __m256i bits = _mm256_add_epi32(_mm256_castps_si256(p), _mm256_slli_epi32(n, 23));
  return _mm256_castsi256_ps(bits);
}

BATON_AVX2_INLINE double SumLanes(__m256d v) {
  const __m128d half = _mm_add_pd(_mm256_castpd256_pd128(v), _mm256_extractf128_pd(v, 1));
  return _mm_cvtsd_f64(_mm_add_sd(half, _mm_unpackhi_pd(half, half)));
}

BATON_AVX2_INLINE int64_t SumLanes(__m256i v) {
  alignas(32) int32_t lane[kLanes];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lane), v);
  int64_t sum = 0;
  for (int32_t value : lane) sum += value;
  return sum;
}

template <int kCompare>
BATON_AVX2 BlockSum SumBlock(const float* x, int groups, float max, float scale, float threshold) {
  const __m256 vmax = _mm256_set1_ps(max);
  const __m256 vscale = _mm256_set1_ps(scale);
  const __m256 vthreshold = _mm256_set1_ps(threshold);
  __m256d sum = _mm256_setzero_pd();
  __m256i count = _mm256_setzero_si256();
  for (int g = 0; g < groups; ++g, x += kGroupLogits) {
    // Each of 16 lanes adds eight numbers of a group in fp32; groups are added in fp64.
    __m256 a = _mm256_setzero_ps();
    __m256 b = _mm256_setzero_ps();
    for (int i = 0; i < kGroupLogits; i += 2 * kLanes) {
      const __m256 xa = _mm256_loadu_ps(x + i);
      const __m256 xb = _mm256_loadu_ps(x + i + kLanes);
      a = _mm256_add_ps(a, Exp2(_mm256_mul_ps(_mm256_sub_ps(xa, vmax), vscale)));
      b = _mm256_add_ps(b, Exp2(_mm256_mul_ps(_mm256_sub_ps(xb, vmax), vscale)));
      const __m256i hit_a = _mm256_castps_si256(_mm256_cmp_ps(xa, vthreshold, kCompare));
      const __m256i hit_b = _mm256_castps_si256(_mm256_cmp_ps(xb, vthreshold, kCompare));
      count = _mm256_sub_epi32(count, _mm256_add_epi32(hit_a, hit_b));
    }
    const __m256 lanes = _mm256_add_ps(a, b);
    sum = _mm256_add_pd(sum, _mm256_cvtps_pd(_mm256_castps256_ps128(lanes)));
    sum = _mm256_add_pd(sum, _mm256_cvtps_pd(_mm256_extractf128_ps(lanes, 1)));
  }
  return {SumLanes(sum), SumLanes(count)};
}

BATON_AVX2 BlockSum Sum(const float* x, int groups, float max, float scale,
                        LogitThreshold threshold) {
  // "Not below" and "not at or below" are also true for a NaN logit, which ranks above all.
  return threshold.strict ? SumBlock<_CMP_NLE_UQ>(x, groups, max, scale, threshold.value)
                          : SumBlock<_CMP_NLT_UQ>(x, groups, max, scale, threshold.value);
}

template <int kCompare>
BATON_AVX2 void SelectGroup(const float* x, float threshold, uint64_t* group_mask) {
  const __m256 vthreshold = _mm256_set1_ps(threshold);
  for (int word = 0; word < kGroupLogits / 64; ++word) {
    uint64_t mask = 0;
    for (int byte = 0; byte < 8; ++byte, x += kLanes) {
      const __m256 hit = _mm256_cmp_ps(_mm256_loadu_ps(x), vthreshold, kCompare);
      mask |= static_cast<uint64_t>(_mm256_movemask_ps(hit)) << (byte * kLanes);
    }
    group_mask[word] = mask;
  }
}

BATON_AVX2 void Select(const float* x, LogitThreshold threshold, uint64_t* group_mask) {
  threshold.strict ? SelectGroup<_CMP_NLE_UQ>(x, threshold.value, group_mask)
                   : SelectGroup<_CMP_NLT_UQ>(x, threshold.value, group_mask);
}

constexpr BlockKernels kAvx2Kernels = {"avx2", FromBfloat16, FromFloat16, GroupMax, Sum, Select};

}  // namespace

const BlockKernels* Avx2Kernels() {
  const bool available = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                         __builtin_cpu_supports("f16c");
  return available ? &kAvx2Kernels : nullptr;
}

}  // namespace baton_ops::cpu

#else

namespace baton_ops::cpu {

const BlockKernels* Avx2Kernels() { return nullptr; }

}  // namespace baton_ops::cpu

#endif
