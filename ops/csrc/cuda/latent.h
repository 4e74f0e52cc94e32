// The CUDA ops of multi-head latent attention as plain functions, see decoder.h. A token keeps one
// row of kv_rank + rope_size elements that all heads share, in a pool [blocks, layers, 1, 1,
// block_size, row]. A head's matrix is [nope_size + value_size, kv_rank]: what makes its key of a
// compressed row, then its value; heads' matrices stand one behind the other.
#ifndef BATON_OPS_CSRC_CUDA_LATENT_H_
#define BATON_OPS_CSRC_CUDA_LATENT_H_

#include "decoder.h"

namespace baton_ops::cuda {

struct LatentSizes {
  int64_t heads;
  int64_t kv_rank;
  int64_t rope_size;
  int64_t nope_size;
  int64_t value_size;
};

struct HeadProductInput {
  Rows x;
  const void* kv_up;  // [heads * (nope_size + value_size), kv_rank], contiguous
  ElementType type;   // of x, kv_up and output
  int64_t tokens;
  LatentSizes sizes;
};
// x: [tokens, heads * (nope_size + rope_size)]. Writes the first kv_rank of each head of out
// [tokens, heads, kv_rank + rope_size]. Sums along nope_size are one chain of the tensor cores' in
// bf16, all sizes multiples of 8, else as GenericMatmul's: a choice by type and sizes alone. Reads
// kv_up before it waits for earlier grids: none that still runs may write it.
Error FoldQueries(const HeadProductInput& input, void* out, Stream stream);
// x: [tokens, heads * kv_rank]; out: [tokens, heads * value_size]. Sums likewise, along kv_rank.
Error UnfoldValues(const HeadProductInput& input, const Rows& out, Stream stream);

// Where tokens stand, and by what they rotate.
struct PlacedTokens {
  int64_t tokens;
  const float* cos;  // [positions, rope_size / 2]
  const float* sin;
  int64_t positions;
  bool interleaved;
  const int32_t* sequence;  // [tokens], -1: padding
  const int32_t* position;  // [tokens]
  const int32_t* tables;    // [sequences, width]
  int64_t sequences;
  int64_t width;
};

struct RotateQueriesInput {
  Rows queries;  // [tokens, heads * (nope_size + rope_size)]
  ElementType type;
  PlacedTokens places;
  LatentSizes sizes;  // value_size is not looked at
};
// Writes the last rope_size of each head of query [tokens, heads, kv_rank + rope_size]; padding is
// left alone.
Error RotateQueries(const RotateQueriesInput& input, void* query, Stream stream);

struct StoreRowsInput {
  Rows row;  // [tokens, kv_rank + rope_size]
  ElementType type;
  const void* norm;  // [kv_rank]
  float eps;
  int64_t kv_rank;
  int64_t rope_size;
  PlacedTokens places;
  KvPool pool;  // of one head, whose head_dim is the row's; without values
  int64_t layer;
};
// Appends rows to the pool, the first kv_rank normed, the rest rotated. A token without a block of
// its own writes to block 1, the trash; padding writes nothing.
Error StoreRows(const StoreRowsInput& input, Stream stream);

// GenericAttention over rows, see StoreRowsInput::pool, that are keys and whose first value_dim are
// values; out is [tokens, heads, value_dim].
Error GenericRowAttention(const AttendInput& input, int64_t value_dim, void* out, Stream stream);

// The same, by the tensor cores' kernels for rows of 576 and values of 512 or by the generic one: a
// choice by type, sizes and device alone. `scratch`: as Attention's.
Error RowAttention(const AttendInput& input, int64_t value_dim, void* out, const Workspace& scratch,
                   Stream stream);

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_CSRC_CUDA_LATENT_H_
