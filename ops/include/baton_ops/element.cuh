// What a kernel does with 16 bytes of logits, by element type: packed maxima that keep NaN, counts
// against a threshold, conversion to fp32.
#ifndef BATON_OPS_ELEMENT_CUH_
#define BATON_OPS_ELEMENT_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "baton_ops/order.h"

namespace baton_ops::cuda {

constexpr int kVectorBytes = 16;
constexpr int kVectorWords = 4;

// Maps the bits of one fp32 or of the same 16-bit float twice to an int whose signed order is the
// order of the values, canonical NaN first. Its own inverse. -0 comes just below +0.
__device__ __forceinline__ int SignedOrder(uint32_t bits) {
  const int value = static_cast<int>(bits);
  return value ^ ((value >> 31) & 0x7fffffff);
}

// Smallest value above `value` among 16-bit floats, given as the order of its bits.
__device__ __forceinline__ uint32_t NextUp16(uint32_t bits) {
  if ((bits & 0x7fffu) == 0) return 1u;
  return (bits & 0x8000u) ? bits - 1u : bits + 1u;
}

// Two 16-bit floats per word. Traits gives the type's packed intrinsics.
template <class Traits>
struct Element16 {
  using Raw = uint16_t;
  using Packed = typename Traits::Packed;
  static constexpr int kBytes = 2;
  static constexpr int kPerWord = 2;
  static constexpr int kPerVector = 8;
  static constexpr uint32_t kNegInfWord = Traits::kNegInf * 0x10001u;
  static constexpr uint32_t kInfWord = (Traits::kNegInf & 0x7fffu) * 0x10001u;
  static constexpr uint32_t kNegZeroWord = 0x80008000u;

  // Counts are kept as packed floats: exact up to 256 per half.
  using Counter = Packed;

  static __device__ __forceinline__ Packed AsPacked(uint32_t word) {
    Packed packed;
    memcpy(&packed, &word, sizeof(packed));
    return packed;
  }
  static __device__ __forceinline__ uint32_t AsWord(Packed packed) {
    uint32_t word;
    memcpy(&word, &packed, sizeof(word));
    return word;
  }
  static __device__ __forceinline__ uint32_t Max(uint32_t a, uint32_t b) {
    return AsWord(__hmax2_nan(AsPacked(a), AsPacked(b)));
  }
  static __device__ __forceinline__ int OrderOfMax(uint32_t word) {
    return SignedOrder(Max(word, __byte_perm(word, 0, 0x1032)));
  }
  static __device__ __forceinline__ float ValueOfOrder(int order) {
    return Traits::High(SignedOrder(order));
  }
  // An order in 16 bits; coming back, it has zeros in the lower half, and still the value.
  using KeptOrder = uint16_t;
  static __device__ __forceinline__ KeptOrder Kept(int order) {
    return static_cast<KeptOrder>(static_cast<uint32_t>(order) >> 16);
  }
  static __device__ __forceinline__ int OrderOfKept(KeptOrder kept) {
    return static_cast<int>(static_cast<uint32_t>(kept) << 16);
  }
  // The splatted raw value that has an order.
  static __device__ __forceinline__ uint32_t WordOfOrder(int order) {
    return __byte_perm(SignedOrder(order), 0, 0x3232);
  }
  template <int kIndex>
  static __device__ __forceinline__ float Get(uint32_t word) {
    return kIndex == 0 ? Traits::Low(word) : Traits::High(word);
  }
  static __device__ __forceinline__ float FromRaw(Raw raw) { return Traits::Low(raw); }
  static __device__ __forceinline__ uint32_t Splat(Raw raw) { return raw * 0x10001u; }
  static __device__ __forceinline__ Raw NextUp(Raw raw) { return NextUp16(raw); }
  static constexpr int kOrderBits = Traits::kOrderBits;
  // Bit e for each element e of a word that reaches the splatted threshold, NaN included.
  static __device__ __forceinline__ uint32_t Reaching(uint32_t word, uint32_t threshold) {
    const uint32_t mask = __hgeu2_mask(AsPacked(word), AsPacked(threshold));
    return (mask & 1u) | (mask >> 30 & 2u);
  }
  static __device__ __forceinline__ Counter Zero() { return AsPacked(0u); }
  static __device__ __forceinline__ Counter CountReaching(Counter count, uint32_t word,
                                                          uint32_t threshold) {
    return __hadd2(count, __hgeu2(AsPacked(word), AsPacked(threshold)));
  }
  static __device__ __forceinline__ Counter CountNan(Counter count, uint32_t word) {
    return __hadd2(count, __hneu2(AsPacked(word), AsPacked(word)));
  }
  static __device__ __forceinline__ int Total(Counter count) {
    const uint32_t word = AsWord(count);
    return static_cast<int>(Traits::Low(word) + Traits::High(word));
  }
};

// kOrderBits: leading bits of an OrderedValue that can differ between values of the type.
struct BFloat16Traits {
  static constexpr int kOrderBits = 16;
  using Packed = __nv_bfloat162;
  static constexpr uint32_t kNegInf = 0xff80u;
  static __device__ __forceinline__ float Low(uint32_t word) { return __uint_as_float(word << 16); }
  static __device__ __forceinline__ float High(uint32_t word) {
    return __uint_as_float(word & 0xffff0000u);
  }
};

struct Float16Traits {
  static constexpr int kOrderBits = 19;
  using Packed = __half2;
  static constexpr uint32_t kNegInf = 0xfc00u;
  static __device__ __forceinline__ __half2 Pair(uint32_t word) {
    __half2 pair;
    memcpy(&pair, &word, sizeof(pair));
    return pair;
  }
  static __device__ __forceinline__ float Low(uint32_t word) { return __low2float(Pair(word)); }
  static __device__ __forceinline__ float High(uint32_t word) { return __high2float(Pair(word)); }
};

using BFloat16 = Element16<BFloat16Traits>;
using Float16 = Element16<Float16Traits>;

struct Float32 {
  using Raw = uint32_t;
  using Counter = int;
  static constexpr int kBytes = 4;
  static constexpr int kPerWord = 1;
  static constexpr int kPerVector = 4;
  static constexpr uint32_t kNegInfWord = 0xff800000u;
  static constexpr uint32_t kInfWord = 0x7f800000u;
  static constexpr uint32_t kNegZeroWord = 0x80000000u;

  static __device__ __forceinline__ uint32_t Max(uint32_t a, uint32_t b) {
    float result;
    asm("max.NaN.f32 %0, %1, %2;"
        : "=f"(result)
        : "f"(__uint_as_float(a)), "f"(__uint_as_float(b)));
    return __float_as_uint(result);
  }
  static __device__ __forceinline__ int OrderOfMax(uint32_t word) { return SignedOrder(word); }
  static __device__ __forceinline__ float ValueOfOrder(int order) {
    return __uint_as_float(SignedOrder(order));
  }
  using KeptOrder = uint32_t;
  static __device__ __forceinline__ KeptOrder Kept(int order) { return order; }
  static __device__ __forceinline__ int OrderOfKept(KeptOrder kept) { return kept; }
  static __device__ __forceinline__ uint32_t WordOfOrder(int order) { return SignedOrder(order); }
  template <int kIndex>
  static __device__ __forceinline__ float Get(uint32_t word) {
    return __uint_as_float(word);
  }
  static __device__ __forceinline__ float FromRaw(Raw raw) { return __uint_as_float(raw); }
  static __device__ __forceinline__ uint32_t Splat(Raw raw) { return raw; }
  static __device__ __forceinline__ Raw NextUp(Raw raw) {
    if ((raw & 0x7fffffffu) == 0) return 1u;
    return (raw & 0x80000000u) ? raw - 1u : raw + 1u;
  }
  static constexpr int kOrderBits = 32;
  static __device__ __forceinline__ uint32_t Reaching(uint32_t word, uint32_t threshold) {
    return !(__uint_as_float(word) < __uint_as_float(threshold));
  }
  static __device__ __forceinline__ Counter Zero() { return 0; }
  static __device__ __forceinline__ Counter CountReaching(Counter count, uint32_t word,
                                                          uint32_t threshold) {
    return count + !(__uint_as_float(word) < __uint_as_float(threshold));
  }
  static __device__ __forceinline__ Counter CountNan(Counter count, uint32_t word) {
    return count + isnan(__uint_as_float(word));
  }
  static __device__ __forceinline__ int Total(Counter count) { return count; }
};

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_ELEMENT_CUH_
