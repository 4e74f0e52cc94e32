// Which kernel attends to rows that all heads share: the tensor cores' for DeepSeek-V3's sizes in
// bf16, of Hopper or of others, or that of any. A choice by sizes, type and device alone: they have
// different orders.
#include <cuda_runtime.h>

#include "baton_ops/latent_attention.cuh"
#include "early_launch.h"
#include "element_types.h"
#include "latent.h"
#include "latent_hopper.h"

namespace baton_ops::cuda {
namespace {

constexpr int64_t kMostGridRows = 65535;
constexpr int64_t kManyBlocks = 128;  // from so many on, slices of values would not pay

bool Fits(const AttendInput& in, int64_t value_dim) {
  return in.type == ElementType::kBFloat16 && in.pool.head_dim == kRowWidth &&
         value_dim == kRowValue && in.heads % 16 == 0 &&
         MostSharedBytes() >= RowShape<4, kRowValue>::kBytes;
}

template <class Shape>
Error Launch(const AttendParams<RowElement>& params, int64_t tokens, Stream stream) {
  const auto kernel = RowAttentionKernel<Shape>;
  const cudaError_t status = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(Shape::kBytes));
  if (status != cudaSuccess) return ErrorOf(status);
  const Grid grid{
      dim3(static_cast<unsigned>(tokens), static_cast<unsigned>(params.heads / Shape::kHeads),
           kRowValue / Shape::kSlice),
      kLatentThreads, Shape::kBytes};
  return LaunchEarly(kernel, grid, stream, params);
}

// Slices change no bit: how many may depend on the tokens.
template <int kHeadTiles>
Error AttendTiles(const AttendParams<RowElement>& params, int64_t tokens, Stream stream) {
  const int64_t blocks = tokens * (params.heads / (16 * kHeadTiles));
  return blocks < kManyBlocks ? Launch<RowShape<kHeadTiles, 128>>(params, tokens, stream)
                              : Launch<RowShape<kHeadTiles, kRowValue>>(params, tokens, stream);
}

AttendParams<RowElement> ParamsOf(const AttendInput& in, void* out) {
  AttendParams<RowElement> p{};
  p.query = static_cast<const RowElement*>(in.query);
  p.out = static_cast<RowElement*>(out);
  p.pool = static_cast<const RowElement*>(in.pool.data);
  p.tables = in.tables;
  p.contexts = in.contexts;
  p.heads = static_cast<int32_t>(in.heads);
  p.q_len = static_cast<int32_t>(in.tokens / in.sequences);
  p.width = static_cast<int32_t>(in.width);
  p.blocks = static_cast<int32_t>(in.pool.blocks);
  p.layers = static_cast<int32_t>(in.pool.layers);
  p.layer = static_cast<int32_t>(in.layer);
  p.kv_heads = 1;
  p.block_size = static_cast<int32_t>(in.pool.block_size);
  p.head_dim = kRowWidth;
  p.parts = 1;
  p.value_dim = kRowValue;
  p.scale = in.scale;
  return p;
}

}  // namespace

Error RowAttention(const AttendInput& input, int64_t value_dim, void* out, const Workspace& scratch,
                   Stream stream) {
  if (!Fits(input, value_dim)) return GenericRowAttention(input, value_dim, out, stream);
  if (input.tokens == 0 || input.heads == 0) return nullptr;
  if (input.tokens > kMostWarps) return "query has too many tokens";
  if (input.heads > kMostGridRows) return "query has too many heads";
  if (!IsOnVector(input.query)) return "query must begin at a multiple of 16 bytes";
  if (!IsOnVector(input.pool.data)) return "kv must begin at a multiple of 16 bytes";
  if (!IsOnVector(out)) return "out must begin at a multiple of 16 bytes";
  if (HopperTakesRows(input)) return AttendOnHopper(input, out, scratch, stream);
  const AttendParams<RowElement> params = ParamsOf(input, out);
  if (input.heads % 64 == 0) return AttendTiles<4>(params, input.tokens, stream);
  return input.heads % 32 == 0 ? AttendTiles<2>(params, input.tokens, stream)
                               : AttendTiles<1>(params, input.tokens, stream);
}

}  // namespace baton_ops::cuda
