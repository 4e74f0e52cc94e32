// Who multiplies where a row is long and rows of x are few: each of some warpgroups has every so
// many-th range of a tile, so that their chains of loads, conversions and products run beside each
// other. What they make of ranges, scaled, is added in order: the total of a tile lies in shared
// memory, and goes round from one to the next.
#ifndef BATON_OPS_SCALED_RANGES_CUH_
#define BATON_OPS_SCALED_RANGES_CUH_

#include "baton_ops/scaled_range.cuh"

namespace baton_ops::cuda {

// A thread of these. It has the same elements of a tile as the threads of its number in the others.
template <class Way>
class RangesMultiply {
 public:
  __device__ RangesMultiply(const TurnedRing<Way>& ring, const TurnedShare<Way>& share,
                            const TurnedInput& in, const MatmulOutput& out)
      : ring_(ring),
        share_(share),
        out_(out),
        is_whole_(in.groups == 1 && in.in > kScaledRange),
        is_copied_(in.row != nullptr),
        count_(share.Mine() * share.steps),
        rows_(warp_row_, lane_) {
    weight_stage_.Advance(group_);
    stage_.Advance(group_);
  }

  __device__ void Run() {
    Load(group_);
#pragma unroll 1
    for (int range = group_; range < count_; range += Way::kGroups) Turn(range);
  }

 private:
  static constexpr int kColumns = Way::kColumns, kSums = kColumns / 2;
  static constexpr int kFirstTurn = 1;  // the named barrier of group 0; the next is group 1's

  // Of the range of that number of the block's.
  __device__ __forceinline__ void Turn(int range) {
    uint32_t halves[32];
    float sums[kSums];
    ToHalves(numbers_, halves);
    const UniformDescriptor x(ring_.x + stage_.s * Way::kXBytes);
    Await(ring_.x_full + stage_.s, stage_.phase);
    if (is_copied_) PublishShared();
    BeginRange<Way>(halves, x, sums);
    Load(range + Way::kGroups);
    const float* scales = ring_.scales + stage_.s * Way::kScales;
    AwaitProducts<0>();
    Hold(sums);
    const TurnedScales<kColumns> of_range(scales, scales + Way::kTileX + lane_row_, lane_ % 4);
    if (!is_whole_) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums[i] = of_range.Scaled(sums, i);
    }
    __syncwarp();
    if (lane_ == 0) Arrive(ring_.x_empty + stage_.s);
    stage_.Advance(Way::kGroups);
    while (k_ >= share_.steps) {
      k_ -= share_.steps;
      tile_ += gridDim.x;
    }
    const bool is_last = k_ + 1 == share_.steps;
    if (range > 0) TakeTurn();
    AddTo(sums, is_last);
    if (range + 1 < count_) GiveTurn();
    if (is_last) Store(of_range, sums);
    k_ += Way::kGroups;
  }

  __device__ __forceinline__ void TakeTurn() const {
    asm volatile("bar.sync %0, %1;" ::"r"(kFirstTurn + group_), "n"(2 * kTurnedGroup) : "memory");
  }
  __device__ __forceinline__ void GiveTurn() const {
    const int next = group_ + 1 == Way::kGroups ? 0 : group_ + 1;
    asm volatile("bar.arrive %0, %1;" ::"r"(kFirstTurn + next), "n"(2 * kTurnedGroup) : "memory");
  }

  // Reads the weight's numbers of this group's next range, if it is one of the block's.
  __device__ __forceinline__ void Load(int range) {
    if (range >= count_) return;
    Await(ring_.weight_full + weight_stage_.s, weight_stage_.phase);
    numbers_ = rows_.Load(ring_.weight + weight_stage_.s * Way::kWeightBytes);
    weight_stage_.Advance(Way::kGroups);
  }

  // Adds sums to the tile's, which are left in shared memory unless they are the last ones.
  __device__ __forceinline__ void AddTo(float (&sums)[kSums], bool is_last) const {
    auto* total = reinterpret_cast<float4*>(ring_.total) + threadIdx.x % kTurnedGroup;
#pragma unroll
    for (int i = 0; i < kSums; i += 4) {
      float4& four = total[i / 4 * kTurnedGroup];
      const float4 before = k_ == 0 ? float4{} : four;
      sums[i] = __fadd_rn(before.x, sums[i]);
      sums[i + 1] = __fadd_rn(before.y, sums[i + 1]);
      sums[i + 2] = __fadd_rn(before.z, sums[i + 2]);
      sums[i + 3] = __fadd_rn(before.w, sums[i + 3]);
      if (!is_last) four = float4{sums[i], sums[i + 1], sums[i + 2], sums[i + 3]};
    }
  }

  // Sums of a whole row are scaled once they are all there.
  __device__ __forceinline__ void Store(const TurnedScales<kColumns>& scales,
                                        float (&sums)[kSums]) const {
    if (is_whole_) {
      float whole[kSums] = {};
      scales.Add(sums, whole);
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums[i] = whole[i];
    }
    StoreTurned<Way>(sums, out_, share_.Place(tile_), 0, warp_row_, lane_);
  }

  const TurnedRing<Way>& ring_;
  const TurnedShare<Way>& share_;
  const MatmulOutput& out_;
  const bool is_whole_, is_copied_;  // x by threads
  const int count_;                  // the block's ranges
  const int group_ = threadIdx.x / kTurnedGroup - 1, lane_ = threadIdx.x % 32;
  const int warp_row_ = threadIdx.x % kTurnedGroup / 32 * 16;
  const int lane_row_ = warp_row_ + SlotRow(lane_ / 4);
  const TurnedRows rows_;
  TurnedStage<Way::kWeightStages> weight_stage_;
  TurnedStage<Way::kXStages> stage_;
  int k_ = group_, tile_ = blockIdx.x;
  TurnedNumbers numbers_{};
};

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_SCALED_RANGES_CUH_
