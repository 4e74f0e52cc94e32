// Launches of the matmul and the attention that take any shape and type.
#include <algorithm>

#include "baton_ops/generic_attention.cuh"
#include "baton_ops/generic_matmul.cuh"
#include "decoder.h"
#include "early_launch.h"
#include "element_types.h"
#include "experts.h"
#include "latent.h"

namespace baton_ops::cuda {
namespace {

constexpr int64_t kMostGridRows = 65535;
constexpr int64_t kMostSharedBytes = 48 * 1024;
constexpr int64_t kFewRows = 64;  // up to so many, reading the weight again costs less than tiles

template <class E, class Out, class Tile, bool kGated>
Error MatmulTiles(const MatmulParams<E, Out>& params, Stream stream) {
  const int64_t across =
      DivideUp<int64_t>(params.out_columns, kGated ? Tile::kColumns / 2 : Tile::kColumns);
  const int64_t down = DivideUp<int64_t>(params.rows, Tile::kRows);
  if (down > kMostGridRows) return "x has too many rows";
  const Grid grid{dim3(static_cast<unsigned>(across), static_cast<unsigned>(down)), kMatmulThreads};
  return LaunchEarly(GenericMatmulKernel<E, Out, Tile, kGated>, grid, stream, params);
}

template <class E, class Out, int kRows, bool kGated>
Error MatmulFew(const MatmulParams<E, Out>& params, Stream stream) {
  const int64_t across = DivideUp<int64_t>(params.out_columns, kGated ? kWarp / 2 : kWarp);
  const int64_t down = DivideUp<int64_t>(params.rows, kRows);
  const Grid grid{dim3(static_cast<unsigned>(across), static_cast<unsigned>(down)),
                  kFewWarps * kWarp};
  return LaunchEarly(FewRowsMatmulKernel<E, Out, kRows, kGated>, grid, stream, params);
}

template <class E, class Out, bool kGated>
Error MatmulOf(const MatmulInput& in, const Rows& out, Stream stream) {
  const MatmulParams<E, Out> params{static_cast<const E*>(in.x.data),
                                    static_cast<const E*>(in.weight),
                                    static_cast<Out*>(out.data),
                                    in.x.stride,
                                    out.stride,
                                    in.rows,
                                    in.in,
                                    kGated ? in.out / 2 : in.out};
  const Rows weight{const_cast<void*>(in.weight), in.in};
  const int64_t bytes = ElementBytes(in.type);
  if (in.rows <= kFewRows && AreVectors(in.x, in.in, bytes) && AreVectors(weight, in.in, bytes)) {
    if (in.rows == 1) return MatmulFew<E, Out, 1, kGated>(params, stream);
    return in.rows <= 4 ? MatmulFew<E, Out, 4, kGated>(params, stream)
                        : MatmulFew<E, Out, 8, kGated>(params, stream);
  }
  if constexpr (!kGated) {
    if (in.rows <= SmallMatmulTile::kRows) {
      return MatmulTiles<E, Out, SmallMatmulTile, kGated>(params, stream);
    }
  }
  return MatmulTiles<E, Out, LargeMatmulTile, kGated>(params, stream);
}

template <class E, bool kGated>
Error GroupedOf(const GroupedInput& in, const Rows& out, Stream stream) {
  using Tile = LargeMatmulTile;
  const MatmulInput& product = in.product;
  const MatmulParams<E, E> params{static_cast<const E*>(product.x.data),
                                  static_cast<const E*>(product.weight),
                                  static_cast<E*>(out.data),
                                  product.x.stride,
                                  out.stride,
                                  product.rows,
                                  product.in,
                                  kGated ? product.out / 2 : product.out};
  const int64_t across = DivideUp<int64_t>(params.out_columns, kTileColumns<Tile, kGated>);
  const int64_t down = std::min(product.rows, in.groups + product.rows / Tile::kRows);
  if (down > kMostGridRows) return "x has too many rows";
  const Grid grid{dim3(static_cast<unsigned>(across), static_cast<unsigned>(down)), kMatmulThreads};
  return LaunchEarly(GenericGroupedKernel<E, E, Tile, kGated>, grid, stream, params, in.starts,
                     static_cast<int>(in.groups));
}

template <class E, int kHeads, int kDims, bool kWide, bool kWhole>
Error AttendBlocks(const AttendParams<E>& params, int64_t tokens, Stream stream) {
  const Grid grid{dim3(static_cast<unsigned>(tokens), params.heads / kHeads,
                       DivideUp(params.value_dim, kDims * kWarp)),
                  kAttendThreads, AttendShared<kHeads, kDims>::Bytes(params.head_dim)};
  if (grid.shared_bytes > kMostSharedBytes) return "head_dim is too large";
  const auto kernel = GenericAttentionKernel<E, kHeads, kDims, kWide, kWhole>;
  return LaunchEarly(kernel, grid, stream, params);
}

// As many queries a block as share a KV head, up to four, where keys are whole vectors; and a
// lane's dimensions side by side where they are all there.
template <class E, int kDims>
Error AttendHeads(const AttendParams<E>& params, bool is_wide, int64_t tokens, Stream stream) {
  const int group = params.heads / params.kv_heads;
  if (!is_wide) return AttendBlocks<E, 1, kDims, false, false>(params, tokens, stream);
  if (params.head_dim != kDims * kWarp) {
    return AttendBlocks<E, 1, kDims, true, false>(params, tokens, stream);
  }
  if constexpr (kDims <= 4) {
    if (group % 4 == 0) return AttendBlocks<E, 4, kDims, true, true>(params, tokens, stream);
  }
  if (group % 2 == 0) return AttendBlocks<E, 2, kDims, true, true>(params, tokens, stream);
  return AttendBlocks<E, 1, kDims, true, true>(params, tokens, stream);
}

// As AttendHeads of rows that all heads share, whose values are slices of 256 if they are whole.
template <class E>
Error AttendRows(const AttendParams<E>& params, bool is_wide, int64_t tokens, Stream stream) {
  constexpr int kDims = 8;
  if (!is_wide) return AttendBlocks<E, 1, kDims, false, false>(params, tokens, stream);
  if (params.value_dim % (kDims * kWarp) != 0) {
    return AttendBlocks<E, 1, kDims, true, false>(params, tokens, stream);
  }
  if (params.heads % 2 == 0) return AttendBlocks<E, 2, kDims, true, true>(params, tokens, stream);
  return AttendBlocks<E, 1, kDims, true, true>(params, tokens, stream);
}

template <class E>
AttendParams<E> AttendParamsOf(const AttendInput& in, void* out) {
  const KvPool& pool = in.pool;
  AttendParams<E> p{};
  p.query = static_cast<const E*>(in.query);
  p.out = static_cast<E*>(out);
  p.pool = static_cast<const E*>(pool.data);
  p.tables = in.tables;
  p.contexts = in.contexts;
  p.heads = static_cast<int32_t>(in.heads);
  p.q_len = static_cast<int32_t>(in.tokens / in.sequences);
  p.width = static_cast<int32_t>(in.width);
  p.blocks = static_cast<int32_t>(pool.blocks);
  p.layers = static_cast<int32_t>(pool.layers);
  p.layer = static_cast<int32_t>(in.layer);
  p.kv_heads = static_cast<int32_t>(pool.heads);
  p.block_size = static_cast<int32_t>(pool.block_size);
  p.head_dim = static_cast<int32_t>(pool.head_dim);
  p.parts = 2;
  p.value_dim = p.head_dim;
  p.scale = in.scale;
  return p;
}

// Whether keys are whole vectors.
bool AreKeysWide(const AttendInput& in) {
  const Rows rows{in.pool.data, in.pool.head_dim};
  return AreVectors(rows, in.pool.head_dim, ElementBytes(in.type));
}

template <class E>
Error AttendOf(const AttendInput& in, void* out, Stream stream) {
  const AttendParams<E> p = AttendParamsOf<E>(in, out);
  const bool is_wide = AreKeysWide(in);
  if (p.head_dim <= kWarp) return AttendHeads<E, 1>(p, is_wide, in.tokens, stream);
  if (p.head_dim <= 2 * kWarp) return AttendHeads<E, 2>(p, is_wide, in.tokens, stream);
  if (p.head_dim <= 4 * kWarp) return AttendHeads<E, 4>(p, is_wide, in.tokens, stream);
  return AttendHeads<E, 8>(p, is_wide, in.tokens, stream);
}

Error CheckAttended(const AttendInput& input) {
  if (input.tokens > kMostWarps) return "query has too many tokens";
  return input.heads > kMostGridRows ? "query has too many heads" : nullptr;
}

}  // namespace

Error GenericMatmul(const MatmulInput& input, const Rows& out, ElementType out_type,
                    Stream stream) {
  if (input.rows == 0 || input.out == 0) return nullptr;
  return ForElement(input.type, [&](auto element) {
    using E = decltype(element);
    return out_type == input.type ? MatmulOf<E, E, false>(input, out, stream)
                                  : MatmulOf<E, float, false>(input, out, stream);
  });
}

Error GenericGateUpSilu(const MatmulInput& input, const Rows& out, Stream stream) {
  if (input.rows == 0 || input.out == 0) return nullptr;
  return ForElement(input.type, [&](auto element) {
    using E = decltype(element);
    return MatmulOf<E, E, true>(input, out, stream);
  });
}

Error GenericGrouped(const GroupedInput& input, bool is_gated, const Rows& out, Stream stream) {
  if (input.product.rows == 0 || input.product.out == 0) return nullptr;
  return ForElement(input.product.type, [&](auto element) {
    using E = decltype(element);
    return is_gated ? GroupedOf<E, true>(input, out, stream)
                    : GroupedOf<E, false>(input, out, stream);
  });
}

Error GenericAttention(const AttendInput& input, void* out, Stream stream) {
  if (input.tokens == 0 || input.heads == 0 || input.pool.head_dim == 0) return nullptr;
  if (const Error error = CheckAttended(input)) return error;
  return ForElement(input.type,
                    [&](auto element) { return AttendOf<decltype(element)>(input, out, stream); });
}

Error GenericRowAttention(const AttendInput& input, int64_t value_dim, void* out, Stream stream) {
  if (input.tokens == 0 || input.heads == 0 || value_dim == 0) return nullptr;
  if (const Error error = CheckAttended(input)) return error;
  return ForElement(input.type, [&](auto element) {
    auto params = AttendParamsOf<decltype(element)>(input, out);
    params.parts = 1;
    params.value_dim = static_cast<int32_t>(value_dim);
    return AttendRows(params, AreKeysWide(input), input.tokens, stream);
  });
}

}  // namespace baton_ops::cuda
