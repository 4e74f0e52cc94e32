// The instruction-set-specific part of the logprob op: passes over one block of fp32 logits that
// stays in the first-level cache. Everything else is shared and portable.
#ifndef BATON_OPS_CPU_BLOCK_H_
#define BATON_OPS_CPU_BLOCK_H_

#include <cstdint>

namespace baton_ops::cpu {

// A group is the unit of top-k selection and of fp32 accumulation; a block is the unit of a call.
constexpr int kGroupLogits = 128;
constexpr int kBlockGroups = 8;
constexpr int kBlockLogits = kGroupLogits * kBlockGroups;

// Which logits are meant: x >= value, or x > value if strict. A NaN logit is meant by both.
struct LogitThreshold {
  float value;
  bool strict;
};

struct BlockSum {
  double sum;  // of 2^((x - max) * scale); NaN if the block holds a NaN, or max is +inf
  int64_t count;
};

// `x` holds groups * kGroupLogits floats, without alignment.
struct BlockKernels {
  const char* name;
  void (*from_bfloat16)(const uint16_t* source, int count, float* x);
  void (*from_float16)(const uint16_t* source, int count, float* x);
  // Largest logit of each group, NaNs left out; -inf for a group of NaNs.
  void (*group_max)(const float* x, int groups, float* group_max);
  // Requires max >= every logit that is not a NaN, and max > -inf.
  BlockSum (*sum)(const float* x, int groups, float max, float scale, LogitThreshold threshold);
  // Bit i % 64 of word i / 64 says whether logit i of one group is meant by the threshold.
  void (*select)(const float* x, LogitThreshold threshold, uint64_t* group_mask);
};

extern const BlockKernels kPortableKernels;

// Null where the build or the processor lacks AVX2, FMA or F16C.
const BlockKernels* Avx2Kernels();

}  // namespace baton_ops::cpu

#endif  // BATON_OPS_CPU_BLOCK_H_
