// Attention for Hopper by either kernel, which have the same bits, and who chooses.
#ifndef BATON_OPS_CSRC_CUDA_HOPPER_ATTENTION_H_
#define BATON_OPS_CSRC_CUDA_HOPPER_ATTENTION_H_

#include "decoder.h"

namespace baton_ops::cuda {

struct HopperAttention {
  AttendInput input;
  void* out;
  Workspace scratch;
  int processors;  // of the device
};

// Whether decode's kernel takes so many rows and queries. Prompts' takes any.
bool DecodeTakes(const AttendInput& input, const Workspace& scratch);
size_t DecodeScratchBytes(const AttentionSizes& sizes);

Error DecodeAttention(const HopperAttention& call, Stream stream);
Error PromptAttention(const HopperAttention& call, Stream stream);

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_CSRC_CUDA_HOPPER_ATTENTION_H_
