// Which kernel computes attention. Between those for Hopper and the generic one type, heads, block
// size and device decide; between those for Hopper, whose bits are the same, how many queries.
#include <cuda_runtime.h>

#include <algorithm>
#include <limits>

#include "hopper_attention.h"
#include "hopper_device.h"
#include "latent_hopper.h"

namespace baton_ops::cuda {
namespace {

constexpr int64_t kHopperHeadDim = 128;

bool Fits(const AttendInput& in) {
  const int64_t page = in.pool.block_size;
  const bool is_page = page == 16 || page == 32 || page == 64 || page == 128;
  return in.type == ElementType::kBFloat16 && in.pool.head_dim == kHopperHeadDim && is_page;
}

Error Check(const AttendInput& in, const void* out, const Workspace& scratch) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  const KvPool& pool = in.pool;
  if (!IsOnVector(in.query)) return "query must begin at a multiple of 16 bytes";
  if (!IsOnVector(pool.data)) return "kv must begin at a multiple of 16 bytes";
  if (!IsOnVector(out)) return "out must begin at a multiple of 16 bytes";
  if (!IsOnVector(scratch.data)) return "scratch must begin at a multiple of 16 bytes";
  if (pool.blocks * pool.layers * 2 * pool.heads * pool.block_size > kMost)
    return "kv is too large";
  return std::max(in.tokens * in.heads, in.width * pool.block_size) > kMost / 2
             ? "query or tables are too large"
             : nullptr;
}

}  // namespace

Error Attention(const AttendInput& input, void* out, const Workspace& scratch, Stream stream) {
  if (input.sequences == 0 || input.tokens == 0 || input.width == 0) return nullptr;
  const HopperDevice device = CurrentHopper();
  if (!device.is_there || !Fits(input)) return GenericAttention(input, out, stream);
  if (const Error error = Check(input, out, scratch)) return error;
  const HopperAttention call{input, out, scratch, device.processors};
  return DecodeTakes(input, scratch) ? DecodeAttention(call, stream)
                                     : PromptAttention(call, stream);
}

size_t AttentionScratchBytes(const AttentionSizes& sizes) {
  if (sizes.head_dim == kHopperRow && sizes.kv_heads == 1) return LatentScratchBytes(sizes);
  return sizes.head_dim == kHopperHeadDim ? DecodeScratchBytes(sizes) : 0;
}

}  // namespace baton_ops::cuda
