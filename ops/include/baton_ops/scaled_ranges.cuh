// Who multiplies where a row is long and rows of x are few: each of some warpgroups has every so
// many-th range of a tile, so that their chains of loads, conversions and products run beside each
// other. What they make of ranges, scaled, is added in order: the total of a tile lies in shared
// memory, and goes round from one to the next.
#ifndef BATON_OPS_SCALED_RANGES_CUH_
#define BATON_OPS_SCALED_RANGES_CUH_

#include "baton_ops/scaled_range.cuh"

namespace baton_ops::cuda {

// A thread of these. It has the same elements of a tile as the threads of its number in the others.
// Of many columns it takes two ranges a turn, or a tile's last: then the total goes round half as
// often, which is what shared memory is busy with.
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
        turns_((share.steps + kAtOnce - 1) / kAtOnce),
        count_(share.Mine() * turns_),
        weight_(ring.weight),
        x_(ring.x) {}

  __device__ void Run() {
    if (group_ >= count_) return;
    MoveBy(group_);
    weight_stage_.Advance(Range());
    stage_.Advance(Range());
#pragma unroll 1
    for (int turn = group_; turn < count_; turn += Way::kGroups) Turn(turn);
  }

 private:
  static constexpr int kColumns = Way::kColumns, kSums = kColumns / 2, kAtOnce = Way::kAtOnce;
  static constexpr int kFirstTurn = 1;  // the named barrier of group 0; the next is group 1's

  // The turn of that number of the block's.
  __device__ __forceinline__ void Turn(int turn) {
    const int k = k_, tile = tile_, range = Range();
    const bool are_two = kAtOnce == 2 && k + 1 < share_.steps;
    const bool is_last = k + kAtOnce >= share_.steps;
    MoveBy(Way::kGroups);
    const int behind = kAtOnce == 1 ? Way::kGroups : Range() - range - (are_two ? 1 : 0);
    float first[kSums], sums[kSums];
    if (are_two) Multiply(first, 1);
    const TurnedScales<kColumns> of_range = Multiply(sums, behind);
    if (turn > 0) TakeTurn();
    AddTo(first, sums, are_two, k == 0, is_last);
    if (turn + 1 < count_) GiveTurn();
    if (is_last) Store(tile, of_range, sums);
  }

  // Makes the sums of the range that it has, scaled, and returns the scales; its next one is so many
  // behind.
  __device__ __forceinline__ TurnedScales<kColumns> Multiply(float (&sums)[kSums], int behind) {
    Await(ring_.weight_full + weight_stage_.s, weight_stage_.phase);
    Await(ring_.x_full + stage_.s, stage_.phase);
    if (is_copied_) PublishShared();
    BeginRange<kColumns>(weight_.Stage(weight_stage_.s * Way::kWeightBytes),
                         x_.Stage(stage_.s * Way::kXBytes), sums);
    const float* scales = ring_.scales + stage_.s * Way::kScales;
    const TurnedScales<kColumns> of_range(scales, scales + Way::kTileX + lane_row_, lane_ % 4);
    AwaitProducts<0>();
    Hold(sums);
    if (!is_whole_) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums[i] = of_range.Scaled(sums, i);
    }
    __syncwarp();
    if (lane_ == 0) Arrive(ring_.x_empty + stage_.s);
    weight_stage_.Advance(behind);
    stage_.Advance(behind);
    return of_range;
  }

  // Where the group is among the block's ranges, of which a tile has whole turns.
  __device__ __forceinline__ int Range() const { return before_ + k_; }
  __device__ __forceinline__ void MoveBy(int turns) {
    k_ += turns * kAtOnce;
    while (k_ >= turns_ * kAtOnce) {
      k_ -= turns_ * kAtOnce;
      tile_ += gridDim.x;
      before_ += share_.steps;
    }
  }

  __device__ __forceinline__ void TakeTurn() const {
    asm volatile("bar.sync %0, %1;" ::"r"(kFirstTurn + group_), "n"(2 * kTurnedGroup) : "memory");
  }
  __device__ __forceinline__ void GiveTurn() const {
    const int next = group_ + 1 == Way::kGroups ? 0 : group_ + 1;
    asm volatile("bar.arrive %0, %1;" ::"r"(kFirstTurn + next), "n"(2 * kTurnedGroup) : "memory");
  }

  // Adds sums, of two ranges the first one's before, to the tile's, which are left in shared memory
  // unless they are the last ones.
  __device__ __forceinline__ void AddTo(const float (&first)[kSums], float (&sums)[kSums],
                                        bool are_two, bool is_first, bool is_last) const {
    auto* total = reinterpret_cast<float4*>(ring_.total) + threadIdx.x % kTurnedGroup;
#pragma unroll
    for (int i = 0; i < kSums; i += 4) {
      float4& four = total[i / 4 * kTurnedGroup];
      float4 before = is_first ? float4{} : four;
      if (are_two) {
        before.x = __fadd_rn(before.x, first[i]);
        before.y = __fadd_rn(before.y, first[i + 1]);
        before.z = __fadd_rn(before.z, first[i + 2]);
        before.w = __fadd_rn(before.w, first[i + 3]);
      }
      sums[i] = __fadd_rn(before.x, sums[i]);
      sums[i + 1] = __fadd_rn(before.y, sums[i + 1]);
      sums[i + 2] = __fadd_rn(before.z, sums[i + 2]);
      sums[i + 3] = __fadd_rn(before.w, sums[i + 3]);
      if (!is_last) four = float4{sums[i], sums[i + 1], sums[i + 2], sums[i + 3]};
    }
  }

  // Sums of a whole row are scaled once they are all there.
  __device__ __forceinline__ void Store(int tile, const TurnedScales<kColumns>& scales,
                                        float (&sums)[kSums]) const {
    if (is_whole_) {
      float whole[kSums] = {};
      scales.Add(sums, whole);
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums[i] = whole[i];
    }
    StoreTurned<Way>(sums, out_, share_.Place(tile), 0, warp_row_, lane_);
  }

  const TurnedRing<Way>& ring_;
  const TurnedShare<Way>& share_;
  const MatmulOutput& out_;
  const bool is_whole_, is_copied_;  // x by threads
  const int turns_, count_;          // of a tile, and the block's
  const int group_ = threadIdx.x / kTurnedGroup - 1, lane_ = threadIdx.x % 32;
  const int warp_row_ = threadIdx.x % kTurnedGroup / 32 * 16;
  const int lane_row_ = warp_row_ + lane_ / 4;
  const UniformDescriptor weight_, x_;
  TurnedStage<Way::kWeightStages> weight_stage_;
  TurnedStage<Way::kXStages> stage_;
  int k_ = 0, tile_ = blockIdx.x, before_ = 0;  // ranges of the tiles before this one
};

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_SCALED_RANGES_CUH_
