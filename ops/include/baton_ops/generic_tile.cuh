// The tiles in which the matmuls of any shape and type compute, and how they are read.
#ifndef BATON_OPS_GENERIC_TILE_CUH_
#define BATON_OPS_GENERIC_TILE_CUH_

#include "baton_ops/values.cuh"

namespace baton_ops::cuda {

constexpr int kMatmulThreads = 256;
constexpr int kMatmulRange = 128;

// A block's tile: kRows x kColumns outputs in steps of kDepth; a thread has kPerRow x kPerColumn of
// them, spread over the tile.
template <int kRows_, int kColumns_, int kDepth_, int kPerThread_>
struct MatmulTile {
  static constexpr int kRows = kRows_;
  static constexpr int kColumns = kColumns_;
  static constexpr int kDepth = kDepth_;
  static constexpr int kPerThread = kPerThread_;  // along either side
  static constexpr int kAcross = kColumns / kPerThread;
  static constexpr int kDown = kRows / kPerThread;
  static_assert(kAcross * kDown == kMatmulThreads, "every thread has its outputs");
  static_assert(kMatmulRange % kDepth == 0, "a range is whole steps");
};

using SmallMatmulTile = MatmulTile<8, 32, 64, 1>;
using LargeMatmulTile = MatmulTile<64, 64, 32, 4>;

// Reads `kRows` rows of `source` from column `first` on, transposed, to the tile's rows from `to`
// on; what is not there is zero.
template <int kRows, int kDepth, class E, int kPitch>
__device__ __forceinline__ void FillTile(const E* source, int64_t stride, int64_t rows,
                                         int64_t columns, int64_t first, float (*tile)[kPitch],
                                         int to = 0) {
#pragma unroll
  for (int i = threadIdx.x; i < kRows * kDepth; i += kMatmulThreads) {
    const int row = i / kDepth, k = i % kDepth;
    const bool is_there = row < rows && first + k < columns;
    tile[k][to + row] = is_there ? ToFloat(source[row * stride + first + k]) : 0.0f;
  }
}

// The same of a source that lies turned: `rows` of the tile's are its columns, of which row k of
// `depth` has one each, `stride` elements apart.
template <int kRows, int kDepth, class E, int kPitch>
__device__ __forceinline__ void FillTurnedTile(const E* source, int64_t stride, int64_t rows,
                                               int64_t depth, int64_t first,
                                               float (*tile)[kPitch]) {
#pragma unroll
  for (int i = threadIdx.x; i < kRows * kDepth; i += kMatmulThreads) {
    const int row = i % kRows, k = i / kRows;
    const bool is_there = row < rows && first + k < depth;
    tile[k][row] = is_there ? ToFloat(source[(first + k) * stride + row]) : 0.0f;
  }
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_GENERIC_TILE_CUH_
