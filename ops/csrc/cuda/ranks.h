// What the ranks of a tensor-parallel group exchange, as plain functions, see launch.h. Every rank
// makes the same calls in the same order, each on one stream, with the halves in turns. A rank's
// bits are every rank's, and a row's depend on that row alone.
#ifndef BATON_OPS_CSRC_CUDA_RANKS_H_
#define BATON_OPS_CSRC_CUDA_RANKS_H_

#include <cstddef>
#include <cstdint>

#include "decoder.h"
#include "launch.h"

namespace baton_ops::cuda {

// A rank's sight of all exchange buffers. A buffer is ExchangeHeadBytes(), zeros before the first
// call, and two halves. Its first word is an int32: 0, or why this rank gave up.
struct ExchangeInput {
  const int64_t* buffers;  // [ranks] addresses, on the host
  int64_t ranks;           // 2, 4 or 8
  int64_t rank;
  int64_t half_bytes;
  int64_t half;      // 0 or 1, never the last call's: it holds this call's parts
  int64_t limit_ns;  // of waiting for the others
};

int64_t ExchangeHeadBytes();

enum class SumWay { kChosen, kOneShot, kTwoShots };  // of which all have the same bits

struct RankSumInput {
  ExchangeInput exchange;
  ElementType part_type;  // float32, or out_type
  ElementType out_type;
  int64_t elements;  // of a rank's part: a multiple of 16 bytes
  SumWay way;
};
Error SumOverRanks(const RankSumInput& input, void* out, Stream stream);

// AddNorm of `norm` to `out`, its x being that sum; `norm.x` is none. In one launch where rows are
// few, else in two with the sum in `room`, [rows, columns] of norm.type: it may hold anything then.
Error SumOverRanksNorm(const RankSumInput& input, const AddNormInput& norm, void* room,
                       const Rows& out, Stream stream);

// out [ranks, bytes]. `bytes` of a part are a multiple of 16.
Error GatherFromRanks(const ExchangeInput& exchange, int64_t bytes, void* out, Stream stream);

// out i32[ranks]: the first word of each buffer's head, behind all that the stream holds. `half` is
// not read, and halves go on in their turns. What this rank's calls gave it before is right only
// where all are 0: who gave up overwrites what a slower rank still reads.
Error ErrorsOfRanks(const ExchangeInput& exchange, int32_t* out, Stream stream);

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_CSRC_CUDA_RANKS_H_
