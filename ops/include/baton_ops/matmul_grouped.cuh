// Products of rows that lie group by group, each with its group's part of the weight: what the
// experts of a mixture make of the tokens that chose them. In the order of matmul_tile.cuh, so that
// a row's bits are those of a matmul of that row and that part alone.
//
// How many rows a group has is known on the device only. A block looks up where the groups begin,
// counts their tiles, and then takes tiles as the matmul for few rows does, whose ring it fills.
// Tiles of the same columns follow each other: where a group has several, its part of the weight is
// read from memory once.
//
// An expert's two products follow each other. Where rows are few the first, gates and ups, waits
// for what tells it where the groups begin, before it lets the second start. So that one knows them
// as it starts, and loads its weights while the first still multiplies. Where they are many both
// read them once they have waited: the first lets the second start at once, and the second waits
// before it lets anybody.
//
// Who follows the second may read early what was written before the first. Of few rows that was
// complete when the first let the second start; of many when the second, which had waited for the
// first and so for all before it, let the next one.
//
// Where what all tokens share is computed between the choice and a few rows' first product, that
// one is told that the groups are known as it starts, and waits for nothing but x either.
#ifndef BATON_OPS_MATMUL_GROUPED_CUH_
#define BATON_OPS_MATMUL_GROUPED_CUH_

#include "baton_ops/matmul_few.cuh"
#include "baton_ops/row_tiles.cuh"

namespace baton_ops::cuda {

// Barriers, then how many tiles of rows lie before each group's, and all, then where groups begin.
constexpr int kGroupedHeadBytes = 6 * 1024;
// Of two blocks on a multiprocessor: one of an expert's first product, one of its second.
constexpr int kGroupedHalfBytes = 113 * 1024;
static_assert(kFewHeadBytes + 2 * (kMostGroups + 1) * sizeof(int) <= kGroupedHeadBytes);

// Loops are short where rows are few; of many a block has more turns than it fetches code for.
template <int kTileN, bool kGated, bool kIsShort>
struct GroupedShare {
  static constexpr bool kAreLoopsShort = kIsShort;
  static constexpr int kOutN = kGated ? kTileN / 2 : kTileN;
  const int *starts, *before;  // in shared memory; of one row `starts` are its outputs' groups
  int groups, row_tiles, tiles, steps, stages, rows, n;
  bool is_one_row;  // of x, which every row of the output is made of
  bool is_weight_read_once;
  __device__ GroupedShare(const int* starts, const int* before, int groups, int n, int k,
                          int stages, int rows, int row_tiles, bool is_one_row,
                          bool is_weight_read_once)
      : starts(starts),
        before(before),
        groups(groups),
        row_tiles(row_tiles),
        tiles(TilesOfBlock((n + kOutN - 1) / kOutN * row_tiles)),
        steps(BoxesAlong(k) / kFewBoxes<kTileN>),
        stages(stages),
        rows(rows),
        n(n),
        is_one_row(is_one_row),
        is_weight_read_once(is_weight_read_once) {}
  __device__ bool IsWeightReadOnce() const { return is_weight_read_once; }
  __device__ int RowOfX(const FewPlace& place) const { return is_one_row ? 0 : place.row; }
  // By who loads it.
  __device__ int WeightRow(const FewPlace& place) const {
    return place.weight_row + (kGated && is_one_row ? starts[place.row] * 2 * n : 0);
  }
  // Of a tile behind the last, which nobody loads: any.
  __device__ FewPlace Place(int tile) const {
    if (row_tiles == 0) return {};
    const int columns = tile / row_tiles, nth = tile - columns * row_tiles;
    if (kGated && is_one_row) return {nth, nth + 1, columns * kOutN, columns * kOutN};
    int group = 0, end = groups;  // before[group] <= nth < before[end]
#pragma unroll 1
    while (end - group > 1) {
      const int middle = (group + end) / 2;
      (before[middle] <= nth ? group : end) = middle;
    }
    const int row = starts[group] + (nth - before[group]) * rows;
    const int column = columns * kOutN;
    const int weight_rows = kGated ? 2 * n : n;
    return {row, min(starts[group + 1], row + rows), column, group * weight_rows + column};
  }
};

// Writes to group_of[n] which group output n is of, where each has one or none, by a warp.
__device__ __forceinline__ void FindGroups(const int32_t* starts, int groups, int* group_of) {
  constexpr int kAtOnce = 4;
  const int lane = threadIdx.x % kLanes;
#pragma unroll 1
  for (int from = 0; from < groups; from += kAtOnce * kLanes) {
    int first[kAtOnce], next[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int g = min(from + i * kLanes + lane, groups - 1);
      first[i] = __ldcg(starts + g);
      next[i] = __ldcg(starts + g + 1);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first[i] < next[i]) group_of[first[i]] = min(from + i * kLanes + lane, groups - 1);
    }
  }
  __syncwarp();
}

// Where the groups begin is written by an earlier grid: by the one before it, or, where they are
// known as it starts, by one that was over when the one before it let grids start. Past its
// first-level cache, which may hold what stood there before.
template <int kTileN, bool kGated, class Tile>
__global__ __launch_bounds__(kFewThreads, 1) void MatmulGroupedKernel(
    const __grid_constant__ CUtensorMap map_x, const __grid_constant__ CUtensorMap map_weight,
    const MatmulOutput out, int k, const int32_t* starts, int groups, int rows, int stages,
    bool is_one_row, bool are_few, bool are_known) {
#if BATON_HAS_WGMMA
  extern __shared__ __align__(1024) uint8_t shared[];
  int* const before = reinterpret_cast<int*>(shared + kFewHeadBytes);
  int* const begins = before + kMostGroups + 1;
  const FewRing<kTileN> ring(shared, kGroupedHeadBytes, stages, rows);
  if (threadIdx.x == 0) FewInit(ring);
  if (threadIdx.x == kFewWeightThread) PrefetchMap(&map_weight);
  if (threadIdx.x == kFewRowsThread) PrefetchMap(&map_x);
  const bool lets_first = kGated ? !are_few || are_known : are_few;
  if (lets_first) LetNextGridStart();
  // Of one row the number of tiles is known, and which group one is of matters to its weight alone.
  const bool is_single = kGated && is_one_row;
  const auto wait = [&] {
    if (!are_known) WaitForEarlierGrids();
    if (!lets_first) LetNextGridStart();
  };
  if (is_single) __syncthreads();
  // Else by all threads at once: nothing can be loaded before this is there. Who waits for it does
  // it for nobody before, whatever is there then: so its code is near when it counts.
#pragma unroll 1
  for (int turn = is_single ? 2 : kGated && !are_known ? 0 : 1; turn < 2; ++turn) {
    if (turn > 0) wait();
#pragma unroll 1
    for (int g = threadIdx.x; g <= groups; g += kFewThreads) begins[g] = __ldcg(starts + g);
    __syncthreads();
    if (threadIdx.x < kLanes) CountRowTiles(begins, groups, rows, before);
    __syncthreads();
  }
  const GroupedShare<kTileN, kGated, Tile::kIsTurned> share(
      begins, before, groups, out.n, k, stages, rows, is_single ? out.m : before[groups],
      is_one_row, are_few);
  if (threadIdx.x < kFewConsumers) {
    FewConsume<Tile>(ring, share, out);
  } else if (threadIdx.x < kFewRowsThread) {
    if (is_single) {
      wait();
      FindGroups(starts, groups, begins);
    }
    if (threadIdx.x > kFewWeightThread) return;
    FewLoadWeight<kTileN, kGated>(ring, &map_weight, share, stages);
  } else if (threadIdx.x == kFewRowsThread) {
    FewLoadRows<kTileN, false>(ring, &map_x, share);
  }
#endif
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_MATMUL_GROUPED_CUH_
