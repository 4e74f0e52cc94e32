// The product of scaled_matmul.cuh for Hopper, in its order and so with its bits: tiles are turned,
// their rows are the weight's and x's rows their columns.
//
// A block stays and takes one tile after the other. One of its warpgroups loads (scaled_feed.cuh):
// the weight's bytes, and x as halves, which who quantised it made. Two multiply: each takes 64 of
// the weight's rows from shared memory into registers, as halves, so that every number of a weight
// is converted once for all rows of x that a tile has. A range's sums begin at nothing, and are
// scaled and added to the tile's. Other tiles have more of who multiplies (scaled_ranges.cuh).
//
// wgmma's sums of eight steps have the bits of eight of mma.cuh's, whichever operand is which, if
// the same sixteen numbers meet in a step: so each operand has them where mma.cuh has them.
#ifndef BATON_OPS_SCALED_TURNED_CUH_
#define BATON_OPS_SCALED_TURNED_CUH_

#include <type_traits>

#include "baton_ops/scaled_feed.cuh"
#include "baton_ops/scaled_ranges.cuh"

namespace baton_ops::cuda {

// A thread that multiplies. Where there are registers for two ranges' halves of the weight it makes
// the next one's while a range's products are under way, of numbers that it has read before, and
// reads those behind them: of what a range needs nothing is waited for.
//
// Both warpgroups take turns at the tensor cores: one multiplies while the other scales, adds and
// converts. Else they are in step, as they share stages of x, and the tensor cores wait for both. A
// turn is given when all products but a range's last are over, not when they are begun: those of
// two warpgroups that are under way together end together.
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
        left_(share.Mine() * share.steps),
        rows_(warp_row_, lane_) {}

  __device__ void Run() {
    int ranges = left_;
    if (ranges == 0) return;
    if (group_ == 1) GiveTurn();
    uint32_t halves[32];
    Load();
    ToHalves(numbers_, halves);
    if constexpr (kAreTwo) {
      uint32_t next[32];
      Load();
      for (; ranges > 1; ranges -= 2) {
        Turn(halves, next);
        Turn(next, halves);
      }
      if (ranges == 1) Turn(halves, next);
    } else {
      for (; ranges > 0; --ranges) Turn(halves, halves);
    }
    if (group_ == 0) TakeTurn();  // hears the other's last word
  }

 private:
  static constexpr int kColumns = Way::kColumns, kSums = kColumns / 2;
  static constexpr bool kAreTwo = kColumns <= 64;
  static constexpr int kFirstTurn = 1;  // the named barrier of group 0; the next is group 1's

  __device__ __forceinline__ void TakeTurn() const {
    asm volatile("bar.sync %0, %1;" ::"r"(kFirstTurn + group_), "n"(2 * kTurnedGroup) : "memory");
  }
  __device__ __forceinline__ void GiveTurn() const {
    asm volatile("bar.arrive %0, %1;" ::"r"(kFirstTurn + 1 - group_), "n"(2 * kTurnedGroup)
                 : "memory");
  }

  // A range, of these halves; makes those of the one behind it.
  __device__ __forceinline__ void Turn(uint32_t (&halves)[32], uint32_t (&next)[32]) {
    float sums[kSums];
    Begin(halves, sums);
    if constexpr (kAreTwo) {
      ToHalves(numbers_, next);
      Hold(next);
    }
    Load();
    AwaitProducts<1>();
    GiveTurn();
    const float* scales = ring_.scales + stage_.s * Way::kScales;
    const float *of_x = scales + first_x_, *of_weight = scales + Way::kTileX + lane_row_;
    if constexpr (kAreTwo) {
      const TurnedScales<kColumns> of_range(of_x, of_weight, lane_ % 4);
      AwaitProducts<0>();
      Hold(sums);
      Add(of_range, sums);
    } else {
      AwaitProducts<0>();
      Hold(sums);
      Add(TurnedScales<kColumns>(of_x, of_weight, lane_ % 4), sums);
      ToHalves(numbers_, next);
      Hold(next);
    }
    __syncwarp();
    if (lane_ == 0) Arrive(ring_.x_empty + stage_.s);
    stage_.Advance();
    if (++k_ == share_.steps) Store();
  }

  // Reads the weight's numbers of the range after those that were read, if there is one.
  __device__ __forceinline__ void Load() {
    if (left_ == 0) return;
    --left_;
    Await(ring_.weight_full + weight_stage_.s, weight_stage_.phase);
    numbers_ = rows_.Load(ring_.weight + weight_stage_.s * Way::kWeightBytes);
    weight_stage_.Advance();
  }

  __device__ __forceinline__ void Begin(uint32_t (&halves)[32], float (&sums)[kSums]) {
    const UniformDescriptor x(ring_.x + stage_.s * Way::kXBytes + first_x_ * kTurnedRowBytes);
    Await(ring_.x_full + stage_.s, stage_.phase);
    if (is_copied_) PublishShared();
    TakeTurn();
    BeginRange<Way>(halves, x, sums);
  }

  // Sums of a whole row are scaled once they are all there.
  __device__ __forceinline__ void Add(const TurnedScales<kColumns>& scales,
                                      const float (&sums)[kSums]) {
    if (!is_whole_) return scales.Add(sums, total_);
#pragma unroll
    for (int i = 0; i < kSums; ++i) total_[i] = __fadd_rn(total_[i], sums[i]);
    if (k_ + 1 < share_.steps) return;
    float whole[kSums] = {};
    scales.Add(total_, whole);
#pragma unroll
    for (int i = 0; i < kSums; ++i) total_[i] = whole[i];
  }

  __device__ __forceinline__ void Store() {
    StoreTurned<Way>(total_, out_, share_.Place(tile_), first_x_, warp_row_, lane_);
#pragma unroll
    for (float& each : total_) each = 0.0f;
    k_ = 0;
    tile_ += gridDim.x;
  }

  const TurnedRing<Way>& ring_;
  const TurnedShare<Way>& share_;
  const MatmulOutput& out_;
  const bool is_whole_, is_copied_;  // x by threads
  int left_;                         // ranges of the weight that were not read
  const int group_ = threadIdx.x / kTurnedGroup - 1, lane_ = threadIdx.x % 32;
  const int first_x_ = Way::kWeightGroups == 2 ? 0 : group_ * kColumns;
  const int warp_row_ =
      (Way::kWeightGroups == 2 ? group_ * 64 : 0) + threadIdx.x % kTurnedGroup / 32 * 16;
  const int lane_row_ = warp_row_ + SlotRow(lane_ / 4);
  const TurnedRows rows_;
  TurnedStage<Way::kWeightStages> weight_stage_;
  TurnedStage<Way::kXStages> stage_;
  int k_ = 0, tile_ = blockIdx.x;
  TurnedNumbers numbers_{};
  float total_[kSums] = {};
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
