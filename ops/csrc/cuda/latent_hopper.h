// Attention to compressed rows by Hopper's kernels, and what memory they ask for. Who chooses is
// latent_attention.cu.
#ifndef BATON_OPS_CSRC_CUDA_LATENT_HOPPER_H_
#define BATON_OPS_CSRC_CUDA_LATENT_HOPPER_H_

#include "decoder.h"

namespace baton_ops::cuda {

constexpr int64_t kHopperRow = 576;

// Whether the device is one of Hopper's, and blocks of the pool have a size that boxes of the copy
// engine fit.
bool HopperTakesRows(const AttendInput& input);
// Of rows of 576 elements; enough for lists that are cut, as many as may be left.
size_t LatentScratchBytes(const AttentionSizes& sizes);

// Of rows of 576 elements and values of 512, in bf16.
Error AttendOnHopper(const AttendInput& in, void* out, const Workspace& scratch, Stream stream);

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_CSRC_CUDA_LATENT_HOPPER_H_
