// Launches of the decoder's row-wise kernels: which are wide enough to be read 16 bytes at a time.
#include <algorithm>

#include "baton_ops/rope_store.cuh"
#include "baton_ops/row_norm.cuh"
#include "baton_ops/rows.cuh"
#include "decoder.h"
#include "early_launch.h"
#include "element_types.h"
#include "norm_launch.h"

namespace baton_ops::cuda {
namespace {

// From so many heads on, a warp for each would not find room on a device at once.
constexpr int64_t kManyHeads = 6144;
constexpr int64_t kManyVectorHeads = kManyHeads * kWarp / kHeadLanes;  // eight lanes for each

template <class Word>
Error CopyWords(const CopyRowsInput& in, const Rows& out, int64_t element_bytes, Stream stream) {
  const auto words = [&](int64_t elements) {
    return elements * element_bytes / static_cast<int64_t>(sizeof(Word));
  };
  const CopyParams<Word> params{static_cast<const Word*>(in.table.data),
                                static_cast<Word*>(out.data),
                                in.index,
                                words(in.table.stride),
                                words(out.stride),
                                in.table_rows,
                                words(in.columns)};
  return LaunchEarly(CopyRowsKernel<Word>,
                     {RowGrid(in.rows, params.columns, kRowThreads), kRowThreads}, stream, params);
}

template <class E, bool kWide>
Error NormOf(const AddNormInput& in, const Rows& out, Stream stream) {
  const NormParams<E> params = NormParamsOf<E>(in, out);
  const int64_t chunks = DivideUp<int64_t>(in.columns, kChunk);
  const unsigned threads = NormThreads(in.columns);
  const Grid grid{static_cast<unsigned>(in.rows), threads};
  if (chunks <= threads) return LaunchEarly(AddNormKernel<E, kWide, 1>, grid, stream, params);
  if (chunks <= 2 * threads) return LaunchEarly(AddNormKernel<E, kWide, 2>, grid, stream, params);
  return LaunchEarly(AddNormLongKernel<E, kWide>, grid, stream, params);
}

template <class E, bool kInterleaved, bool kWide, bool kBias>
Error RopeOf(const RopeStoreInput& in, void* query, Stream stream) {
  const KvPool& pool = in.pool;
  RopeParams<E> p{};
  p.qkv = static_cast<const E*>(in.qkv.data);
  p.qkv_stride = in.qkv.stride;
  p.bias = static_cast<const E*>(in.bias);
  p.query_norm = static_cast<const E*>(in.query_norm);
  p.key_norm = static_cast<const E*>(in.key_norm);
  p.eps = in.eps;
  p.cos = in.cos;
  p.sin = in.sin;
  p.positions = static_cast<int32_t>(in.positions);
  p.sequence = in.sequence;
  p.position = in.position;
  p.tables = in.tables;
  p.sequences = static_cast<int32_t>(in.sequences);
  p.width = static_cast<int32_t>(in.width);
  p.pool = static_cast<E*>(pool.data);
  p.blocks = static_cast<int32_t>(pool.blocks);
  p.layers = static_cast<int32_t>(pool.layers);
  p.layer = static_cast<int32_t>(in.layer);
  p.kv_heads = static_cast<int32_t>(pool.heads);
  p.block_size = static_cast<int32_t>(pool.block_size);
  p.head_dim = static_cast<int32_t>(pool.head_dim);
  p.heads = static_cast<int32_t>(in.heads);
  p.tokens = static_cast<int32_t>(in.tokens);
  p.query = static_cast<E*>(query);
  const int64_t heads = in.heads + 2 * pool.heads;
  const auto launch = [&](auto kernel, int64_t heads_each, int64_t parts_of_warp = 1) {
    const int64_t warps = DivideUp(in.tokens * DivideUp(heads, heads_each), parts_of_warp);
    const Grid grid{static_cast<unsigned>(DivideUp<int64_t>(warps, kRopeWarps)),
                    kRopeWarps * kWarp};
    return LaunchEarly(kernel, grid, stream, p);
  };
  if constexpr (sizeof(E) == 2 && !kInterleaved && kWide) {
    if (pool.head_dim == kVectorHead && in.qkv.stride % kChunk == 0) {
      constexpr int64_t kParts = kWarp / kHeadLanes;
      if (in.tokens * heads < kManyVectorHeads)
        return launch(RopeStoreVectorKernel<E, kBias, 1>, 1, kParts);
      return launch(RopeStoreVectorKernel<E, kBias, 2>, 2, kParts);
    }
  }
  if (pool.head_dim > kMostLaneHead)
    return launch(RopeStoreLongKernel<E, kInterleaved, kWide, kBias>, 1);
  if (in.tokens * heads < kManyHeads)
    return launch(RopeStoreKernel<E, kInterleaved, kWide, kBias, 1>, 1);
  return launch(RopeStoreKernel<E, kInterleaved, kWide, kBias, 4>, 4);
}

template <class E, bool kInterleaved, bool kWide>
Error RopeWith(const RopeStoreInput& in, void* query, Stream stream) {
  return in.bias ? RopeOf<E, kInterleaved, kWide, true>(in, query, stream)
                 : RopeOf<E, kInterleaved, kWide, false>(in, query, stream);
}

}  // namespace

Error CopyRows(const CopyRowsInput& in, const Rows& out, Stream stream) {
  if (in.rows == 0 || in.columns == 0) return nullptr;
  const int64_t bytes = ElementBytes(in.type);
  if (AreVectors(in.table, in.columns, bytes) && AreVectors(out, in.columns, bytes)) {
    return CopyWords<uint4>(in, out, bytes, stream);
  }
  if (bytes == 2) return CopyWords<uint16_t>(in, out, bytes, stream);
  return CopyWords<uint32_t>(in, out, bytes, stream);
}

Error AddNorm(const AddNormInput& in, const Rows& out, Stream stream) {
  if (in.rows == 0 || in.columns == 0) return nullptr;
  const bool is_wide = IsNormWide(in, out);
  return ForElement(in.type, [&](auto element) {
    using E = decltype(element);
    return is_wide ? NormOf<E, true>(in, out, stream) : NormOf<E, false>(in, out, stream);
  });
}

Error RopeStore(const RopeStoreInput& in, void* query, Stream stream) {
  if (in.tokens == 0) return nullptr;
  if (in.tokens * (in.heads + 2 * in.pool.heads) > kMostWarps) return "qkv has too many tokens";
  const bool is_wide = in.pool.head_dim % 4 == 0 && in.qkv.stride % 2 == 0 &&
                       AreOnVectors({in.qkv.data, in.bias, in.query_norm, in.key_norm, in.cos,
                                     in.sin, in.pool.data, query});
  return ForElement(in.type, [&](auto element) {
    using E = decltype(element);
    if (in.interleaved) {
      return is_wide ? RopeWith<E, true, true>(in, query, stream)
                     : RopeWith<E, true, false>(in, query, stream);
    }
    return is_wide ? RopeWith<E, false, true>(in, query, stream)
                   : RopeWith<E, false, false>(in, query, stream);
  });
}

Error SiluMul(const Rows& gate_up, ElementType type, int64_t rows, int64_t columns, const Rows& out,
              Stream stream) {
  if (rows == 0 || columns == 0) return nullptr;
  const int64_t bytes = ElementBytes(type);
  const bool is_wide = AreVectors(gate_up, columns, bytes) && AreVectors(out, columns, bytes);
  return ForElement(type, [&](auto element) {
    using E = decltype(element);
    const GateParams<E> params{static_cast<const E*>(gate_up.data), static_cast<E*>(out.data),
                               gate_up.stride, out.stride, columns};
    const int count = is_wide ? kPerVector<E> : 1;
    const Grid grid{RowGrid(rows, DivideUp<int64_t>(columns, count), kRowThreads), kRowThreads};
    return is_wide ? LaunchEarly(SiluMulKernel<E, kPerVector<E>>, grid, stream, params)
                   : LaunchEarly(SiluMulKernel<E, 1>, grid, stream, params);
  });
}

Error BrokenRows(const Rows& x, ElementType type, int64_t rows, int64_t columns, uint8_t* out,
                 Stream stream) {
  if (rows == 0 || columns == 0) return nullptr;
  const bool is_wide = AreVectors(x, columns, ElementBytes(type));
  const Grid grid{static_cast<unsigned>(rows), kRowThreads};
  return ForElement(type, [&](auto element) {
    using E = decltype(element);
    const auto kernel = is_wide ? BrokenRowsKernel<E, kPerVector<E>> : BrokenRowsKernel<E, 1>;
    return LaunchEarly(kernel, grid, stream, static_cast<const E*>(x.data), x.stride, columns, out);
  });
}

}  // namespace baton_ops::cuda
