// Geometry and parameters of the CUDA logprob kernels.
//
// A row is cut into parts of 2 KiB and groups of 256 logits. Parts, groups and the lane that sees
// an element depend on the element's place in its row alone, and partial results are combined in
// row order, so results do not depend on the batch or on how its work is split.
#ifndef BATON_OPS_LOGPROB_PARAMS_CUH_
#define BATON_OPS_LOGPROB_PARAMS_CUH_

#include <cstdint>

#include "baton_ops/logprob_rules.h"

namespace baton_ops::cuda {

// What a warp reads at once, 16 bytes per lane.
constexpr int kStripBytes = 512;
// What a warp scans at once, in registers.
constexpr int kPartStrips = 4;
constexpr int kPartBytes = kPartStrips * kStripBytes;
constexpr int kGroupLogits = 256;

// What one part of a row amounts to: 16 bytes, because every byte written costs several that are
// read. A record's base follows from its maxima.
struct alignas(16) PartRecord {
  uint32_t group_max[2];  // the orders of the maxima of its groups: two of 32 or four of 16 bits
  float sum;              // of 2^(x * scale - base)
  int32_t count;          // logits that reach the rank's threshold, padding included; ^ kComplete
};

// In the count of a record that its part's warp has written. The finish takes it away again, so no
// record of an earlier call is taken for one of this call. Counts stay below the bits set.
constexpr uint32_t kComplete = 0x9d3b5000u;
constexpr uint32_t kCountBits = 0xfffu;
static_assert(kPartBytes / 2 <= kCountBits && (kComplete & kCountBits) == 0);

struct LogprobParams {
  const char* logits;
  int64_t row_bytes;  // distance between rows
  int32_t vocab;
  int32_t rows;  // T
  const int32_t* token;
  const int32_t* k;
  const int32_t* row_index;  // null: the identity
  const float* inv_temp;     // null: 1
  const int32_t* num_rows;   // null: T
  const int32_t* row_offset;
  const int32_t* topk_offset;
  RankMode rank_mode;

  float* logprob;
  int32_t* rank;
  int32_t* topk_token;
  float* topk_logprob;

  // Workspace: written by the scan, read by the finish of the same call. Between calls no record is
  // complete.
  PartRecord* records;  // [T, parts]

  int32_t parts;    // per row
  int32_t groups;   // per row, without padding
  int32_t span;     // groups that are selected as one
  int32_t padding;  // elements by which the last part exceeds the row

  __device__ __forceinline__ int32_t Rows() const { return num_rows ? min(*num_rows, rows) : rows; }
};

// The sampled logit and what a logit must reach to count for its rank.
struct Threshold {
  float sampled;
  uint32_t word;  // splatted raw bits
  int32_t order;  // no logit of a lower order counts
  uint32_t flags;
};

enum ThresholdFlag : uint32_t {
  kCountNanOnly = 1,   // no value but NaN reaches it
  kCountNone = 2,      // not even NaN does
  kCountsPadding = 4,  // -inf reaches it
  kBadToken = 8,       // outside [0, V): its logprob is NaN, its rank 0
};

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_LOGPROB_PARAMS_CUH_
