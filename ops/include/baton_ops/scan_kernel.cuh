// The scan: every part of every row that has outputs, one read of the logits, a warp per part.
//
// Warps share nothing. Each copies its part into shared memory of its own and looks at each strip
// as soon as that is there: few registers, so many warps, so many loads in flight. A lane reads
// only what it copied itself, so nothing here waits for another thread. What warps find goes to the
// workspace, where the finish, the kernel behind this one, combines it.
#ifndef BATON_OPS_SCAN_KERNEL_CUH_
#define BATON_OPS_SCAN_KERNEL_CUH_

#include "baton_ops/async_copy.cuh"
#include "baton_ops/grid_order.cuh"
#include "baton_ops/part_scan.cuh"

namespace baton_ops::cuda {

// The l-th row with k >= 0: the last t with row_offset[t] <= l. A search by the whole warp.
__device__ __forceinline__ int32_t RowOfOutput(const int32_t* row_offset, int32_t n, int32_t l,
                                               int lane) {
  int32_t low = 0, high = n;
  while (high - low > 1) {
    const int32_t step = (high - low + 31) / 32;
    const int32_t probe = low + lane * step;
    const bool before = probe < high && row_offset[probe] <= l;
    const int32_t last = __popc(__ballot_sync(kAllLanes, before)) - 1;
    low += last * step;
    high = min(high, low + step);
  }
  return low;
}

// A part of a row, with what scanning it needs of the row.
template <class E>
struct PartWork {
  int32_t t;
  uint32_t part;
  const char* logits;
  int32_t k;
  float scale;
  int32_t token;
  typename E::Raw sampled;  // 0 for a token outside the vocabulary

  __device__ __forceinline__ void Enter(const LogprobParams& p, int32_t row) {
    t = row;
    const int64_t source = p.row_index ? p.row_index[row] : row;
    logits = p.logits + source * p.row_bytes;
    k = p.k[row];
    scale = ScaleOf(p, row);
    token = p.token[row];
  }

  // Enters the l-th of the rows that have outputs. Returns whether there is one. Most often every
  // row has outputs: then one trip to memory tells so, because as many outputs are before the row
  // as rows are.
  __device__ __forceinline__ bool EnterOutput(const LogprobParams& p, int32_t l, int lane) {
    Enter(p, min(l, p.rows - 1));
    const int32_t outputs_before = p.row_offset[t], rows = p.Rows();
    if (l >= rows) return false;
    if (outputs_before == l && k >= 0) return true;
    if (l >= p.row_offset[rows]) return false;
    Enter(p, RowOfOutput(p.row_offset, rows, l, lane));
    return true;
  }

  __device__ __forceinline__ void LoadSampled(const LogprobParams& p) {
    using Raw = typename E::Raw;
    const bool valid = token >= 0 && token < p.vocab;
    sampled = valid ? reinterpret_cast<const Raw*>(logits)[token] : Raw{0};
  }
};

// A warp's part in its shared memory.
template <class E>
struct PartCopy {
  uint4 strip[kPartStrips][32];

  // Starts copying, each strip on its own.
  __device__ __forceinline__ void Start(const PartWork<E>& work, uint32_t vocab, int lane) {
    const bool whole = Misalignment(work.logits) == 0 && (work.part + 1) * kPartLogits<E> <= vocab;
    const char* from =
        work.logits + static_cast<uint64_t>(work.part) * kPartBytes + lane * kVectorBytes;
    const uint32_t to = SharedAddress(&strip[0][lane]);
#pragma unroll
    for (int i = 0; i < kPartStrips; ++i) {
      if (whole) CopyAsync(to + i * kStripBytes, from + i * kStripBytes);
      EndCopies();
    }
    if (whole) return;
#pragma unroll 1
    for (int i = 0; i < kPartStrips; ++i) {
      strip[i][lane] = LoadRagged<E>(work.logits, FirstOfStrip<E>(work.part, i, lane), vocab);
    }
  }

  // The maxima, element by element of a word, of what each strip holds of this lane's.
  __device__ __forceinline__ void Maxima(uint32_t (&best)[kPartStrips], int lane) const {
    static_assert(kPartStrips == 4);
    AwaitCopies<3>();
    best[0] = VectorMax<E>(strip[0][lane]);
    AwaitCopies<2>();
    best[1] = VectorMax<E>(strip[1][lane]);
    AwaitCopies<1>();
    best[2] = VectorMax<E>(strip[2][lane]);
    AwaitCopies<0>();
    best[3] = VectorMax<E>(strip[3][lane]);
  }

  __device__ __forceinline__ float Sum(float scale, float base, int lane) const {
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < kPartStrips; ++i) {
      uint4 vector = strip[i][lane];
      AddExp2<E>(vector, scale, base, sum);
    }
    return WarpSum(sum);
  }

  __device__ __forceinline__ int Count(const Threshold& threshold, int lane) const {
    typename E::Counter count = E::Zero();
#pragma unroll
    for (int i = 0; i < kPartStrips; ++i) {
      uint4 vector = strip[i][lane];
      CountVector<E>(vector, threshold, count);
    }
    return __reduce_add_sync(kAllLanes, E::Total(count));
  }
};

// The orders of the maxima of a part and of its groups.
template <class E>
struct PartMaxima {
  int highest;
  int group[kPartGroups<E>];

  __device__ __forceinline__ explicit PartMaxima(const uint32_t (&strip)[kPartStrips]) {
    constexpr int kGroupStrips = kPartStrips / kPartGroups<E>;
#pragma unroll
    for (int g = 0; g < kPartGroups<E>; ++g) {
      uint32_t best = strip[g * kGroupStrips];
#pragma unroll
      for (int i = 1; i < kGroupStrips; ++i) best = E::Max(best, strip[g * kGroupStrips + i]);
      group[g] = __reduce_max_sync(kAllLanes, E::OrderOfMax(best));
      highest = g == 0 ? group[g] : max(highest, group[g]);
    }
  }

  __device__ __forceinline__ uint32_t Word(int index) const {
    if constexpr (kPartGroups<E> == 2) return E::Kept(group[index]);
    return E::Kept(group[2 * index]) | static_cast<uint32_t>(E::Kept(group[2 * index + 1])) << 16;
  }
};

// How many of the part's logits, of which the highest has this order, count for the rank.
template <class E>
__device__ __forceinline__ int CountOf(const LogprobParams& p, const PartWork<E>& work,
                                       const PartCopy<E>& copy, int highest, int lane) {
  // Most parts hold nothing as large as the sampled logit. Zeros of either sign are equal.
  const int order = SignedOrder(E::Splat(work.sampled));
  if (highest < order && highest != SignedOrder(E::kNegZeroWord)) return 0;
  const Threshold threshold = ThresholdOf<E>(work.token, work.sampled, p.vocab, p.rank_mode);
  return highest >= threshold.order ? copy.Count(threshold, lane) : 0;
}

// Stores 16 bytes that should stay in the L2 cache until they are read, although far more passes
// through it meanwhile: writing records back to memory took 6 % of the time of many rows.
__device__ __forceinline__ void StoreToStay(PartRecord* to, uint32_t a, uint32_t b, uint32_t c,
                                            uint32_t d) {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("st.global.L2::cache_hint.v4.b32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(to), "r"(a),
               "r"(b), "r"(c), "r"(d), "l"(policy)
               : "memory");
}

template <class E>
__device__ __forceinline__ void ScanPart(const LogprobParams& p, const PartWork<E>& work,
                                         const PartCopy<E>& copy, int lane) {
  uint32_t best[kPartStrips];
  copy.Maxima(best, lane);
  const PartMaxima<E> maxima(best);
  const float base = BaseOf<E>(maxima.highest, work.scale);
  const float sum = copy.Sum(work.scale, base == -INFINITY ? 0.0f : base, lane);
  const int count = CountOf(p, work, copy, maxima.highest, lane);
  if (lane != 0) return;
  const int64_t index = static_cast<int64_t>(work.t) * p.parts + work.part;
  StoreToStay(p.records + index, maxima.Word(0), maxima.Word(1), __float_as_uint(sum), count);
}

constexpr int kScanWarps = 4;
constexpr int kScanThreads = kScanWarps * 32;
constexpr int kScanBlocksPerSm = 12;

// Blocks of column x scan the x-th kScanWarps parts of rows; those of a column share the rows.
template <class E>
__global__ void __launch_bounds__(kScanThreads, kScanBlocksPerSm)
    ScanKernel(const __grid_constant__ LogprobParams p) {
  __shared__ PartCopy<E> copies[kScanWarps];
  WaitForEarlierGrids();
  LetNextGridStart();
  const int lane = threadIdx.x % 32;
  // The same in all lanes, and known to be.
  const int warp = __shfl_sync(kAllLanes, threadIdx.x / 32, 0);
  PartWork<E> work;
  work.part = blockIdx.x * kScanWarps + warp;
  if (work.part >= static_cast<uint32_t>(p.parts)) return;
  for (int32_t l = blockIdx.y; work.EnterOutput(p, l, lane); l += gridDim.y) {
    copies[warp].Start(work, p.vocab, lane);
    work.LoadSampled(p);
    ScanPart(p, work, copies[warp], lane);
  }
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_SCAN_KERNEL_CUH_
