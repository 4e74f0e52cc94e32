// What programs of decode's attention leave for others in memory, and how it is merged.
#pragma once

#include "decode_runs.cuh"

struct Shape {
  int rows, queries, kv_heads, heads_a_kv, max_pages;
  float scale_log2;
  __device__ int used_rows() const { return queries * heads_a_kv; }
  // Where a row of a run begins among queries or outputs.
  __device__ __forceinline__ size_t element(const Run& run, int row) const {
    const int query = run.row * queries + row / heads_a_kv;
    const int head = run.head * heads_a_kv + row % heads_a_kv;
    return (static_cast<size_t>(query) * kv_heads * heads_a_kv + head) * kDim;
  }
};

// Of each split of the list and each used row: what was made (128), the four lanes' sums, the top.
// A program that has the first splits of a context and head leaves them merged, as the first.
struct Left {
  float *made, *sums, *tops;
  int* brought;  // splits of [rows][kv heads]; zero before and after a launch

  // Merges all splits of a context and head, of which the first `merged` are, by four warps.
  __device__ __forceinline__ void merge(const Run& run, const Shape& shape, int merged,
                                        __nv_bfloat16* out) const {
    const int used = shape.used_rows();
    for (int row = threadIdx.x / 32; row < used; row += 16) {
      if (used > 8) {
        merge_rows<4, 4>(run, shape, merged, row, out);
      } else if (used > 4) {
        merge_rows<2, 8>(run, shape, merged, row, out);
      } else if (run.splits - merged > 7) {
        merge_rows<1, 16>(run, shape, merged, row, out);
      } else {
        merge_rows<1, 8>(run, shape, merged, row, out);
      }
    }
  }

 private:
  // Every fourth row from one on, n of them, by a warp: four elements of each a lane. What takes
  // time is waiting for memory, so loads of all rows of `at_once` splits are under way together.
  template <int n, int at_once>
  __device__ __forceinline__ void merge_rows(const Run& run, const Shape& shape, int merged,
                                             int first_row, __nv_bfloat16* out) const {
    const int used = shape.used_rows(), lane = threadIdx.x % 32;
    const int item = run.item - run.first, parts = run.splits - merged + 1;
    Row all[n];
    float4 made_so_far[n]{};
#pragma unroll 1
    for (int from = 0; from < parts; from += at_once) {
      Row next[at_once * n];
      float4 next_made[at_once * n];
#pragma unroll
      for (int i = 0; i < at_once * n; ++i) {
        const int part = min(from + i / n, parts - 1), split = part ? merged + part - 1 : 0;
        const uint32_t at = (item + split) * used + min(first_row + i % n * 4, used - 1);
        next[i].top = __ldcg(tops + at);
        next[i].sum = __ldcg(sums + at * 4 + lane % 4);
        next_made[i] = __ldcg(reinterpret_cast<float4*>(made) + at * (kDim / 4) + lane);
      }
#pragma unroll
      for (int i = 0; i < at_once * n; ++i) {
        if (from + i / n >= parts) break;
        const Merge both(all[i % n], next[i]);
        const float4 more = next_made[i];
        float4& sum = made_so_far[i % n];
        sum = make_float4(both.sum(sum.x, more.x), both.sum(sum.y, more.y), both.sum(sum.z, more.z),
                          both.sum(sum.w, more.w));
      }
    }
#pragma unroll
    for (int j = 0; j < n; ++j) {
      const float share = share_of(all[j].sum);
      if (first_row + j * 4 >= used) continue;
      const float4 sum = made_so_far[j];
      *reinterpret_cast<uint2*>(out + shape.element(run, first_row + j * 4) + lane * 4) =
          make_uint2(packed(sum.x * share, sum.y * share), packed(sum.z * share, sum.w * share));
    }
  }
};
