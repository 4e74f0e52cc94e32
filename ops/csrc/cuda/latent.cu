// Launches of the ops of multi-head latent attention, but for the attention itself.
#include <cuda_runtime.h>

#include <limits>
#include <type_traits>

#include "baton_ops/latent_mma.cuh"
#include "baton_ops/latent_products.cuh"
#include "baton_ops/latent_rows.cuh"
#include "early_launch.h"
#include "element_types.h"
#include "latent.h"

namespace baton_ops::cuda {
namespace {

constexpr int64_t kMostGridRows = 65535;
constexpr int64_t kSomeTokens = 128;  // up to so many, tiles are smaller and more

template <class E, class Tile, bool kTurned>
Error ProductTiles(const MatmulParams<E, E>& params, const HeadSteps& steps, int64_t heads,
                   Stream stream) {
  const int64_t across = DivideUp<int64_t>(params.out_columns, Tile::kColumns);
  const int64_t down = DivideUp<int64_t>(params.rows, Tile::kRows);
  if (down > kMostGridRows) return "too many tokens";
  if (heads > kMostGridRows) return "too many heads";
  const Grid grid{dim3(static_cast<unsigned>(across), static_cast<unsigned>(down),
                       static_cast<unsigned>(heads)),
                  kMatmulThreads};
  return LaunchEarly(HeadProductKernel<E, Tile, kTurned>, grid, stream, params, steps);
}

// Tiles do not change the order of sums: which are taken may depend on the tokens.
template <class E, bool kTurned>
Error ProductOf(const MatmulParams<E, E>& params, const HeadSteps& steps, int64_t heads,
                Stream stream) {
  return params.rows <= SmallMatmulTile::kRows
             ? ProductTiles<E, SmallMatmulTile, kTurned>(params, steps, heads, stream)
             : ProductTiles<E, LargeMatmulTile, kTurned>(params, steps, heads, stream);
}

template <class Tile, bool kTurned>
Error HeadTiles(const HeadParams& params, const HeadSteps& steps, int64_t heads, Stream stream) {
  const int64_t across = DivideUp<int64_t>(params.out_columns, Tile::kColumns);
  const int64_t down = DivideUp<int64_t>(params.rows, Tile::kRows);
  if (down > kMostGridRows) return "too many tokens";
  if (heads > kMostGridRows) return "too many heads";
  const auto kernel = HeadTilesKernel<Tile, kTurned>;
  const cudaError_t status = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(Tile::kBytes));
  if (status != cudaSuccess) return ErrorOf(status);
  const Grid grid{dim3(static_cast<unsigned>(across), static_cast<unsigned>(down),
                       static_cast<unsigned>(heads)),
                  Tile::kThreads, Tile::kBytes};
  return LaunchEarly(kernel, grid, stream, params, steps);
}

// By sizes alone: where vectors of 16 bytes do not fit them, sums have another order.
bool TensorCoresTake(const HeadProductInput& in) {
  const LatentSizes& sizes = in.sizes;
  const auto fits = [](int64_t size) { return size % 8 == 0; };
  return in.type == ElementType::kBFloat16 && fits(sizes.kv_rank) && fits(sizes.rope_size) &&
         fits(sizes.nope_size) && fits(sizes.value_size);
}

// As ProductOf, on tensor cores.
template <bool kTurned>
Error HeadProductOf(const HeadParams& params, const HeadSteps& steps, int64_t heads,
                    Stream stream) {
  if (!IsOnVector(params.x) || params.x_stride % 8 != 0) {
    return "x must begin and have its rows at multiples of 16 bytes";
  }
  if (!IsOnVector(params.weight)) return "kv_up must begin at a multiple of 16 bytes";
  if (!IsOnVector(params.out) || params.out_stride % 8 != 0) {
    return "out must begin and have its rows at multiples of 16 bytes";
  }
  if (params.rows <= FewHeadTile::kRows) {
    return HeadTiles<FewHeadTile, kTurned>(params, steps, heads, stream);
  }
  return params.rows <= kSomeTokens
             ? HeadTiles<SomeHeadTile, kTurned>(params, steps, heads, stream)
             : HeadTiles<ManyHeadTile, kTurned>(params, steps, heads, stream);
}

LatentPlaces PlacesOf(const PlacedTokens& in, int64_t rope_size, const KvPool* pool) {
  LatentPlaces p{};
  p.cos = in.cos;
  p.sin = in.sin;
  p.positions = static_cast<int32_t>(in.positions);
  p.sequence = in.sequence;
  p.position = in.position;
  p.tables = in.tables;
  p.sequences = static_cast<int32_t>(in.sequences);
  p.width = pool ? static_cast<int32_t>(in.width) : 0;
  p.blocks = pool ? static_cast<int32_t>(pool->blocks) : 0;
  p.block_size = pool ? static_cast<int32_t>(pool->block_size) : 1;
  p.head_dim = static_cast<int32_t>(rope_size);
  p.tokens = static_cast<int32_t>(in.tokens);
  return p;
}

template <class E, bool kInterleaved, bool kWide>
Error RotateOf(const RotateQueriesInput& in, void* query, Stream stream) {
  const LatentSizes& sizes = in.sizes;
  const int64_t row = sizes.kv_rank + sizes.rope_size;
  const HeadsInRows<const E> from{static_cast<const E*>(in.queries.data), in.queries.stride,
                                  sizes.nope_size + sizes.rope_size, sizes.nope_size};
  const HeadsInRows<E> to{static_cast<E*>(query), sizes.heads * row, row, sizes.kv_rank};
  const int64_t items = in.places.tokens * sizes.heads * DivideUp<int64_t>(sizes.rope_size, 4);
  const int64_t blocks = DivideUp<int64_t>(items, kRotateThreads);
  if (blocks > std::numeric_limits<int32_t>::max()) return "queries has too many tokens";
  return LaunchEarly(RotateQueriesKernel<E, kInterleaved, kWide>,
                     {static_cast<unsigned>(blocks), kRotateThreads}, stream,
                     PlacesOf(in.places, sizes.rope_size, nullptr), from, to,
                     static_cast<int>(sizes.heads));
}

template <class E, bool kInterleaved, bool kWide>
Error StoreOf(const StoreRowsInput& in, Stream stream) {
  const StoreParams<E> params{PlacesOf(in.places, in.rope_size, &in.pool),
                              static_cast<const E*>(in.row.data),
                              in.row.stride,
                              static_cast<const E*>(in.norm),
                              in.eps,
                              static_cast<int32_t>(in.kv_rank),
                              static_cast<E*>(in.pool.data),
                              static_cast<int32_t>(in.pool.layers),
                              static_cast<int32_t>(in.layer)};
  const Grid grid{static_cast<unsigned>(DivideUp<int64_t>(in.places.tokens, kStoreWarps)),
                  kStoreWarps * kWarp};
  return LaunchEarly(StoreRowsKernel<E, kInterleaved, kWide>, grid, stream, params);
}

}  // namespace

Error FoldQueries(const HeadProductInput& in, void* out, Stream stream) {
  const LatentSizes& sizes = in.sizes;
  if (in.tokens == 0 || sizes.heads == 0 || sizes.kv_rank == 0) return nullptr;
  const int64_t row = sizes.kv_rank + sizes.rope_size;
  const HeadSteps steps{sizes.nope_size + sizes.rope_size,
                        (sizes.nope_size + sizes.value_size) * sizes.kv_rank, row};
  return ForElement(in.type, [&](auto element) {
    using E = decltype(element);
    const MatmulParams<E, E> params{static_cast<const E*>(in.x.data),
                                    static_cast<const E*>(in.kv_up),
                                    static_cast<E*>(out),
                                    in.x.stride,
                                    sizes.heads * row,
                                    in.tokens,
                                    sizes.nope_size,
                                    sizes.kv_rank};
    if constexpr (std::is_same_v<E, HeadElement>) {
      if (TensorCoresTake(in)) {
        return HeadProductOf<true>(params, steps, sizes.heads, stream);
      }
    }
    return ProductOf<E, true>(params, steps, sizes.heads, stream);
  });
}

Error UnfoldValues(const HeadProductInput& in, const Rows& out, Stream stream) {
  const LatentSizes& sizes = in.sizes;
  if (in.tokens == 0 || sizes.heads == 0 || sizes.value_size == 0) return nullptr;
  const HeadSteps steps{sizes.kv_rank, (sizes.nope_size + sizes.value_size) * sizes.kv_rank,
                        sizes.value_size};
  return ForElement(in.type, [&](auto element) {
    using E = decltype(element);
    const MatmulParams<E, E> params{
        static_cast<const E*>(in.x.data),
        static_cast<const E*>(in.kv_up) + sizes.nope_size * sizes.kv_rank,
        static_cast<E*>(out.data),
        in.x.stride,
        out.stride,
        in.tokens,
        sizes.kv_rank,
        sizes.value_size};
    if constexpr (std::is_same_v<E, HeadElement>) {
      if (TensorCoresTake(in)) {
        return HeadProductOf<false>(params, steps, sizes.heads, stream);
      }
    }
    return ProductOf<E, false>(params, steps, sizes.heads, stream);
  });
}

Error RotateQueries(const RotateQueriesInput& in, void* query, Stream stream) {
  const LatentSizes& sizes = in.sizes;
  if (in.places.tokens == 0 || sizes.heads == 0 || sizes.rope_size == 0) return nullptr;
  const int64_t pair = 2;  // elements that are read at once
  const bool is_wide = sizes.rope_size % 4 == 0 && sizes.nope_size % pair == 0 &&
                       sizes.kv_rank % pair == 0 && in.queries.stride % pair == 0 &&
                       AreOnVectors({in.queries.data, in.places.cos, in.places.sin, query});
  return ForElement(in.type, [&](auto element) {
    using E = decltype(element);
    if (in.places.interleaved) {
      return is_wide ? RotateOf<E, true, true>(in, query, stream)
                     : RotateOf<E, true, false>(in, query, stream);
    }
    return is_wide ? RotateOf<E, false, true>(in, query, stream)
                   : RotateOf<E, false, false>(in, query, stream);
  });
}

Error StoreRows(const StoreRowsInput& in, Stream stream) {
  if (in.places.tokens == 0) return nullptr;
  if (in.places.tokens > kMostWarps) return "row has too many tokens";
  const int64_t bytes = ElementBytes(in.type), row = in.kv_rank + in.rope_size;
  const bool is_wide = in.rope_size % 4 == 0 && in.kv_rank % kChunk == 0 &&
                       AreVectors(in.row, row, bytes) &&
                       AreVectors({in.pool.data, row}, row, bytes) &&
                       AreOnVectors({in.norm, in.places.cos, in.places.sin});
  return ForElement(in.type, [&](auto element) {
    using E = decltype(element);
    if (in.places.interleaved) {
      return is_wide ? StoreOf<E, true, true>(in, stream) : StoreOf<E, true, false>(in, stream);
    }
    return is_wide ? StoreOf<E, false, true>(in, stream) : StoreOf<E, false, false>(in, stream);
  });
}

}  // namespace baton_ops::cuda
