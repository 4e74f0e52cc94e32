// The scan: every part of every row that has outputs, one read of the logits, a warp per part.
//
// Warps share nothing. Each has its part copied into shared memory of its own: few registers, so
// many warps, so many bytes on their way. What warps find goes to the workspace, where the finish,
// the kernel behind this one, combines it.
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

// A load that the compiler leaves where it stands: those that copying waits for come before others.
__device__ __forceinline__ int32_t LoadHere(const int32_t* at) {
  int32_t value;
  asm volatile("ld.global.b32 %0, [%1];" : "=r"(value) : "l"(at));
  return value;
}

// A part of a row, with what scanning it needs of the row.
template <class E, bool kIndexed>
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
    const int64_t source = kIndexed ? LoadHere(p.row_index + row) : row;
    logits = p.logits + source * p.row_bytes;
    k = LoadHere(p.k + row);
  }

  // Not needed before copying.
  __device__ __forceinline__ void LoadSettings(const LogprobParams& p) {
    scale = ScaleOf(p.inv_temp ? p.inv_temp[t] : 1.0f);
    token = p.token[t];
  }

  // Whether the part's bytes can be copied as they are.
  __device__ __forceinline__ bool Whole(uint32_t vocab) const {
    return Misalignment(logits) == 0 && (part + 1) * kPartLogits<E> <= vocab;
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
  WarpCopy copy;

  template <class Work>
  __device__ __forceinline__ void Start(const Work& work, uint32_t vocab, int lane) {
    if (!work.Whole(vocab)) return;
    copy.Start<kPartBytes>(strip, work.logits + static_cast<uint64_t>(work.part) * kPartBytes,
                           lane);
  }

  // Returns once a part that was started is there, whole or not. Flips the parity if it was
  // awaited.
  template <class Work>
  __device__ __forceinline__ void Await(const Work& work, uint32_t vocab, uint32_t& parity) {
    if (!work.Whole(vocab)) return;
    copy.Await(parity);
    parity ^= 1;
  }

  // Brings a part that cannot be copied as it is.
  template <class Work>
  __device__ __forceinline__ void LoadUneven(const Work& work, uint32_t vocab, int lane) {
    if (work.Whole(vocab)) return;
#pragma unroll 1
    for (int i = 0; i < kPartStrips; ++i) {
      strip[i][lane] = LoadRagged<E>(work.logits, FirstOfStrip<E>(work.part, i, lane), vocab);
    }
    WarpCopy::OrderWrites();
  }

  // The maxima, element by element of a word, of what each strip holds of this lane's.
  __device__ __forceinline__ void Maxima(uint32_t (&best)[kPartStrips], int lane) const {
#pragma unroll
    for (int i = 0; i < kPartStrips; ++i) best[i] = VectorMax<E>(strip[i][lane]);
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

// The orders of the maxima of a part and of its groups. For a row without a top k nobody asks which
// group holds the part's maximum.
template <class E>
struct PartMaxima {
  int highest;
  int group[kPartGroups<E>];

  __device__ __forceinline__ PartMaxima(const uint32_t (&strip)[kPartStrips], bool by_group) {
    if (by_group) {
      FindEach(strip);
    } else {
      FindHighest(strip);
    }
  }

  __device__ __forceinline__ void FindEach(const uint32_t (&strip)[kPartStrips]) {
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

  __device__ __forceinline__ void FindHighest(const uint32_t (&strip)[kPartStrips]) {
    uint32_t best = strip[0];
#pragma unroll
    for (int i = 1; i < kPartStrips; ++i) best = E::Max(best, strip[i]);
    highest = __reduce_max_sync(kAllLanes, E::OrderOfMax(best));
#pragma unroll
    for (int g = 0; g < kPartGroups<E>; ++g) group[g] = highest;
  }

  __device__ __forceinline__ uint32_t Word(int index) const {
    if constexpr (kPartGroups<E> == 2) return E::Kept(group[index]);
    return E::Kept(group[2 * index]) | static_cast<uint32_t>(E::Kept(group[2 * index + 1])) << 16;
  }
};

// How many of the part's logits, of which the highest has this order, count for the rank.
template <class E, class Work>
__device__ __forceinline__ int CountOf(const LogprobParams& p, const Work& work,
                                       const PartCopy<E>& copy, int highest, int lane) {
  // Most parts hold nothing as large as the sampled logit. Zeros of either sign are equal.
  const int order = SignedOrder(E::Splat(work.sampled));
  if (highest < order && highest != SignedOrder(E::kNegZeroWord)) return 0;
  const Threshold threshold = ThresholdOf<E>(work.token, work.sampled, p.vocab, p.rank_mode);
  return highest >= threshold.order ? copy.Count(threshold, lane) : 0;
}

// Stores a record, all at once, to stay in the L2 cache until it is read, although far more passes
// through it meanwhile: writing records back to memory took 6 % of the time of many rows.
__device__ __forceinline__ void StoreToStay(PartRecord* to, uint32_t a, uint32_t b, uint32_t c,
                                            uint32_t d) {
  uint64_t stay;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(stay));
  const uint64_t low = a | static_cast<uint64_t>(b) << 32, high = c | static_cast<uint64_t>(d)
                                                                          << 32;
  asm volatile(
      "{ .reg .b128 all; mov.b128 all, {%1, %2};"
      " st.relaxed.gpu.global.L2::cache_hint.b128 [%0], all, %3; }" ::"l"(to),
      "l"(low), "l"(high), "l"(stay)
      : "memory");
}

template <class E, class Work>
__device__ __forceinline__ void ScanPart(const LogprobParams& p, const Work& work,
                                         const PartCopy<E>& copy, int lane) {
  uint32_t best[kPartStrips];
  copy.Maxima(best, lane);
  const PartMaxima<E> maxima(best, work.k > 0);
  const float base = BaseOf<E>(maxima.highest, work.scale);
  const float sum = copy.Sum(work.scale, base == -INFINITY ? 0.0f : base, lane);
  const int count = CountOf(p, work, copy, maxima.highest, lane);
  if (lane != 0) return;
  const int64_t index = static_cast<int64_t>(work.t) * p.parts + work.part;
  StoreToStay(p.records + index, maxima.Word(0), maxima.Word(1), __float_as_uint(sum),
              count ^ kComplete);
}

constexpr int kScanWarps = 4;
constexpr int kScanThreads = kScanWarps * 32;
constexpr int kScanBlocksPerSm = 12;

// The row that is the l-th with outputs, or -1 if there are no more. Most often every row has
// outputs: then as many outputs are before row l as rows are, which is known without a search.
__device__ __forceinline__ int32_t RowToScan(const LogprobParams& p, int32_t l, int32_t k_of_l,
                                             int32_t rows, int lane) {
  const int32_t outputs_before = LoadHere(p.row_offset + l);
  if (l >= rows) return -1;
  if (outputs_before == l && k_of_l >= 0) return l;
  return l < p.row_offset[rows] ? RowOfOutput(p.row_offset, rows, l, lane) : -1;
}

// Blocks of column x scan the x-th kScanWarps parts of rows; those of a column share the rows.
//
// Row l is copied before it is known whether it is the l-th with outputs, which it most often is.
// If an index says where it lies it has some outputs, though: else the index may hold anything
// there.
template <class E, bool kIndexed>
__global__ void __launch_bounds__(kScanThreads, kScanBlocksPerSm)
    ScanKernel(const __grid_constant__ LogprobParams p) {
  __shared__ PartCopy<E> copies[kScanWarps];
  const int lane = threadIdx.x % 32;
  // The same in all lanes, and known to be.
  const int warp = __shfl_sync(kAllLanes, threadIdx.x / 32, 0);
  PartCopy<E>& copy = copies[warp];
  copy.copy.Init(lane);
  WaitForEarlierGrids();
  LetNextGridStart();
  PartWork<E, kIndexed> work;
  work.part = blockIdx.x * kScanWarps + warp;
  if (work.part >= static_cast<uint32_t>(p.parts)) return;
  uint32_t parity = 0;
  for (int32_t l = blockIdx.y; l < p.rows; l += gridDim.y) {
    work.Enter(p, l);
    const int32_t rows = p.num_rows ? min(LoadHere(p.num_rows), p.rows) : p.rows;
    const bool early = !kIndexed || (l < rows && work.k >= 0);
    if (early) {
      copy.Start(work, p.vocab, lane);
      work.LoadSettings(p);
    }
    const int32_t t = RowToScan(p, l, work.k, rows, lane);
    if (t != l) {
      if (early) copy.Await(work, p.vocab, parity);
      if (t < 0) return;
      __syncwarp();
      work.Enter(p, t);
      copy.Start(work, p.vocab, lane);
      work.LoadSettings(p);
    }
    work.LoadSampled(p);
    copy.LoadUneven(work, p.vocab, lane);
    copy.Await(work, p.vocab, parity);
    ScanPart(p, work, copy, lane);
    __syncwarp();
  }
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_SCAN_KERNEL_CUH_
