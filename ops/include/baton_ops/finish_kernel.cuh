// What remains of a row once every part of it is scanned: the normaliser, the rank, and the exact
// top k out of the k groups with the largest maxima (order.h's order, ties included: a group
// outside those is preceded by k groups whose maxima come before each of its elements).
//
// A block finishes a row: some warps select groups while another combines the sums, then they fetch
// the selected groups at once. What counts is the number of trips to memory in a row.
#ifndef BATON_OPS_FINISH_KERNEL_CUH_
#define BATON_OPS_FINISH_KERNEL_CUH_

#include "baton_ops/grid_order.cuh"
#include "baton_ops/row_spans.cuh"

namespace baton_ops::cuda {

// Writes the k largest of the listed keys, each at its rank among all. Four threads share a key.
__device__ __forceinline__ void WriteTopK(const FinishedRow& row, int thread) {
  constexpr int kShare = 4, kKeys = kSelectThreads / kShare;
  const LogprobParams& p = row.params;
  const FinishScratch& scratch = row.scratch;
  const Normaliser normaliser = scratch.normaliser;
  const int n = scratch.n_listed;
#pragma unroll 1
  for (int i = thread / kShare; i - thread / kShare < n; i += kKeys) {
    const uint64_t key = i < kListSize ? scratch.list[i] : 0;
    int place = 0;
#pragma unroll 1
    for (int j = thread % kShare * kCompared; j - thread % kShare * kCompared < n;
         j += kShare * kCompared) {
#pragma unroll
      for (int l = 0; l < kCompared; ++l) place += scratch.list[j + l] > key;
    }
    place += __shfl_xor_sync(kAllLanes, place, 1);
    place += __shfl_xor_sync(kAllLanes, place, 2);
    if (i >= n || place >= row.scratch.k || thread % kShare != 0) continue;
    p.topk_token[scratch.first + place] = static_cast<int32_t>(IdOfKey(key));
    p.topk_logprob[scratch.first + place] = normaliser.Logprob(ValueOfOrdered(OrderedOfKey(key)));
  }
}

// The row's top k, by the selecting threads.
template <class E>
__device__ __forceinline__ void FinishTopK(const FinishedRow& row, const HeldOrders& held,
                                           int thread) {
  FinishScratch& scratch = row.scratch;
  SelectSpans<E>(row, held, thread);
  KeepVectors<E>(row, thread / 32, thread % 32);
  SyncSelecting();
  ListReaching<E>(row, thread);
  SyncSelecting();
  if (__builtin_expect(scratch.n_kept > kMaxKept || scratch.n_listed > kListSize, 0)) {
    SyncSelecting();
    if (thread < 32) ListExactly<E>(row, OrderedOfOrder<E>(scratch.floor), thread);
  }
  // The combining warp too is done.
  __syncthreads();
  WriteTopK(row, thread);
}

// Seen by all selecting threads from the next barrier on.
template <class E>
__device__ __forceinline__ void Clear(FinishScratch& scratch, int thread) {
  if (thread >= kSelectThreads) return;
  for (int i = thread; i < kListSize; i += kSelectThreads) scratch.list[i] = 0;
  if (thread != 0) return;
  scratch.n_kept = 0;
  scratch.n_listed = 0;
  scratch.n_spans = 0;
  scratch.floor = E::OrderOfKept(E::Kept(SignedOrder(E::kNegInfWord)));
}

constexpr int kFinishBlocksPerSm = 6;

// Finishes row t, if it has outputs. It starts while the scan drains, and goes by the row's own
// records: rows whose parts are done do not wait for the last row's. All that it reads comes from
// the L2: nothing promises that an L1 cache holds nothing older than this kernel, which did not
// wait for those before it.
template <class E>
__device__ __forceinline__ void FinishRow(const LogprobParams& p, FinishScratch& scratch,
                                          int32_t t) {
  const int thread = threadIdx.x, lane = thread % 32;
  const bool combines = thread >= kSelectThreads;
  // Asked for before it is known whether the row has outputs: one trip to memory fewer.
  HeldOrders orders;
  HeldRecords records;
  if (combines) {
    LoadRow(p, t, lane, records);
  } else {
    LoadOrders<E>(p, t, 0, thread, orders);
  }
  const int32_t k = LoadNow(p.k + t);
  const int64_t source = p.row_index ? LoadNow(p.row_index + t) : t;
  const int32_t rows = p.num_rows ? min(__ldcg(p.num_rows), p.rows) : p.rows;
  if (t >= rows || k < 0) return;
  const FinishedRow row{p, scratch, p.logits + source * p.row_bytes, t};
  if (thread == 0) scratch.k = min(k, p.vocab);
  if (combines) {
    CombineParts<E>(row, records, lane);
    if (k > 0) __syncthreads();
    ResetRecords(row, lane);
  } else if (k > 0) {
    AwaitOrders<E>(p, t, thread, orders);
    FinishTopK<E>(row, orders, thread);
  }
}

template <class E>
__global__ void __launch_bounds__(kFinishThreads, kFinishBlocksPerSm)
    FinishKernel(const __grid_constant__ LogprobParams p) {
  __shared__ FinishScratch scratch;
  LetNextGridStart();
  Clear<E>(scratch, threadIdx.x);
  const int32_t t = blockIdx.x;
  FinishRow<E>(p, scratch, t);
  // What waits for this kernel waits for the scan too.
  if (t == p.rows - 1) WaitForEarlierGrids();
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_FINISH_KERNEL_CUH_
