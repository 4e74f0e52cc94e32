// Products of each head's vectors with its own part of one matrix in bf16, on tensor cores: what
// latent_products.cuh does of any type.
//
// The one order: an element is one chain of mma.m16n8k16 along the shared dimension from 0 on,
// filled up with zeros to a multiple of 16. Which tile it lies in does not matter to it.
#ifndef BATON_OPS_LATENT_MMA_CUH_
#define BATON_OPS_LATENT_MMA_CUH_

#include <cstring>

#include "baton_ops/generic_matmul.cuh"
#include "baton_ops/latent_products.cuh"
#include "baton_ops/quad.cuh"
#include "baton_ops/warp_mma.cuh"

namespace baton_ops::cuda {

using HeadElement = __nv_bfloat16;
using HeadParams = MatmulParams<HeadElement, HeadElement>;

// A block's tile, and how its warps share it: so many lie along its rows.
template <int kRows_, int kColumns_, int kDepth_, int kDown_, int kAcross_>
struct HeadTile {
  static constexpr int kRows = kRows_, kColumns = kColumns_, kDepth = kDepth_;
  static constexpr int kDown = kDown_, kAcross = kAcross_, kThreads = kDown * kAcross * kWarp;
  static constexpr int kRowTiles = kRows / kDown / 16, kColumnTiles = kColumns / kAcross / 8;
  static constexpr int kPad = 8;  // elements: rows begin in different banks
  static constexpr int kXPitch = kDepth + kPad, kXElements = kRows * kXPitch;
  static constexpr int kMostWeight = kColumns * (kDepth + kPad) > kDepth*(kColumns + kPad)
                                         ? kColumns * (kDepth + kPad)
                                         : kDepth * (kColumns + kPad);
  static constexpr int kStage = kXElements + kMostWeight;
  static constexpr size_t kBytes = 2 * kStage * sizeof(HeadElement);
  static_assert(kRowTiles > 0 && kColumnTiles % 4 == 0 && kDepth % 16 == 0);
};
using FewHeadTile = HeadTile<16, 128, 128, 1, 4>;
using SomeHeadTile = HeadTile<64, 64, 64, 4, 2>;
using ManyHeadTile = HeadTile<128, 128, 64, 2, 4>;

// Begins to bring a part of a matrix, zeros where it ends; columns are a multiple of 8.
template <int kThreads, int kRows, int kColumns>
__device__ __forceinline__ void BringBox(const HeadElement* from, int64_t stride, int64_t rows,
                                         int64_t columns, HeadElement* to) {
  constexpr int kVectors = kColumns / 8;
#pragma unroll 2
  for (int i = threadIdx.x; i < kRows * kVectors; i += kThreads) {
    const int row = i / kVectors, at = i % kVectors * 8;
    HeadElement* place = to + row * (kColumns + 8) + at;
    if (row < rows && at < columns) {
      BeginCopy(place, from + row * stride + at);
    } else {
      *reinterpret_cast<uint4*>(place) = uint4{};
    }
  }
}

// A warp's part of a tile.
template <class Tile, bool kTurned>
class HeadSums {
 public:
  __device__ HeadSums()
      : row_(threadIdx.x / kWarp / Tile::kAcross * (Tile::kRowTiles * 16)),
        column_(threadIdx.x / kWarp % Tile::kAcross * (Tile::kColumnTiles * 8)) {}

  // Adds the first `depth` of what a stage has, a multiple of 16.
  __device__ __forceinline__ void Add(const HeadElement* x, const HeadElement* weight, int depth) {
    const int lane = threadIdx.x % kWarp;
    const HeadElement* rows = x + (row_ + lane % 16) * Tile::kXPitch + lane / 16 * 8;
#pragma unroll 2
    for (int k = 0; k < depth; k += 16) {
      uint32_t a[Tile::kRowTiles][4];
#pragma unroll
      for (int m = 0; m < Tile::kRowTiles; ++m) {
        LoadMatrices(rows + m * 16 * Tile::kXPitch + k, a[m]);
      }
#pragma unroll
      for (int n = 0; n < Tile::kColumnTiles; n += 2) {
        uint32_t b[4];
        LoadWeight(weight, column_ + n * 8, k, b);
#pragma unroll
        for (int m = 0; m < Tile::kRowTiles; ++m) {
          MultiplyAdd(a[m], b[0], b[1], sums_[m][n]);
          MultiplyAdd(a[m], b[2], b[3], sums_[m][n + 1]);
        }
      }
    }
  }

  __device__ __forceinline__ void Store(const HeadParams& p, int64_t top, int64_t left) const {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int m = 0; m < Tile::kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int64_t row = top + row_ + m * 16 + h * 8 + lane / 4;
#pragma unroll
        for (int n = 0; n < Tile::kColumnTiles; n += 4) {
          uint32_t words[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            words[i] = Word(sums_[m][n + i][2 * h], sums_[m][n + i][2 * h + 1]);
          }
          TransposeQuad(words, lane % 4);
          const int64_t column = left + column_ + (n + lane % 4) * 8;
          if (row >= p.rows || column >= p.out_columns) continue;
          *reinterpret_cast<uint4*>(p.out + row * p.out_stride + column) =
              make_uint4(words[0], words[1], words[2], words[3]);
        }
      }
    }
  }

 private:
  __device__ __forceinline__ static uint32_t Word(float low, float high) {
    const HeadElement pair[2] = {Rounded<HeadElement>(low), Rounded<HeadElement>(high)};
    uint32_t word;
    memcpy(&word, pair, sizeof word);
    return word;
  }
  // Of 16 columns and 16 of their depth.
  __device__ __forceinline__ static void LoadWeight(const HeadElement* weight, int column, int k,
                                                    uint32_t (&to)[4]) {
    const int lane = threadIdx.x % kWarp;
    if constexpr (kTurned) {
      constexpr int kPitch = Tile::kColumns + Tile::kPad;
      LoadTurnedMatrices(weight + (k + lane % 16) * kPitch + column + lane / 16 * 8, to);
    } else {
      constexpr int kPitch = Tile::kDepth + Tile::kPad;
      const int row = column + lane % 8 + lane / 16 * 8;
      LoadMatrices(weight + row * kPitch + k + lane / 8 % 2 * 8, to);
    }
  }

  const int row_, column_;
  float sums_[Tile::kRowTiles][Tile::kColumnTiles][4] = {};
};

// Grid and `steps` as of HeadProductKernel. The weight does not depend on the kernel before: a
// launch that overlaps that one begins to read it.
template <class Tile, bool kTurned>
__global__ void __launch_bounds__(Tile::kThreads, 2)
    HeadTilesKernel(HeadParams p, HeadSteps steps) {
  extern __shared__ __align__(16) uint8_t head_memory[];
  auto* ring = reinterpret_cast<HeadElement*>(head_memory);
  const int64_t top = blockIdx.y * static_cast<int64_t>(Tile::kRows);
  const int64_t left = blockIdx.x * static_cast<int64_t>(Tile::kColumns);
  p.x += blockIdx.z * steps.x + top * p.x_stride;
  p.weight += blockIdx.z * steps.weight + (kTurned ? left : left * p.in);
  p.out += blockIdx.z * steps.out;
  const auto bring_x = [&](int64_t first, int stage) {
    BringBox<Tile::kThreads, Tile::kRows, Tile::kDepth>(p.x + first, p.x_stride, p.rows - top,
                                                        p.in - first, ring + stage * Tile::kStage);
  };
  const auto bring_weight = [&](int64_t first, int stage) {
    HeadElement* to = ring + stage * Tile::kStage + Tile::kXElements;
    if constexpr (kTurned) {
      BringBox<Tile::kThreads, Tile::kDepth, Tile::kColumns>(
          p.weight + first * p.out_columns, p.out_columns, p.in - first, p.out_columns - left, to);
    } else {
      BringBox<Tile::kThreads, Tile::kColumns, Tile::kDepth>(
          p.weight + first, p.in, p.out_columns - left, p.in - first, to);
    }
  };
  bring_weight(0, 0);
  WaitForEarlierGrids();
  LetNextGridStart();
  bring_x(0, 0);
  HeadSums<Tile, kTurned> sums;
  int stage = 0;
  for (int64_t first = 0; first < p.in; first += Tile::kDepth, stage ^= 1) {
    WaitForCopies();
    __syncthreads();
    if (first + Tile::kDepth < p.in) {
      bring_weight(first + Tile::kDepth, stage ^ 1);
      bring_x(first + Tile::kDepth, stage ^ 1);
    }
    const HeadElement* here = ring + stage * Tile::kStage;
    const int64_t depth = min((p.in - first + 15) / 16 * 16, static_cast<int64_t>(Tile::kDepth));
    sums.Add(here, here + Tile::kXElements, static_cast<int>(depth));
  }
  sums.Store(p, top, left);
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_LATENT_MMA_CUH_
