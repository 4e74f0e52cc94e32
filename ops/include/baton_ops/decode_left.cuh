// What blocks of decode's attention leave for others in memory, and how it is merged.
#ifndef BATON_OPS_DECODE_LEFT_CUH_
#define BATON_OPS_DECODE_LEFT_CUH_

#include "baton_ops/decode_runs.cuh"

namespace baton_ops::cuda {

constexpr int kMostDecodeRows = 32;  // queries times heads that share keys
constexpr int kMostRowsTimesHeads = 1 << 16;

struct DecodeShape {
  int rows, queries, heads_a_kv;
  float scale_log2;
  __device__ int UsedRows() const { return queries * heads_a_kv; }
};

// A block has `slots` of each used row: what was made (128), the four lanes' sums, the top. In the
// first lie splits of the context and head that it goes on with; in the last those that it begins
// with, merged.
struct DecodeLeft {
  float *made, *sums, *tops;
  int* brought;  // splits of [rows][kv heads]; zero before and after a launch
  int slots;

  // The place of a used row of a split.
  __device__ __forceinline__ uint32_t Place(int block, int slot, int used, int row) const {
    return (block * slots + slot) * used + row;
  }
};

// Merges all splits of a context and head, of which the first `merged` are, by four warps. Where
// they lie is known before any is there: each lane looks up one part's place for all.
class DecodeMerge {
 public:
  __device__ DecodeMerge(const DecodeLeft& left, const DecodeShape& shape, const Contexts& contexts,
                         const Run& run)
      : left_(left),
        contexts_(contexts),
        used_(shape.UsedRows()),
        item_(run.item - run.first),
        merged_(contexts.InFirstRun(run)),
        parts_(run.splits - merged_ + 1),
        first_place_(Place(min(static_cast<int>(threadIdx.x % 32), parts_ - 1))) {}

  // Calls store(row, lane, the four elements of the lane) with each used row. What takes time is
  // waiting for memory and for instructions, which a step's other kernels have driven out: so few
  // rows are merged one after the other by the same ones.
  template <class Store>
  __device__ __forceinline__ void ForEachRow(Store store) const {
    const int warp = threadIdx.x / 32;
    if (used_ > 8) {
      for (int row = warp; row < used_; row += 16) MergeRows<4, 4>(row, store);
    } else if (parts_ > 8) {
#pragma unroll 1
      for (int row = warp; row < used_; row += 4) MergeRows<1, 16>(row, store);
    } else if (parts_ > 4) {
#pragma unroll 1
      for (int row = warp; row < used_; row += 4) MergeRows<1, 8>(row, store);
    } else {
      MergeRows<2, 4>(warp, store);
    }
  }

 private:
  // The place of a part's first row.
  __device__ __forceinline__ uint32_t Place(int part) const {
    const int item = item_ + (part ? merged_ + part - 1 : 0), block = contexts_.BlockOf(item);
    const int slot = part ? item - contexts_.FirstOf(block) : left_.slots - 1;
    return left_.Place(block, slot, used_, 0);
  }

  // Every fourth row from one on, kRows of them, by a warp: four elements of each a lane. Loads of
  // all rows of `kAtOnce` splits are under way together.
  template <int kRows, int kAtOnce, class Store>
  __device__ __forceinline__ void MergeRows(int first_row, Store store) const {
    const int lane = threadIdx.x % 32;
    SoftmaxRow all[kRows];
    float4 made_so_far[kRows]{};
#pragma unroll 1
    for (int from = 0; from < parts_; from += kAtOnce) {
      const uint32_t place =
          from == 0 ? first_place_ : Place(min(from + lane % kAtOnce, parts_ - 1));
      SoftmaxRow next[kAtOnce * kRows];
      float4 next_made[kAtOnce * kRows];
#pragma unroll
      for (int i = 0; i < kAtOnce * kRows; ++i) {
        const int row = min(first_row + i % kRows * 4, used_ - 1);
        const uint32_t at = __shfl_sync(~0u, place, i / kRows) + row;
        next[i].top = __ldcg(left_.tops + at);
        next[i].sum = __ldcg(left_.sums + at * 4 + lane % 4);
        next_made[i] = __ldcg(reinterpret_cast<float4*>(left_.made) + at * (kHeadDim / 4) + lane);
      }
      // Chosen, not branched around: else the compiler puts each load behind its branch, where it
      // waits for the one before.
#pragma unroll
      for (int i = 0; i < kAtOnce * kRows; ++i) {
        const bool is_there = from + i / kRows < parts_;
        SoftmaxRow& row = all[i % kRows];
        SoftmaxRow merged = row;
        const Merge both(merged, next[i]);
        row.top = is_there ? merged.top : row.top;
        row.sum = is_there ? merged.sum : row.sum;
        const float4 more = next_made[i];
        float4& sum = made_so_far[i % kRows];
        sum.x = is_there ? both.Sum(sum.x, more.x) : sum.x;
        sum.y = is_there ? both.Sum(sum.y, more.y) : sum.y;
        sum.z = is_there ? both.Sum(sum.z, more.z) : sum.z;
        sum.w = is_there ? both.Sum(sum.w, more.w) : sum.w;
      }
    }
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      const float share = ShareOf(all[j].sum);
      const float4 sum = made_so_far[j];
      if (first_row + j * 4 >= used_) continue;
      store(first_row + j * 4, lane,
            make_uint2(PackedPair(sum.x * share, sum.y * share),
                       PackedPair(sum.z * share, sum.w * share)));
    }
  }

  const DecodeLeft& left_;
  const Contexts& contexts_;
  const int used_, item_, merged_, parts_;
  const uint32_t first_place_;
};

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_DECODE_LEFT_CUH_
