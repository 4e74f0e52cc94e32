// The one total order of logits, shared by host and device code.
//
// Larger values come first; every NaN is one value above +inf; -0 and +0 are equal; equal values
// are ordered by token id, the lower one first. A logit maps to a u32 whose unsigned order is that
// order, and (logit, id) to a u64 key, so a top-k is the k largest keys.
#ifndef BATON_OPS_ORDER_H_
#define BATON_OPS_ORDER_H_

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define BATON_HD __host__ __device__ __forceinline__
#else
#define BATON_HD inline
#endif

namespace baton_ops {

BATON_HD uint32_t BitsOfFloat(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

BATON_HD float FloatOfBits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

// Maps the bits of an IEEE binary32 to its place in the order.
BATON_HD uint32_t OrderedBits(uint32_t bits) {
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0xffffffffu;
  if (magnitude == 0) return 0x80000000u;
  return (bits & 0x80000000u) ? ~bits : (bits | 0x80000000u);
}

BATON_HD uint32_t OrderedValue(float value) { return OrderedBits(BitsOfFloat(value)); }

// Inverse of OrderedValue, up to the sign of zero and the payload of a NaN.
BATON_HD float ValueOfOrdered(uint32_t ordered) {
  if (ordered == 0xffffffffu) return FloatOfBits(0x7fc00000u);
  return FloatOfBits((ordered & 0x80000000u) ? (ordered & 0x7fffffffu) : ~ordered);
}

// Keys compare as (value descending, id ascending) when the larger key comes first.
BATON_HD uint64_t OrderedKey(uint32_t ordered, uint32_t id) {
  return (static_cast<uint64_t>(ordered) << 32) | (0xffffffffu - id);
}

BATON_HD uint32_t OrderedOfKey(uint64_t key) { return static_cast<uint32_t>(key >> 32); }

BATON_HD uint32_t IdOfKey(uint64_t key) { return 0xffffffffu - static_cast<uint32_t>(key); }

}  // namespace baton_ops

#endif  // BATON_OPS_ORDER_H_
