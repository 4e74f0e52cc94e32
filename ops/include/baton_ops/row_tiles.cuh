// How many tiles the rows of groups take that lie one after the other.
#ifndef BATON_OPS_ROW_TILES_CUH_
#define BATON_OPS_ROW_TILES_CUH_

namespace baton_ops::cuda {

constexpr int kMostGroups = 512, kLanes = 32;

// How many tiles of `rows` rows so many rows take; mostly it is one.
__device__ __forceinline__ int RowTilesOf(int count, int rows) {
  return count <= rows ? static_cast<int>(count > 0) : (count + rows - 1) / rows;
}

// Writes to before[0 .. groups] how many tiles of `rows` rows lie before each group's, by a warp.
__device__ __forceinline__ void CountRowTiles(const int* starts, int groups, int rows,
                                              int* before) {
  const int lane = threadIdx.x % kLanes, each = (groups + kLanes - 1) / kLanes;
  const int first = min(lane * each, groups), last = min(first + each, groups);
  int mine = 0;
#pragma unroll 1
  for (int g = first; g < last; ++g) {
    before[g] = mine;
    mine += RowTilesOf(starts[g + 1] - starts[g], rows);
  }
  int sum = mine;
#pragma unroll 1
  for (int distance = 1; distance < kLanes; distance *= 2) {
    const int other = __shfl_up_sync(~0u, sum, distance);
    if (lane >= distance) sum += other;
  }
#pragma unroll 1
  for (int g = first; g < last; ++g) before[g] += sum - mine;
  if (lane == kLanes - 1) before[groups] = sum;
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_ROW_TILES_CUH_
