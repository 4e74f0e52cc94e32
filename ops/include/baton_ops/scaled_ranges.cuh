// Who multiplies where a row is long and rows of x are few: each of some warpgroups has every so
// many-th range of a tile, so that their waits for loads and products run beside each other. What
// they make of ranges is added in order: the total of a tile lies in shared memory, and goes round
// from one to the next.
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
        kind_(in.Kind()),
        count_(share.Mine() * share.steps),
        weight_(ring.weight),
        x_(ring.x) {}

  __device__ void Run() {
    if (group_ >= count_) return;
    MoveBy(group_);
    weight_stage_.Advance(group_);
    stage_.Advance(group_);
#pragma unroll 1
    for (int range = group_; range < count_; range += Way::kGroups) Turn(range);
  }

 private:
  static constexpr int kColumns = Way::kColumns, kSums = kColumns / 2;
  static constexpr int kFirstTurn = 1;  // the named barrier of group 0; the next is group 1's

  // The range of that number of the block's.
  __device__ __forceinline__ void Turn(int range) {
    const int tile = tile_;
    const bool is_first = k_ == 0, is_last = k_ + 1 == share_.steps;
    float sums[kSums];
    Await(ring_.weight_full + weight_stage_.s, weight_stage_.phase);
    Await(ring_.x_full + stage_.s, stage_.phase);
    if (is_copied_) PublishShared();
    BeginRange<kColumns>(weight_.Stage(weight_stage_.s * Way::kWeightBytes),
                         x_.Stage(stage_.s * Way::kXBytes), sums);
    MoveBy(Way::kGroups);
    const TurnedScales<Way> scales(ring_.scales + stage_.s * Way::kScales, kind_, 0, lane_row_,
                                   lane_ % 4);
    AwaitProducts<0>();
    Hold(sums);
    if (range > 0) TakeTurn();
    float total[kSums];
    Take(is_first, total);
    Add(scales, sums, is_last, total);
    if (!is_last) Leave(total);
    if (range + 1 < count_) GiveTurn();
    __syncwarp();
    ring_.Release(stage_.s, lane_);
    weight_stage_.Advance(Way::kGroups);
    stage_.Advance(Way::kGroups);
    if (is_last) StoreTurned<Way>(total, out_, share_.Place(tile), 0, warp_row_, lane_);
  }

  __device__ __forceinline__ void MoveBy(int ranges) {
    k_ += ranges;
    while (k_ >= share_.steps) {
      k_ -= share_.steps;
      tile_ += share_.stride;
    }
  }

  __device__ __forceinline__ void TakeTurn() const {
    asm volatile("bar.sync %0, %1;" ::"r"(kFirstTurn + group_), "n"(2 * kTurnedGroup) : "memory");
  }
  __device__ __forceinline__ void GiveTurn() const {
    const int next = group_ + 1 == Way::kGroups ? 0 : group_ + 1;
    asm volatile("bar.arrive %0, %1;" ::"r"(kFirstTurn + next), "n"(2 * kTurnedGroup) : "memory");
  }

  // What there is of the tile.
  __device__ __forceinline__ void Take(bool is_first, float (&total)[kSums]) const {
    const auto* from = reinterpret_cast<const float4*>(ring_.total) + threadIdx.x % kTurnedGroup;
#pragma unroll
    for (int i = 0; i < kSums; i += 4) {
      const float4 four = is_first ? float4{} : from[i / 4 * kTurnedGroup];
      total[i] = four.x;
      total[i + 1] = four.y;
      total[i + 2] = four.z;
      total[i + 3] = four.w;
    }
  }
  __device__ __forceinline__ void Leave(const float (&total)[kSums]) const {
    auto* to = reinterpret_cast<float4*>(ring_.total) + threadIdx.x % kTurnedGroup;
#pragma unroll
    for (int i = 0; i < kSums; i += 4) {
      to[i / 4 * kTurnedGroup] = float4{total[i], total[i + 1], total[i + 2], total[i + 3]};
    }
  }

  // Sums of a whole row are scaled once they are all there.
  __device__ __forceinline__ void Add(const TurnedScales<Way>& scales, const float (&sums)[kSums],
                                      bool is_last, float (&total)[kSums]) const {
    if (!is_whole_) return scales.AddTo(total, sums);
#pragma unroll
    for (int i = 0; i < kSums; ++i) total[i] = __fadd_rn(total[i], sums[i]);
    if (!is_last) return;
    float whole[kSums] = {};
    scales.AddTo(whole, total);
#pragma unroll
    for (int i = 0; i < kSums; ++i) total[i] = whole[i];
  }

  const TurnedRing<Way>& ring_;
  const TurnedShare<Way>& share_;
  const MatmulOutput& out_;
  const bool is_whole_, is_copied_;  // x by threads
  const ScaleKind kind_;
  const int count_;  // the block's ranges
  const int group_ = threadIdx.x / kTurnedGroup - 1, lane_ = threadIdx.x % 32;
  const int warp_row_ = threadIdx.x % kTurnedGroup / 32 * 16;
  const int lane_row_ = warp_row_ + lane_ / 4;
  const UniformDescriptor weight_, x_;
  TurnedStage<Way::kWeightStages> weight_stage_;
  TurnedStage<Way::kXStages> stage_;
  int k_ = 0, tile_ = share_.first;
};

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_SCALED_RANGES_CUH_
