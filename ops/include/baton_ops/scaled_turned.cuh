// The product of scaled_matmul.cuh for Hopper, whose tensor cores multiply e4m3 numbers as they
// are: 32 deep, in an order of their own, a range at a time. Of few rows of x tiles are turned:
// their rows are the weight's and x's rows their columns, of which no sum depends on another.
//
// A block stays and takes one tile after the other. One of its warpgroups loads (scaled_feed.cuh),
// two multiply. A range's sums begin at nothing, and are scaled and added to the tile's. Other
// tiles have more of who multiplies (scaled_ranges.cuh).
#ifndef BATON_OPS_SCALED_TURNED_CUH_
#define BATON_OPS_SCALED_TURNED_CUH_

#include <type_traits>

#include "baton_ops/scaled_feed.cuh"
#include "baton_ops/scaled_ranges.cuh"

namespace baton_ops::cuda {

// A thread that multiplies. It has two ranges' products under way, and adds the first's sums while
// the second's are made; while it adds those the other warpgroup's products are.
template <class Way>
class TurnedMultiply {
 public:
  __device__ TurnedMultiply(const TurnedRing<Way>& ring, const TurnedShare<Way>& share,
                            const TurnedInput& in, const MatmulOutput& out)
      : ring_(ring),
        share_(share),
        out_(out),
        is_whole_(in.groups == 1 && in.in > kScaledRange),
        is_copied_(in.row != nullptr),
        kind_(in.Kind()),
        weight_(ring.weight + first_weight_ * kTurnedRowBytes),
        x_(ring.x + first_x_ * kTurnedRowBytes) {}

  __device__ void Run() {
    const int tiles = share_.Mine();
#pragma unroll 1
    for (int nth = 0; nth < tiles; ++nth) {
      for (float& each : total_) each = 0.0f;
      int left = share_.steps;
#pragma unroll 1
      for (; left > 1; left -= 2) {
        float first[kSums], second[kSums];
        const Scales of_first = Begin(first);
        const Scales of_second = Begin(second);
        AwaitProducts<1>();
        Finish(first, of_first, false);
        AwaitProducts<0>();
        Finish(second, of_second, left == 2);
      }
      if (left == 1) {
        float sums[kSums];
        const Scales scales = Begin(sums);
        AwaitProducts<0>();
        Finish(sums, scales, true);
      }
      const TurnedPlace place = share_.Place(share_.first + nth * share_.stride);
      if constexpr (Way::kIsTurned) {
        StoreTurned<Way>(total_, out_, place, first_x_, warp_row_, lane_);
      } else {
        StoreStraight<Way>(total_, out_, place, lane_row_, lane_ % 4);
      }
    }
  }

 private:
  static constexpr int kColumns = Way::kColumns, kSums = kColumns / 2;
  using Scales = std::conditional_t<Way::kIsTurned, TurnedScales<Way>, StraightScales<Way>>;

  // Begins the products of the next range, and returns its scales: read behind the products, they
  // would be waited for while nothing is multiplied.
  __device__ __forceinline__ Scales Begin(float (&sums)[kSums]) {
    Await(ring_.weight_full + weight_stage_.s, weight_stage_.phase);
    Await(ring_.x_full + begun_.s, begun_.phase);
    if (is_copied_) PublishShared();
    const UniformDescriptor weight = weight_.Stage(weight_stage_.s * Way::kWeightBytes);
    const UniformDescriptor x = x_.Stage(begun_.s * Way::kXBytes);
    BeginRange<kColumns>(Way::kIsTurned ? weight : x, Way::kIsTurned ? x : weight, sums);
    const Scales scales(ring_.scales + begun_.s * Way::kScales, kind_, first_x_, lane_row_,
                        lane_ % 4);
    begun_.Advance();
    weight_stage_.Advance();
    return scales;
  }

  // Adds what those of the range before have made, scaled, and gives its stage back.
  __device__ __forceinline__ void Finish(float (&sums)[kSums], const Scales& scales, bool is_last) {
    Hold(sums);
    Add(scales, sums, is_last);
    __syncwarp();
    ring_.Release(stage_.s, lane_);
    stage_.Advance();
  }

  // Sums of a whole row are scaled once they are all there.
  __device__ __forceinline__ void Add(const Scales& scales, const float (&sums)[kSums],
                                      bool is_last) {
    if (!is_whole_) return scales.AddTo(total_, sums);
#pragma unroll
    for (int i = 0; i < kSums; ++i) total_[i] = __fadd_rn(total_[i], sums[i]);
    if (!is_last) return;
    float whole[kSums] = {};
    scales.AddTo(whole, total_);
#pragma unroll
    for (int i = 0; i < kSums; ++i) total_[i] = whole[i];
  }

  const TurnedRing<Way>& ring_;
  const TurnedShare<Way>& share_;
  const MatmulOutput& out_;
  const bool is_whole_, is_copied_;  // x by threads
  const ScaleKind kind_;
  const int group_ = threadIdx.x / kTurnedGroup - 1, lane_ = threadIdx.x % 32;
  // Of the warpgroup: its first row of x in a tile, and of the weight. A warp's rows are the
  // weight's, or x's.
  const int first_x_ = group_ * (!Way::kIsTurned ? 64 : Way::kTileWeight > 64 ? 0 : kColumns);
  const int first_weight_ = Way::kIsTurned && Way::kTileWeight > 64 ? group_ * 64 : 0;
  const int warp_row_ =
      (Way::kIsTurned ? first_weight_ : first_x_) + threadIdx.x % kTurnedGroup / 32 * 16;
  const int lane_row_ = warp_row_ + lane_ / 4;
  const UniformDescriptor weight_, x_;
  TurnedStage<Way::kWeightStages> weight_stage_;
  TurnedStage<Way::kXStages> begun_, stage_;  // what is multiplied, and what is added next
  float total_[kSums];
};

template <class Way>
using TurnedMultiplier =
    std::conditional_t<Way::kHaveRanges, RangesMultiply<Way>, TurnedMultiply<Way>>;

// Grid: as many blocks as there are multiprocessors, or tiles.
template <class Way>
__global__ __launch_bounds__(Way::kThreads, 1) void ScaledTurnedKernel(
    const __grid_constant__ CUtensorMap map_x, const __grid_constant__ CUtensorMap map_weight,
    const __grid_constant__ CUtensorMap map_beside, const TurnedInput in, const MatmulOutput out) {
#if BATON_HAS_WGMMA
  extern __shared__ __align__(1024) uint8_t shared[];
  const TurnedRing<Way> ring(shared);
  if (threadIdx.x == 0) {
    PrefetchMap(&map_x);
    PrefetchMap(&map_weight);
    if (in.HasBeside()) {
      PrefetchMap(&map_beside);
      ring.begins[in.experts + 1] = in.pairs + in.beside_rows;
    }
    ring.Init(in.row != nullptr);
  }
  if (in.starts != nullptr) {  // written before the kernel before this one let it start
#pragma unroll 1
    for (int g = threadIdx.x; g <= in.experts; g += Way::kThreads) {
      ring.begins[g] = __ldcg(in.starts + g);
    }
    __syncthreads();
    if (threadIdx.x < kLanes) CountRowTiles(ring.begins, in.Parts(), Way::kTileX, ring.before);
  }
  __syncthreads();
  const TurnedShare<Way> share(in, out, ring);
  if (threadIdx.x < kTurnedGroup) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Way::kFewRegisters));
    TurnedFeed<Way>(ring, share, in, &map_x, &map_weight, &map_beside).Run();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Way::kManyRegisters));
    TurnedMultiplier<Way>(ring, share, in, out).Run();
  }
#endif
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_SCALED_TURNED_CUH_
