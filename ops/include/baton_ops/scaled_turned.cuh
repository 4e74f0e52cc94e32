// The product of scaled_matmul.cuh for Hopper, whose tensor cores multiply e4m3 numbers as they are:
// 32 deep, in an order of their own, a range at a time. Tiles are turned, their rows are the
// weight's and x's rows their columns, of which no sum depends on another.
//
// A block stays and takes one tile after the other. One of its warpgroups loads (scaled_feed.cuh),
// two multiply. A range's sums begin at nothing, and are scaled and added to the tile's. Other tiles
// have more of who multiplies (scaled_ranges.cuh).
#ifndef BATON_OPS_SCALED_TURNED_CUH_
#define BATON_OPS_SCALED_TURNED_CUH_

#include <type_traits>

#include "baton_ops/scaled_feed.cuh"
#include "baton_ops/scaled_ranges.cuh"

namespace baton_ops::cuda {

// A thread that multiplies. Both warpgroups take turns at the tensor cores: one multiplies while the
// other scales and adds. A turn is given when all products but a range's last are over, not when
// they are begun: those of two warpgroups that are under way together end together.
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
        weight_(ring.weight + first_weight_ * kTurnedRowBytes),
        x_(ring.x + first_x_ * kTurnedRowBytes) {}

  __device__ void Run() {
    const int ranges = share_.Mine() * share_.steps;
    if (ranges == 0) return;
    if (group_ == 1) GiveTurn();
#pragma unroll 1
    for (int i = 0; i < ranges; ++i) Turn();
    if (group_ == 0) TakeTurn();  // hears the other's last word
  }

 private:
  static constexpr int kColumns = Way::kColumns, kSums = kColumns / 2;
  static constexpr int kFirstTurn = 1;  // the named barrier of group 0; the next is group 1's

  __device__ __forceinline__ void TakeTurn() const {
    asm volatile("bar.sync %0, %1;" ::"r"(kFirstTurn + group_), "n"(2 * kTurnedGroup) : "memory");
  }
  __device__ __forceinline__ void GiveTurn() const {
    asm volatile("bar.arrive %0, %1;" ::"r"(kFirstTurn + 1 - group_), "n"(2 * kTurnedGroup)
                 : "memory");
  }

  __device__ __forceinline__ void Turn() {
    float sums[kSums];
    Await(ring_.weight_full + weight_stage_.s, weight_stage_.phase);
    Await(ring_.x_full + stage_.s, stage_.phase);
    if (is_copied_) PublishShared();
    TakeTurn();
    BeginRange<kColumns>(weight_.Stage(weight_stage_.s * Way::kWeightBytes),
                         x_.Stage(stage_.s * Way::kXBytes), sums);
    AwaitProducts<1>();
    GiveTurn();
    const float* scales = ring_.scales + stage_.s * Way::kScales;
    const TurnedScales<kColumns> of_range(scales + first_x_, scales + Way::kTileX + lane_row_,
                                          lane_ % 4);
    AwaitProducts<0>();
    Hold(sums);
    Add(of_range, sums);
    __syncwarp();
    if (lane_ == 0) Arrive(ring_.x_empty + stage_.s);
    stage_.Advance();
    weight_stage_.Advance();
    if (++k_ == share_.steps) Store();
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
  const int group_ = threadIdx.x / kTurnedGroup - 1, lane_ = threadIdx.x % 32;
  const int first_x_ = Way::kWeightGroups == 2 ? 0 : group_ * kColumns;
  const int first_weight_ = Way::kWeightGroups == 2 ? group_ * 64 : 0;
  const int warp_row_ = first_weight_ + threadIdx.x % kTurnedGroup / 32 * 16;
  const int lane_row_ = warp_row_ + lane_ / 4;
  const UniformDescriptor weight_, x_;
  TurnedStage<Way::kWeightStages> weight_stage_;
  TurnedStage<Way::kXStages> stage_;
  int k_ = 0, tile_ = blockIdx.x;
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
