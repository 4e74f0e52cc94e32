// The pool of keys and values as Hopper's kernels see it. For .cu files only.
#ifndef BATON_OPS_CSRC_CUDA_PAGED_KEYS_H_
#define BATON_OPS_CSRC_CUDA_PAGED_KEYS_H_

#include "baton_ops/attention_order.cuh"
#include "decoder.h"
#include "tensor_map.h"

namespace baton_ops::cuda {

constexpr float kLog2OfE = 1.4426950408889634f;

// `parts`: heads of keys and values are read by so many works, each for a part of their queries.
inline PagedKeys KeysOf(const AttendInput& in, int64_t parts) {
  const int64_t layer_rows = 2 * in.pool.heads * in.pool.block_size;
  PagedKeys keys{};
  keys.tables = in.tables;
  keys.contexts = in.contexts;
  keys.width = static_cast<int>(in.width);
  keys.page = static_cast<int>(in.pool.block_size);
  keys.kv_heads = static_cast<int>(in.pool.heads * parts);
  keys.parts = static_cast<int>(parts);
  keys.block_rows = static_cast<int>(in.pool.layers * layer_rows);
  keys.key_row = static_cast<int>(in.layer * layer_rows);
  keys.value_row = static_cast<int>(in.layer * layer_rows + layer_rows / 2);
  return keys;
}

// The whole pool, in boxes of half a block's keys of one head.
inline Error DescribePool(const KvPool& pool, CUtensorMapL2promotion promotion, CUtensorMap* map) {
  const int64_t rows = pool.blocks * pool.layers * 2 * pool.heads * pool.block_size;
  return Describe({pool.data, rows, kHeadDim, kHeadDim}, static_cast<int>(pool.block_size),
                  promotion, map);
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_CSRC_CUDA_PAGED_KEYS_H_
