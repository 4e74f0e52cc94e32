// One contiguous buffer with a step's results in the record's column order, for one copy to the
// host.
#ifndef BATON_OPS_PACK_CUH_
#define BATON_OPS_PACK_CUH_

#include <cstdint>

namespace baton_ops::cuda {

// Words of the buffer: B, T, L, K, then n_accepted[B], token[T], logprob[L], rank[L],
// topk_token[K], topk_logprob[K].
constexpr int kPackHeaderWords = 4;

struct PackInput {
  int32_t batch;
  int32_t rows;               // T at most
  const int32_t* num_rows;    // [1] or null for `rows`
  const int32_t* row_offset;  // [rows + 1]
  const int32_t* topk_offset;
  const int32_t* n_accepted;  // [batch]
  const int32_t* token;       // [rows]
  const uint32_t* logprob;    // fp32 bits
  const int32_t* rank;
  const int32_t* topk_token;
  const uint32_t* topk_logprob;
};

constexpr int kPackThreads = 256;

__device__ __forceinline__ int64_t PackColumn(uint32_t* packed, int64_t at, int64_t capacity,
                                              const void* column, int64_t n) {
  const uint32_t* words = static_cast<const uint32_t*>(column);
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += step) {
    if (at + i < capacity) packed[at + i] = words[i];
  }
  return at + n;
}

// Words past `capacity` are dropped; the header tells that they were.
__global__ void __launch_bounds__(kPackThreads)
    PackKernel(PackInput in, uint32_t* packed, int64_t capacity) {
  const int32_t rows = in.num_rows ? min(*in.num_rows, in.rows) : in.rows;
  const int32_t outputs = in.row_offset[rows];
  const int32_t entries = in.topk_offset[rows];
  if (blockIdx.x == 0 && threadIdx.x < kPackHeaderWords) {
    const int32_t header[kPackHeaderWords] = {in.batch, rows, outputs, entries};
    packed[threadIdx.x] = header[threadIdx.x];
  }
  int64_t at = kPackHeaderWords;
  at = PackColumn(packed, at, capacity, in.n_accepted, in.batch);
  at = PackColumn(packed, at, capacity, in.token, rows);
  at = PackColumn(packed, at, capacity, in.logprob, outputs);
  at = PackColumn(packed, at, capacity, in.rank, outputs);
  at = PackColumn(packed, at, capacity, in.topk_token, entries);
  PackColumn(packed, at, capacity, in.topk_logprob, entries);
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_PACK_CUH_
