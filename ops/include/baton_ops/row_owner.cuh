// Whose row it is: request s owns rows cu_rows[s] to cu_rows[s + 1] - 1.
#ifndef BATON_OPS_ROW_OWNER_CUH_
#define BATON_OPS_ROW_OWNER_CUH_

#include <cstdint>

namespace baton_ops::cuda {

// The request that owns a target row.
__device__ __forceinline__ int32_t RequestOf(const int32_t* cu_rows, int32_t batch, int32_t row) {
  int32_t low = 0, high = batch;
  while (high - low > 1) {
    const int32_t middle = (low + high) / 2;
    (cu_rows[middle] <= row ? low : high) = middle;
  }
  return low;
}

// All threads of a block: as RequestOf, in the time of one read rather than of a search; -1 for a
// row behind the last request's.
__device__ __forceinline__ int32_t BlockRequestOf(const int32_t* cu_rows, int32_t batch,
                                                  int64_t row) {
  int32_t begun = 0;
  for (int32_t first = 0; first < batch; first += blockDim.x) {
    const int32_t s = first + static_cast<int32_t>(threadIdx.x);
    begun += __syncthreads_count(s < batch && cu_rows[s] <= row);
  }
  return row < cu_rows[batch] ? begun - 1 : -1;
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_ROW_OWNER_CUH_
