// The decoder's CUDA ops as plain functions, see launch.h. A row's bits depend on that row alone:
// the order of every sum is fixed by a weight's or a head's shape and type. Strides are in
// elements.
#ifndef BATON_OPS_CSRC_CUDA_DECODER_H_
#define BATON_OPS_CSRC_CUDA_DECODER_H_

#include <cstddef>
#include <cstdint>

#include "launch.h"

namespace baton_ops::cuda {

enum class ElementType { kFloat32, kBFloat16 };

// Rows of a matrix of E: row r starts at data + r * stride elements.
struct Rows {
  void* data;
  int64_t stride;
};

struct MatmulInput {
  Rows x;              // [rows, in]
  const void* weight;  // [out, in], contiguous
  ElementType type;    // of x and weight
  int64_t rows;
  int64_t in;
  int64_t out;
};

// Any shape. `out_type` is float32 or the input's type. Sums over `in` are of ranges in ascending
// order, each summed in ascending order.
Error GenericMatmul(const MatmulInput& input, const Rows& out, ElementType out_type, Stream stream);

// The same, by the kernels for Hopper or by GenericMatmul: a choice by type, weight and device
// alone, never by rows. Reads the weight before it waits for earlier grids: none that still runs
// may write it.
Error Matmul(const MatmulInput& input, const Rows& out, ElementType out_type, Stream stream);

// As Matmul with a weight of gates' rows and as many ups' behind them, then SiluMul, with their
// bits and without the memory between: out[r, i] = silu(gate) * up, [rows, input.out / 2].
Error GateUpSilu(const MatmulInput& input, const Rows& out, Stream stream);
Error GenericGateUpSilu(const MatmulInput& input, const Rows& out, Stream stream);

struct KvPool {
  void* data;  // [blocks, layers, 2, heads, block_size, head_dim], contiguous
  int64_t blocks;
  int64_t layers;
  int64_t heads;
  int64_t block_size;
  int64_t head_dim;
};

struct AttendInput {
  const void* query;  // [tokens, heads, head_dim], contiguous, tokens = sequences * q_len
  ElementType type;   // of query, pool and output
  int64_t sequences;
  int64_t tokens;
  int64_t heads;  // a multiple of the pool's
  KvPool pool;
  int64_t layer;
  const int32_t* tables;    // [sequences, width] of blocks
  int64_t width;            // in blocks
  const int32_t* contexts;  // [sequences], 0: not there
  float scale;
};

// Any head_dim. `out` is as query. Keys are walked from position 0 in ranges of 64, tiles of 32.
Error GenericAttention(const AttendInput& input, void* out, Stream stream);

// The same, by the kernels for Hopper or by GenericAttention: a choice by type, heads, block_size
// and device alone. `scratch` is 256-byte aligned, zeroed before its first call, and left fit for
// the next.
Error Attention(const AttendInput& input, void* out, const Workspace& scratch, Stream stream);

// Scratch that suffices for up to so many sequences, tokens of all of them, and positions of each.
struct AttentionSizes {
  int64_t heads;
  int64_t kv_heads;
  int64_t head_dim;
  int64_t sequences;
  int64_t tokens;
  int64_t positions;
};
size_t AttentionScratchBytes(const AttentionSizes& sizes);

// out[i] = table[index[i]], zeros where the index is outside 0..table_rows-1.
struct CopyRowsInput {
  Rows table;
  int64_t table_rows;
  const int32_t* index;  // [rows]
  int64_t rows;
  int64_t columns;
  ElementType type;
};
Error CopyRows(const CopyRowsInput& input, const Rows& out, Stream stream);

struct AddNormInput {
  Rows x;  // data null: nothing is added
  Rows residual;
  const void* weight;  // [columns]
  float eps;
  int64_t rows;
  int64_t columns;
  ElementType type;
};
Error AddNorm(const AddNormInput& input, const Rows& out, Stream stream);

struct RopeStoreInput {
  Rows qkv;  // [tokens, (heads + 2 * pool.heads) * head_dim]
  int64_t tokens;
  int64_t heads;
  ElementType type;
  const void* bias;        // [(heads + 2 * pool.heads) * head_dim], added first; null: none
  const void* query_norm;  // [head_dim], both or neither
  const void* key_norm;
  float eps;
  const float* cos;  // [positions, head_dim / 2]
  const float* sin;
  int64_t positions;
  bool interleaved;
  const int32_t* sequence;  // [tokens], -1: padding
  const int32_t* position;  // [tokens]
  const int32_t* tables;    // [sequences, width]
  int64_t sequences;
  int64_t width;
  KvPool pool;
  int64_t layer;
};
// Reads all but qkv before it waits for earlier grids. A matmul or attention lets it begin before
// that one has waited itself: what writes places needs another kernel between.
Error RopeStore(const RopeStoreInput& input, void* query, Stream stream);

// out[r, i] = silu(gate_up[r, i]) * gate_up[r, columns + i].
Error SiluMul(const Rows& gate_up, ElementType type, int64_t rows, int64_t columns, const Rows& out,
              Stream stream);

// out[r] |= 1 where row r of x holds NaN or infinity.
Error BrokenRows(const Rows& x, ElementType type, int64_t rows, int64_t columns, uint8_t* out,
                 Stream stream);

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_CSRC_CUDA_DECODER_H_
