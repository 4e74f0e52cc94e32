// The product of scaled_matmul.cuh for Hopper, in its order and so with its bits: tiles are turned,
// their rows are the weight's and x's rows their columns.
//
// A block stays and takes one tile after the other. One of its warpgroups loads (scaled_feed.cuh):
// the weight's bytes by the copy engine, and x, which it turns into halves. Two multiply: each
// takes 64 of the weight's rows from shared memory into registers, as halves, so that every number
// of a weight is converted once for all rows of x that a tile has. A range's sums begin at nothing,
// and are scaled and added to the tile's.
//
// wgmma's sums of eight steps have the bits of eight of mma.cuh's, whichever operand is which, if
// the same sixteen numbers meet in a step: so each operand has them where mma.cuh has them.
#ifndef BATON_OPS_SCALED_TURNED_CUH_
#define BATON_OPS_SCALED_TURNED_CUH_

#include "baton_ops/scaled_feed.cuh"
#include "baton_ops/scaled_store.cuh"

namespace baton_ops::cuda {

// What a lane has of a range of a warp's 16 rows: two rows', in each half of it.
struct TurnedNumbers {
  Sixteen at[2][2];  // by half, by row
};

// Where a warp's rows lie in a stage of the weight.
struct TurnedRows {
  int first, second;  // offsets of two rows' swizzled chunks of the first half
  __device__ TurnedRows(int warp_row, int lane) {
    const int row = warp_row + SlotRow(lane / 4), q = lane % 4;
    first = row * kScaledRange + (q ^ row % 8) * 16;
    second = (row + 1) * kScaledRange + (q ^ (row + 1) % 8) * 16;
  }
  // The other half's chunk is the fourth behind, which the swizzle keeps apart by one bit.
  __device__ __forceinline__ TurnedNumbers Load(const uint8_t* stage) const {
    const auto at = [&](int offset) { return *reinterpret_cast<const Sixteen*>(stage + offset); };
    return {{{at(first), at(second)}, {at(first ^ 64), at(second ^ 64)}}};
  }
};

// As the rows of eight products: of two words one by conversion, one by arithmetic.
__device__ __forceinline__ void ToHalves(const TurnedNumbers& numbers, uint32_t (&halves)[32]) {
#pragma unroll
  for (int word = 0; word < 8; ++word) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const uint32_t four = numbers.at[word / 4][row].at[word % 4];
      uint32_t pairs[2] = {};
      if (word % 2 == 0) {
        pairs[0] = HalvesOf(four);
        pairs[1] = HalvesOf(four >> 16);
      } else {
        HalvesOfFour(four, pairs);
      }
      halves[word * 4 + row] = pairs[0];
      halves[word * 4 + 2 + row] = pairs[1];
    }
  }
}

// Adds a range's sums to the total, times the row's scale and then the weight's; or as they are.
template <int kColumns>
__device__ __forceinline__ void AddScaled(const float* of_x, const float* of_weight, int q,
                                          const float (&sums)[kColumns / 2],
                                          float (&total)[kColumns / 2]) {
  const float weight[2] = {of_weight[0], of_weight[1]};
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
    const float2 x = *reinterpret_cast<const float2*>(of_x + j * 8 + q * 2);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float scaled = __fmul_rn(sums[j * 4 + i], i % 2 ? x.y : x.x);
      total[j * 4 + i] = __fadd_rn(total[j * 4 + i], __fmul_rn(scaled, weight[i / 2]));
    }
  }
}

template <class Way>
__device__ void TurnedConsume(const TurnedRing<Way>& ring, const TurnedShare<Way>& share,
                              const MatmulOutput& out, bool is_whole) {
  constexpr int kColumns = Way::kColumns, kSums = kColumns / 2;
  const int group = threadIdx.x / kTurnedGroup - 1, lane = threadIdx.x % 32;
  const int of_weight = Way::kWeightGroups == 2 ? group : 0;
  const int first_x = Way::kWeightGroups == 2 ? 0 : group * kColumns;
  const int warp_row = of_weight * 64 + threadIdx.x % kTurnedGroup / 32 * 16;
  const int lane_row = warp_row + SlotRow(lane / 4);
  const TurnedRows rows(warp_row, lane);
  TurnedStage<Way::kWeightStages> weight_stage;
  TurnedStage<Way::kXStages> x_stage;
  const auto load = [&] {
    Await(ring.weight_full + weight_stage.s, weight_stage.phase);
    const uint8_t* stage = ring.weight + weight_stage.s * Way::kWeightBytes;
    weight_stage.Advance();
    return rows.Load(stage);
  };
  int left = share.Mine() * share.steps;
  TurnedNumbers numbers{};
  uint32_t halves[32];
  if (left > 0) numbers = load();
  ToHalves(numbers, halves);
  for (int tile = blockIdx.x; tile < share.Count(); tile += gridDim.x) {
    float total[kSums] = {};
    for (int k = 0; k < share.steps; ++k) {
      float sums[kSums];
      const uint8_t* x = ring.x + x_stage.s * Way::kXBytes + first_x * kTurnedRowBytes;
      const uint64_t columns[2] = {Descriptor(x), Descriptor(x + Way::kXBytes / 2)};
      Await(ring.x_full + x_stage.s, x_stage.phase);
      Hold(halves);
      Hold(sums);
      FenceProducts();
#pragma unroll
      for (int step = 0; step < 8; ++step) {
        WgmmaOfHalves<kColumns>::Multiply(sums, halves + step * 4, columns[step / 4] + step % 4 * 2,
                                          step != 0);
      }
      CommitProducts();
      if (--left > 0) numbers = load();
      AwaitProducts<0>();
      Hold(sums);
      const float* scales = ring.scales + x_stage.s * Way::kScales;
      if (!is_whole) {
        AddScaled<kColumns>(scales + first_x, scales + Way::kTileX + lane_row, lane % 4, sums,
                            total);
      } else {
#pragma unroll
        for (int i = 0; i < kSums; ++i) total[i] = __fadd_rn(total[i], sums[i]);
        if (k + 1 == share.steps) {
          float whole[kSums] = {};
          AddScaled<kColumns>(scales + first_x, scales + Way::kTileX + lane_row, lane % 4, total,
                              whole);
#pragma unroll
          for (int i = 0; i < kSums; ++i) total[i] = whole[i];
        }
      }
      __syncwarp();
      if (lane == 0) Arrive(ring.x_empty + x_stage.s);
      x_stage.Advance();
      ToHalves(numbers, halves);
      Hold(halves);
    }
    const TurnedPlace place = share.Place(tile);
    MatmulOutput part = out;
    part.m = place.end_row;
    if constexpr (Way::kGated) {
      StoreScaledGates<kColumns>(total, part, place.row + first_x, place.column + warp_row / 2,
                                 lane);
    } else {
      StoreScaled<kColumns>(total, part, place.row + first_x, place.column + warp_row, lane);
    }
  }
}

// Grid: as many blocks as there are multiprocessors, or tiles.
template <class Way>
__global__ __launch_bounds__(Way::kThreads, 1) void ScaledTurnedKernel(
    const __grid_constant__ CUtensorMap map_weight, const TurnedInput in, const MatmulOutput out) {
#if BATON_HAS_WGMMA
  extern __shared__ __align__(1024) uint8_t shared[];
  const TurnedRing<Way> ring(shared);
  if (threadIdx.x == 0) {
    PrefetchMap(&map_weight);
    ring.Init();
  }
  if (in.starts != nullptr) {
    WaitForEarlierGrids();
    LetNextGridStart();
#pragma unroll 1
    for (int g = threadIdx.x; g <= in.experts; g += Way::kThreads) {
      ring.begins[g] = __ldcg(in.starts + g);
    }
    __syncthreads();
    if (threadIdx.x < kLanes) CountRowTiles(ring.begins, in.experts, Way::kTileX, ring.before);
  }
  __syncthreads();
  const TurnedShare<Way> share(in, out, ring);
  if (threadIdx.x < kTurnedGroup) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Way::kFewRegisters));
    TurnedFeed<Way>(ring, share, in, &map_weight).Run();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Way::kManyRegisters));
    TurnedConsume<Way>(ring, share, out, in.groups == 1 && in.in > kScaledRange);
  }
#endif
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_SCALED_TURNED_CUH_
