// The product of scaled_matmul.cuh for few rows, in its order and so with its bits: what takes time
// is reading the weight once, so a warp has copies of the next ranges under way while it multiplies
// one, and does little else. It copies what it will itself multiply: no other waits for it.
//
// A tile is 32 of the weight's rows, which are the rows of the tensor cores' products; of their
// columns, which are x's rows, there are eight. A block takes one tile after the other, and the
// next one's bytes follow those of this one: its warps have a range each, which they add up in
// order in shared memory.
#ifndef BATON_OPS_SCALED_FEW_CUH_
#define BATON_OPS_SCALED_FEW_CUH_

#include "baton_ops/scaled_few_feed.cuh"

namespace baton_ops::cuda {

// A lane's sums: of 16 of the weight's rows and eight of x's, as mma.cuh has them.
using FewScaledSums = float[2][4];

// The products of a range. Of the weight every fourth word is converted by arithmetic. `halves_of`
// gives of x what the lane has of a half's word.
template <class HalvesOfX>
__device__ __forceinline__ void MultiplyRange(const uint8_t* stage, const HalvesOfX& halves_of,
                                              FewScaledSums& sums) {
  const int lane = threadIdx.x % kWarp, group = lane / 4;
  const uint8_t* mine = stage + group * kScaledRange;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    Numbers weight[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int chunk = (half * 4 + lane % 4) ^ group % 2 * 4;
      weight[i] = *reinterpret_cast<const Numbers*>(mine + i * 8 * kScaledRange + chunk * 16);
    }
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      uint32_t a[2][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t four = weight[i].at[word];
        uint32_t pairs[2] = {};
        if (word < 3) {
          pairs[0] = HalvesOf(four);
          pairs[1] = HalvesOf(four >> 16);
        } else {
          HalvesOfFour(four, pairs);
        }
        a[i / 2][i % 2] = pairs[0];
        a[i / 2][i % 2 + 2] = pairs[1];
      }
      uint32_t b[2];
      halves_of(half, word, b);
#pragma unroll
      for (int i = 0; i < 2; ++i) AddProduct(sums[i], a[i], b);
    }
  }
}

// Times the row's scale and then the weight's. A lane has of the latter's rows the same ones.
template <class Way>
__device__ __forceinline__ void ScaleSums(const FewScaledX<Way>& x, const float* of_weight,
                                          FewScaledSums& sums) {
  const auto weight = *reinterpret_cast<const Packed<float, 4>*>(of_weight);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float scaled = __fmul_rn(sums[i][j], x.scales[j % 2]);
      sums[i][j] = __fmul_rn(scaled, weight.at[i * 2 + j / 2]);
    }
  }
}

template <class Way>
class FewScaledBlock {
 public:
  using Out = typename Way::Out;

  __device__ FewScaledBlock(const ScaledParams<Out>& in, const FewScaledTiles<Way>& tiles,
                            uint8_t* memory)
      : in_(in),
        tiles_(tiles),
        mine_(memory + warp_ * Way::kWarpBytes),
        partial_(reinterpret_cast<float*>(memory + kFewScaledWarps * Way::kWarpBytes)),
        feed_(tiles, mine_) {}

  __device__ __forceinline__ void Begin() {
#pragma unroll 1
    for (int i = 0; i < Way::kStages; ++i) feed_.Copy();
  }

  __device__ __forceinline__ void Run() {
    const int ranges = (in_.in + kScaledRange - 1) / kScaledRange;
    const bool is_whole = in_.groups == 1 && ranges > 1;
    int tile = blockIdx.x, stage = 0, buffer = 0;
    if (tile >= tiles_.count) return;
    FewScaledPlace place = tiles_.Find(tile);
    FewScaledX<Way> next;
    next.Find(tiles_, place);
    next.Load(in_, tiles_.FirstRange());
    while (true) {
      float total = 0.0f;
      const int next_tile = tile + static_cast<int>(gridDim.x);
      const bool is_last = next_tile >= tiles_.count;
      FewScaledPlace next_place{};
      for (int first = 0; first < ranges; first += kFewScaledWarps) {
        const int range = first + tiles_.FirstRange();
        const FewScaledX<Way> now = next;
        if (first + kFewScaledWarps < ranges) {
          next.Load(in_, range + kFewScaledWarps);
        } else if (!is_last) {
          next_place = tiles_.Find(next_tile);
          next.Find(tiles_, next_place);
          next.Load(in_, tiles_.FirstRange());
        }
        AwaitCopies<Way::kStages - 1>();
        __syncwarp();
        if (range < ranges) {
          FewScaledSums sums = {};
          MultiplyRange(
              mine_ + stage * Way::kStageBytes,
              [&](int half, int word, uint32_t (&b)[2]) {
                const uint32_t four = now.at[half].at[word];
                b[0] = HalvesOf(four);
                b[1] = HalvesOf(four >> 16);
              },
              sums);
          if (!is_whole) ScaleSums(now, ScalesIn(stage), sums);
          Put(buffer, sums);
        }
        __syncwarp();  // all have read the stage
        feed_.Copy();
        stage = stage + 1 == Way::kStages ? 0 : stage + 1;
        __syncthreads();
        AddRanges(min(ranges - first, kFewScaledWarps), buffer, total);
        buffer ^= 1;
      }
      Store(place, is_whole, total);
      if (is_last) return;
      tile = next_tile;
      place = next_place;
    }
  }

 private:
  // The scales of the lane's rows of the weight.
  __device__ __forceinline__ const float* ScalesIn(int stage) const {
    const uint8_t* from = mine_ + Way::kStages * Way::kStageBytes + stage * Way::kScaleBytes;
    return reinterpret_cast<const float*>(from) + lane_ / 4 * 4;
  }

  __device__ __forceinline__ void Put(int buffer, const FewScaledSums& sums) const {
    float* partial = partial_ + (buffer * kFewScaledWarps + warp_) * Way::kPartial;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int row = lane_ % 4 * 2 + j % 2, column = i * 16 + j / 2 * 8 + lane_ / 4;
        partial[row * kFewScaledPitch + column] = sums[i][j];
      }
    }
  }

  // Adds a round's ranges to the thread's output: the lane's column of the warp's row.
  __device__ __forceinline__ void AddRanges(int ranges, int buffer, float& total) const {
    const float* partial =
        partial_ + buffer * kFewScaledWarps * Way::kPartial + warp_ * kFewScaledPitch + lane_;
#pragma unroll
    for (int i = 0; i < kFewScaledWarps; ++i) {
      if (i >= ranges) break;
      total = __fadd_rn(total, partial[i * Way::kPartial]);
    }
  }

  __device__ __forceinline__ void Store(const FewScaledPlace& place, bool is_whole,
                                        float sum) const {
    if (warp_ >= place.rows) return;  // the whole warp
    if (is_whole) {
      sum = __fmul_rn(sum, in_.x_scales[tiles_.RowOfX(place, warp_)]);
      sum = __fmul_rn(sum, in_.weight_scales[tiles_.WeightRow(place, lane_)]);
    }
    if constexpr (Way::kGated) {
      const float up = __shfl_xor_sync(kEveryLane, sum, Way::kOutColumns);
      if (lane_ < Way::kOutColumns) Write(place, warp_, lane_, ScaledGate<Out>(sum, up));
    } else {
      Write(place, warp_, lane_, Rounded<Out>(sum));
    }
  }

  __device__ __forceinline__ void Write(const FewScaledPlace& place, int row, int column,
                                        Out value) const {
    const int at = place.column + column;
    if (at >= in_.out_columns) return;
    in_.out[static_cast<int64_t>(place.row + row) * in_.out_stride + at] = value;
  }

  const ScaledParams<Out>& in_;
  const FewScaledTiles<Way>& tiles_;
  const int lane_ = threadIdx.x % kWarp, warp_ = threadIdx.x / kWarp;
  uint8_t* const mine_;
  float* const partial_;
  FewScaledFeed<Way> feed_;
};

// Grid: as many blocks as there is room for, or tiles. `are_starts_early`: where experts' rows
// begin was written before the kernel before this one let it start.
template <class Way>
__global__ void __launch_bounds__(kFewScaledThreads, kFewScaledBlocks)
    FewScaledKernel(ScaledParams<typename Way::Out> in, bool are_starts_early) {
  extern __shared__ __align__(128) uint8_t memory[];
  int* const begins = reinterpret_cast<int*>(memory);
  int* const before = begins + kMostGroups + 1;
  const bool has_experts = in.starts != nullptr;
  const bool waits_first = has_experts && !are_starts_early;
  if (waits_first) WaitForEarlierGrids();
  if (has_experts) {
#pragma unroll 1
    for (int i = threadIdx.x; i <= in.experts; i += kFewScaledThreads) {
      begins[i] = __ldcg(in.starts + i);
    }
    __syncthreads();
    if (threadIdx.x < kWarp) CountRowTiles(begins, in.experts, kFewScaledRows, before);
    __syncthreads();
  }
  const FewScaledTiles<Way> tiles(in, begins, before);
  FewScaledBlock<Way> block(in, tiles, memory + kFewScaledHeadBytes);
  block.Begin();
  if (!waits_first) WaitForEarlierGrids();
  LetNextGridStart();
  block.Run();
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_SCALED_FEW_CUH_
