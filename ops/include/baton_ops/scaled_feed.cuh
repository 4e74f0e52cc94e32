// The warpgroup that fills the rings of scaled_ring.cuh.
//
// The copy engine brings the weight and x, asked by a thread for each: asking takes some 200
// cycles. Where rows of x are named one by one, all threads copy these and scales themselves.
#ifndef BATON_OPS_SCALED_FEED_CUH_
#define BATON_OPS_SCALED_FEED_CUH_

#include "baton_ops/scaled_ring.cuh"

namespace baton_ops::cuda {

// Brings scales of rows of x that follow each other, by two warps: of each range those of its rows
// of x and of the weight; or, where the weight's are one, or one of gates and one of ups, x's times
// these. A row's of four ranges are read at once: read one by one they cost as many turns at the
// cache as there are rows, in every range. The next four are under way by then: else each four take
// as long as memory does to answer.
template <class Way, bool kAreMade>
class ScalesFeed {
 public:
  __device__ ScalesFeed(const TurnedRing<Way>& ring, const TurnedShare<Way>& share,
                        const TurnedInput& in)
      : ring_(ring),
        share_(share),
        in_(in),
        are_vectors_(in.groups % 4 == 0 && IsVector(in.x_scales) && IsVector(in.weight_scales)),
        tile_(share.first) {}

  __device__ void Run() {
    Fours now, next;
    if constexpr (kIsAhead) Read(next);
    while (tile_ < share_.Count()) {
      const int first = k_;
      if constexpr (kIsAhead) {
        now = next;
        Advance();
        Read(next);
      } else {
        Read(now);
        Advance();
      }
#pragma unroll
      for (int nth = 0; nth < 4; ++nth) {
        if (first + nth < share_.steps) Put(now, nth);
      }
    }
  }

 private:
  static constexpr int kThreads = kScaleWarps * 32;
  static constexpr int kAll = Way::kTileX + (kAreMade ? 0 : Way::kTileWeight);
  static constexpr int kPlaces = (kAll + kThreads - 1) / kThreads;  // that a thread writes
  static constexpr int kParts = Way::kGated ? 2 : 1;
  static constexpr int kRows = kPlaces + (kAreMade ? kParts : 0);
  static constexpr bool kIsAhead = kRows < 4;  // of more there are no registers for two

  static __device__ __forceinline__ bool IsVector(const float* p) {
    return reinterpret_cast<uintptr_t>(p) % 16 == 0;
  }
  __device__ __forceinline__ bool IsThere(int i) const {
    return (i + 1) * kThreads <= kAll || thread_ + i * kThreads < kAll;
  }

  // Of its rows scales of four ranges.
  struct Fours {
    alignas(16) float of[kRows][4];
  };

  __device__ __forceinline__ void Advance() {
    k_ += 4;
    if (k_ < share_.steps) return;
    k_ = 0;
    tile_ += share_.stride;
  }

  // Those behind a row's last are as it is; there may be no such tile.
  __device__ __forceinline__ void Read(Fours& fours) {
    if (tile_ >= share_.Count()) return;
    if (k_ == 0) Find(share_.Place(tile_));
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (are_vectors_) {
        *reinterpret_cast<float4*>(fours.of[i]) = *reinterpret_cast<const float4*>(rows_[i] + k_);
        continue;
      }
#pragma unroll
      for (int nth = 0; nth < 4; ++nth) {
        fours.of[i][nth] = rows_[i][min(k_ + nth, in_.groups - 1)];
      }
    }
  }

  __device__ __forceinline__ void Find(const TurnedPlace& place) {
#pragma unroll
    for (int i = 0; i < kPlaces; ++i) {
      const int row = thread_ + i * kThreads;
      rows_[i] = kAreMade || row < Way::kTileX ? in_.ScalesOfX(place, row)
                                               : OfWeight(place, row - Way::kTileX);
    }
#pragma unroll
    for (int i = kPlaces; i < kRows; ++i) rows_[i] = OfWeight(place, (i - kPlaces) * kTurnedPart);
  }
  __device__ __forceinline__ const float* OfWeight(const TurnedPlace& place, int row) const {
    return in_.ScalesOfWeight<Way::kGated>(place, share_.n, row);
  }

  __device__ __forceinline__ void Put(const Fours& fours, int nth) {
    float* to = ring_.scales + stage_.s * Way::kScales + thread_;
    Await(ring_.x_empty + stage_.s, stage_.phase ^ 1);
#pragma unroll
    for (int i = 0; i < kPlaces; ++i) {
      if (!IsThere(i)) continue;
      if constexpr (kAreMade) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          to[part * Way::kTileX + i * kThreads] =
              __fmul_rn(fours.of[i][nth], fours.of[kPlaces + part][nth]);
        }
      } else {
        to[i * kThreads] = fours.of[i][nth];
      }
    }
    __syncwarp();
    if (thread_ % 32 == 0) Arrive(ring_.x_full + stage_.s);
    stage_.Advance();
  }

  const TurnedRing<Way>& ring_;
  const TurnedShare<Way>& share_;
  const TurnedInput& in_;
  const bool are_vectors_;
  const int thread_ = threadIdx.x % kThreads;
  TurnedStage<Way::kXStages> stage_;
  int tile_, k_ = 0;  // what is read next
  const float* rows_[kRows] = {};
};

// A thread of the warpgroup that loads.
template <class Way>
class TurnedFeed {
 public:
  __device__ TurnedFeed(const TurnedRing<Way>& ring, const TurnedShare<Way>& share,
                        const TurnedInput& in, const CUtensorMap* map_x,
                        const CUtensorMap* map_weight, const CUtensorMap* map_beside)
      : ring_(ring),
        share_(share),
        in_(in),
        map_x_(map_x),
        map_weight_(map_weight),
        map_beside_(map_beside),
        weights_(share) {}

  __device__ void Run() {
#pragma unroll 1
    for (int i = 0; i < Way::kWeightStages; ++i) LoadWeight();
    BringScales();
    WaitForEarlierGrids();
    LetNextGridStart();
    if (in_.row != nullptr) {
      LoadNamed();
    } else if (threadIdx.x == kWeightThread) {
      LoadOtherWeight();
    } else if (threadIdx.x == kXThread) {
      LoadBoxesOfX();
    } else if (threadIdx.x >= kTurnedGroup - kScaleWarps * 32) {
      BringOthers();
    }
  }

 private:
  static constexpr int kWeightThread = 0, kXThread = 32;
  static constexpr int kItems = Way::kTileX / 16;  // of 16 bytes, of each row by 8 threads

  __device__ void BringOthers() const {
    if (in_.Kind() == ScaleKind::kMade) {
      ScalesFeed<Way, true>(ring_, share_, in_).Run();
    } else {
      ScalesFeed<Way, false>(ring_, share_, in_).Run();
    }
  }

  // Asks for the scales of the first tile's rows of the weight to be brought near.
  __device__ void BringScales() const {
    constexpr int kLine = 128 / sizeof(float);
    if (threadIdx.x >= Way::kTileWeight || share_.first >= share_.Count()) return;
    const float* row =
        in_.ScalesOfWeight<Way::kGated>(share_.Place(share_.first), share_.n, threadIdx.x);
#pragma unroll 1
    for (int at = 0; at < in_.groups; at += kLine) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(row + at));
    }
  }

  // Behind the first stages. What was multiplied has left its stage of the weight with x's. Given
  // back as soon as warps had read it, it was overwritten too early in up to one launch of six.
  // The thread arrives for each range's x: one that nobody waited for might sleep through two
  // phases of a barrier, and wait for the next, which needs the weight that it has not loaded.
  __device__ __forceinline__ void LoadOtherWeight() {
    TurnedStage<Way::kXStages> stage;
    const int ranges = share_.Mine() * share_.steps;
    for (int i = 0; i < ranges; ++i, stage.Advance()) {
      Await(ring_.x_empty + stage.s, stage.phase ^ 1);
      if (i >= Way::kXStages) LoadWeight();
      Arrive(ring_.x_full + stage.s);
    }
  }

  __device__ __forceinline__ void LoadBoxesOfX() const {
    TurnedStage<Way::kXStages> stage;
    for (TurnedTurn<Way> turn(share_); !turn.IsOver(); turn.Advance(), stage.Advance()) {
      uint64_t* full = ring_.x_full + stage.s;
      Await(ring_.x_empty + stage.s, stage.phase ^ 1);
      ExpectBytes(full, Way::kXBytes);
      LoadBox(ring_.x + stage.s * Way::kXBytes, map_x_, turn.k * kScaledRange, turn.place.row,
              full);
    }
  }

  __device__ __forceinline__ void LoadNamed() {
    TurnedStage<Way::kXStages> stage;
    int i = 0;
    for (TurnedTurn<Way> turn(share_); !turn.IsOver(); turn.Advance(), ++i) {
      if (turn.k == 0) FindRows(turn.place);
      Await(ring_.x_empty + stage.s, stage.phase ^ 1);
      if (i >= Way::kXStages) LoadWeight();
      CopyX(turn, ring_.x + stage.s * Way::kXBytes);
      CopyScales(turn, ring_.scales + stage.s * Way::kScales);
      ArriveBehindCopies(ring_.x_full + stage.s);
      if (threadIdx.x == kXThread) Arrive(ring_.x_full + stage.s);
      stage.Advance();
    }
  }

  // Asks for the next range of the weight, if there is one, by one thread.
  __device__ __forceinline__ void LoadWeight() {
    if (threadIdx.x != kWeightThread || weights_.IsOver()) return;
    uint64_t* full = ring_.weight_full + weight_stage_.s;
    const bool is_beside = in_.IsBeside(weights_.place);
    ExpectBytes(full, Way::kWeightBytes);
    LoadOfStack(ring_.weight + weight_stage_.s * Way::kWeightBytes,
                is_beside ? map_beside_ : map_weight_, weights_.k * kScaledRange,
                weights_.place.column, is_beside ? 0 : weights_.place.expert, full);
    weight_stage_.Advance();
    weights_.Advance();
  }

  // Of a tile: the rows that the thread copies, and those whose scales it does.
  __device__ __forceinline__ void FindRows(const TurnedPlace& place) {
    const int mine = threadIdx.x;
    scales_of_x_ = in_.ScalesOfX(place, mine);
    scales_of_weight_ = in_.ScalesOfWeight<Way::kGated>(place, share_.n, mine);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      rows_[i] = static_cast<int>(in_.RowOfX(place, i * 16 + mine / 8));
    }
  }

  // Eight threads have a row, swizzled as by the copy engine.
  __device__ __forceinline__ void CopyX(const TurnedTurn<Way>& turn, uint8_t* to) const {
    const int chunk = threadIdx.x % 8, in_block = threadIdx.x / 8;
    const int at = turn.k * kScaledRange + chunk * 16;
    const bool is_there = at < in_.in;
    const uint8_t* from = in_.x + (is_there ? at : 0);
    to += in_block * kTurnedRowBytes + (chunk ^ in_block % 8) * 16;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (turn.place.row + i * 16 >= turn.place.end_row) break;
      BeginCopyOrZeros(to + i * (16 * kTurnedRowBytes), from + int64_t{rows_[i]} * in_.in,
                       is_there);
    }
  }

  // The range's scale of a row of x, and of one of the weight's.
  __device__ __forceinline__ void CopyScales(const TurnedTurn<Way>& turn, float* to) const {
    const int mine = threadIdx.x, group = min(turn.k, in_.groups - 1);
    if (mine < Way::kTileX) BeginCopyOfFour(to + mine, scales_of_x_ + group);
    if (mine < Way::kTileWeight) {
      BeginCopyOfFour(to + Way::kTileX + mine, scales_of_weight_ + group);
    }
  }

  const TurnedRing<Way>& ring_;
  const TurnedShare<Way>& share_;
  const TurnedInput& in_;
  const CUtensorMap *map_x_, *map_weight_, *map_beside_;
  TurnedTurn<Way> weights_;
  TurnedStage<Way::kWeightStages> weight_stage_;
  const float *scales_of_x_ = nullptr, *scales_of_weight_ = nullptr;
  int rows_[kItems] = {};
};

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_SCALED_FEED_CUH_
