// Finding a row's best elements among those of its selected spans of groups, by a whole block.
#ifndef BATON_OPS_ROW_ELEMENTS_CUH_
#define BATON_OPS_ROW_ELEMENTS_CUH_

#include "baton_ops/part_scan.cuh"

namespace baton_ops::cuda {

constexpr int kListSize = 192;  // a multiple of what WriteTopK compares with in a round, 32
// Keys that WriteTopK compares with at once. The list ends in zeros, which are no keys.
constexpr int kCompared = 8;
constexpr uint32_t kMaxKept = 128;  // a selecting thread each
// Spans that may be selected: k, and some more that save a closer look.
constexpr int kMaxSelected = 96;
static_assert(kMaxTopK <= kMaxSelected);

// Spans that a row may have.
constexpr int kMaxSpans = 512;

// A block's warps: some select spans and list elements, one combines the parts meanwhile.
constexpr int kSelectWarps = 4;
constexpr int kSelectThreads = kSelectWarps * 32;
constexpr int kFinishThreads = kSelectThreads + 32;
// The orders of spans that each selecting thread holds: every kSelectThreads-th.
constexpr int kHeldSpans = kMaxSpans / kSelectThreads;
// Spans that a selecting warp fetches at once.
constexpr int kInFlight = 6;

__device__ __forceinline__ void SyncSelecting() {
  asm volatile("bar.sync 1, %0;" ::"n"(kSelectThreads) : "memory");
}

// Maximum and log of the sum are kept apart, so that a common offset costs no accuracy.
struct Normaliser {
  float scale;
  double base;
  double log_sum;

  __device__ __forceinline__ float Logprob(float logit) const {
    if (logit == -INFINITY) return kLowestLogprob;
    constexpr double kLn2 = 0.69314718055994530942;
    const double logprob =
        (static_cast<double>(logit) * static_cast<double>(scale) - base) * kLn2 - log_sum;
    return logprob < kLowestLogprob ? kLowestLogprob : static_cast<float>(logprob);
  }
};

// The block's shared memory.
struct FinishScratch {
  uint4 kept[kMaxKept];  // vectors with an element that reaches the floor
  uint32_t kept_first[kMaxKept];
  uint64_t list[kListSize];  // keys of elements
  int best[kSelectThreads];  // of each thread's spans
  int order[kMaxSpans];      // of every span, for rows with many ties alone
  uint32_t span[kMaxSelected];
  int32_t k;        // entries to find: at most V
  uint32_t n_kept;  // may exceed what is there
  uint32_t n_listed;
  uint32_t n_spans;
  int floor;  // an order that the top k reach, and that some logit has
  // From the combining warp.
  Normaliser normaliser;
  int32_t first;  // place of the row's entries
};

// The row that a block finishes.
struct FinishedRow {
  const LogprobParams& params;
  FinishScratch& scratch;
  const char* logits;
  int32_t t;
};

// The strips of the selected spans, as this lane sees them: 16 bytes of each.
template <class E>
class SelectedStrips {
 public:
  static constexpr int kGroupStrips = kGroupLogits * E::kBytes / kStripBytes;

  __device__ __forceinline__ SelectedStrips(const FinishedRow& row, int lane)
      : row_(row),
        span_strips_(row.params.span * kGroupStrips),
        lane_(lane),
        vocab_(row.params.vocab),
        even_(Misalignment(row.logits) == 0 && row.params.vocab % E::kPerVector == 0) {}

  __device__ __forceinline__ int size() const { return row_.scratch.n_spans * span_strips_; }

  __device__ __forceinline__ int span_strips() const { return span_strips_; }

  // The token id of this lane's first element in a strip of a selected span. May exceed the row.
  __device__ __forceinline__ uint32_t First(int selected, int strip) const {
    const uint32_t at = row_.scratch.span[selected] * span_strips_ + strip;
    return (at * 32 + lane_) * E::kPerVector;
  }

  __device__ __forceinline__ uint32_t First(int strip) const {
    return First(strip / span_strips_, strip % span_strips_);
  }

  // Elements past the row's end are -inf.
  __device__ __forceinline__ uint4 Load(uint32_t first) const {
    uint4 vector = make_uint4(E::kNegInfWord, E::kNegInfWord, E::kNegInfWord, E::kNegInfWord);
    if (even_) {
      const char* at = row_.logits + static_cast<uint64_t>(first) * E::kBytes;
      if (first < vocab_) vector = __ldcg(reinterpret_cast<const uint4*>(at));
      return vector;
    }
    return LoadElements<E>(row_.logits, first, vocab_);
  }

  // Whether vectors are aligned, and inside the row or outside of it as a whole.
  __device__ __forceinline__ bool even() const { return even_; }

  // As Load, for an even row.
  __device__ __forceinline__ uint4 LoadEven(uint32_t first) const {
    uint4 v;
    const char* at = row_.logits + static_cast<uint64_t>(first) * E::kBytes;
    asm volatile(
        "{ .reg .pred inside; setp.lt.u32 inside, %5, %6; mov.b32 %0, %7; mov.b32 %1, %7;"
        " mov.b32 %2, %7; mov.b32 %3, %7;"
        " @inside ld.global.cg.v4.b32 {%0, %1, %2, %3}, [%4]; }"
        : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
        : "l"(at), "r"(first), "r"(vocab_), "n"(E::kNegInfWord));
    return v;
  }

 private:
  const FinishedRow& row_;
  int span_strips_;
  int lane_;
  uint32_t vocab_;
  bool even_;
};

// Orders of -0 and +0 made equal, so that ties between them go by id.
template <class E>
__device__ __forceinline__ int MergeZeros(int order) {
  return E::Kept(order) == E::Kept(SignedOrder(E::kNegZeroWord)) ? 0 : order;
}

// The OrderedValue of the logits that have an order.
template <class E>
__device__ __forceinline__ uint32_t OrderedOfOrder(int order) {
  return OrderedValue(E::ValueOfOrder(order));
}

template <class E>
__device__ __forceinline__ uint32_t OrderedElement(uint4& vector, int index) {
  const int at = index / E::kPerWord;
  uint32_t word = at & 2 ? (at & 1 ? vector.w : vector.z) : (at & 1 ? vector.y : vector.x);
  const bool high = E::kPerWord == 2 && index % 2 == 1;
  return OrderedValue(high ? E::template Get<E::kPerWord - 1>(word) : E::template Get<0>(word));
}

__device__ __forceinline__ void ListElement(FinishScratch& scratch, uint32_t ordered, uint32_t id) {
  const uint32_t at = atomicAdd(&scratch.n_listed, 1u);
  if (at < kListSize) scratch.list[at] = OrderedKey(ordered, id);
}

template <class E>
__device__ __forceinline__ bool Reaches(const uint4& vector, int floor) {
  return MergeZeros<E>(E::OrderOfMax(VectorMax<E>(vector))) >= floor;
}

__device__ __forceinline__ void KeepVector(FinishScratch& scratch, uint32_t at, const uint4& vector,
                                           uint32_t first) {
  if (at >= kMaxKept) return;
  scratch.kept[at] = vector;
  scratch.kept_first[at] = first;
}

// Sets aside the vectors with an element that reaches the floor among one strip of each of the
// warp's next spans, all of which are fetched at once. For an even row.
template <class E>
__device__ __forceinline__ void KeepEven(const SelectedStrips<E>& strips, FinishScratch& scratch,
                                         int selected, int strip) {
  const int n = scratch.n_spans, floor = scratch.floor;
  const auto first = [&](int i) {
    return strips.First(min(selected + i * kSelectWarps, n - 1), strip);
  };
  uint4 v[kInFlight];
#pragma unroll
  for (int i = 0; i < kInFlight; ++i) v[i] = strips.LoadEven(first(i));
  uint32_t reaching = 0;
#pragma unroll
  for (int i = 0; i < kInFlight; ++i) {
    if (selected + i * kSelectWarps < n && Reaches<E>(v[i], floor)) reaching |= 1u << i;
  }
  if (reaching == 0) return;
  uint32_t at = atomicAdd(&scratch.n_kept, __popc(reaching));
#pragma unroll
  for (int i = 0; i < kInFlight; ++i) {
    if (reaching >> i & 1) KeepVector(scratch, at++, v[i], first(i));
  }
}

// Sets aside the vectors of the selected spans that hold an element that reaches the floor: most
// hold none.
template <class E>
__device__ __forceinline__ void KeepVectors(const FinishedRow& row, int warp, int lane) {
  const SelectedStrips<E> strips(row, lane);
  FinishScratch& scratch = row.scratch;
  const int n = scratch.n_spans, floor = scratch.floor;
  if (strips.even()) {
#pragma unroll 1
    for (int strip = 0; strip < strips.span_strips(); ++strip) {
#pragma unroll 1
      for (int selected = warp; selected < n; selected += kInFlight * kSelectWarps) {
        KeepEven<E>(strips, scratch, selected, strip);
      }
    }
    return;
  }
#pragma unroll 1
  for (int strip = warp; strip < strips.size(); strip += kSelectWarps) {
    const uint32_t first = strips.First(strip);
    const uint4 vector = strips.Load(first);
    if (!Reaches<E>(vector, floor)) continue;
    KeepVector(scratch, atomicAdd(&scratch.n_kept, 1u), vector, first);
  }
}

// Bit e for each element e of a vector that reaches the floor, given as a splatted raw value.
template <class E>
__device__ __forceinline__ uint32_t ReachingMask(uint4& vector, uint32_t floor_word) {
  uint32_t mask = 0;
#pragma unroll
  for (int i = 0; i < kVectorWords; ++i) {
    mask |= E::Reaching(Word(vector, i), floor_word) << (i * E::kPerWord);
  }
  return mask;
}

// Lists the elements of the kept vectors that reach the floor, a thread per vector: hardly one
// holds two.
template <class E>
__device__ __forceinline__ void ListReaching(const FinishedRow& row, int thread) {
  using Raw = typename E::Raw;
  FinishScratch& scratch = row.scratch;
  static_assert(kMaxKept <= kSelectThreads);
  if (thread >= min(scratch.n_kept, kMaxKept)) return;
  const uint32_t floor_word = E::WordOfOrder(scratch.floor);
  uint32_t mask = ReachingMask<E>(scratch.kept[thread], floor_word);
  const Raw* elements = reinterpret_cast<const Raw*>(&scratch.kept[thread]);
#pragma unroll 1
  for (; mask != 0; mask &= mask - 1) {
    const int e = __ffs(mask) - 1;
    const uint32_t id = scratch.kept_first[thread] + e;
    if (id >= static_cast<uint32_t>(row.params.vocab)) break;
    ListElement(scratch, OrderedValue(E::FromRaw(elements[e])), id);
  }
}

// How many elements of the selected spans have at least this order.
template <class E>
__device__ __forceinline__ uint32_t CountReaching(const FinishedRow& row, uint32_t ordered,
                                                  int lane) {
  const SelectedStrips<E> strips(row, lane);
  uint32_t count = 0;
#pragma unroll 1
  for (int strip = 0; strip < strips.size(); ++strip) {
    const uint32_t first = strips.First(strip);
    uint4 v = strips.Load(first);
#pragma unroll 1
    for (int i = 0; i < E::kPerVector && first + i < static_cast<uint32_t>(row.params.vocab); ++i) {
      count += OrderedElement<E>(v, i) >= ordered;
    }
  }
  return __reduce_add_sync(kAllLanes, count);
}

// The sum of `value` over the lanes before this one.
__device__ __forceinline__ uint32_t SumBefore(uint32_t value, int lane) {
  uint32_t through = value;
#pragma unroll 1
  for (int offset = 1; offset < 32; offset *= 2) {
    const uint32_t other = __shfl_up_sync(kAllLanes, through, offset);
    if (lane >= offset) through += other;
  }
  return through - value;
}

// The selected span with the smallest id above `last`, or the largest id if there is none.
__device__ __forceinline__ uint32_t SpanAfter(const FinishedRow& row, int64_t last, int lane) {
  uint32_t next = 0xffffffffu;
  for (uint32_t i = lane; i < row.scratch.n_spans; i += 32) {
    const uint32_t span = row.scratch.span[i];
    if (static_cast<int64_t>(span) > last) next = min(next, span);
  }
  return __reduce_min_sync(kAllLanes, next);
}

// Lists elements of exactly this order, in id order, until the list holds k.
template <class E>
__device__ __forceinline__ void ListEqual(const FinishedRow& row, uint32_t ordered, int lane) {
  FinishScratch& scratch = row.scratch;
  const SelectedStrips<E> strips(row, lane);
  const int span_strips = row.params.span * SelectedStrips<E>::kGroupStrips;
  int64_t last = -1;
#pragma unroll 1
  for (uint32_t s = 0; s < row.scratch.n_spans && scratch.n_listed < row.scratch.k; ++s) {
    last = SpanAfter(row, last, lane);
#pragma unroll 1
    for (int i = 0; i < span_strips; ++i) {
      const uint32_t first =
          static_cast<uint32_t>(((last * span_strips + i) * 32 + lane) * E::kPerVector);
      uint4 v = strips.Load(first);
      uint32_t equal = 0;
#pragma unroll 1
      for (int e = 0; e < E::kPerVector && first + e < static_cast<uint32_t>(row.params.vocab);
           ++e) {
        equal |= static_cast<uint32_t>(OrderedElement<E>(v, e) == ordered) << e;
      }
      const uint32_t listed = scratch.n_listed;
      uint32_t place = listed + SumBefore(__popc(equal), lane);
      const uint32_t total = __reduce_add_sync(kAllLanes, __popc(equal));
      for (; equal != 0 && place < row.scratch.k; equal &= equal - 1, ++place) {
        scratch.list[place] = OrderedKey(ordered, static_cast<uint32_t>(first) + __ffs(equal) - 1);
      }
      __syncwarp();
      if (lane == 0) scratch.n_listed = min(listed + total, static_cast<uint32_t>(row.scratch.k));
      __syncwarp();
    }
  }
}

// Lists exactly the top k when too many elements reach the floor (sorted, masked or constant rows):
// finds the k-th largest value, then takes the larger elements and the first of its equals. Bounded
// for any row.
template <class E>
__device__ __forceinline__ void ListExactly(const FinishedRow& row, uint32_t floor, int lane) {
  constexpr uint32_t kStep = 1u << (32 - E::kOrderBits);
  const uint32_t k = row.scratch.k;
  // Orders of 16-bit floats differ in their leading bits only; the rest is 0 or all ones.
  uint32_t highest = floor;
  if (floor != 0xffffffffu && CountReaching<E>(row, floor + 1, lane) >= k) {
    highest = 0;
#pragma unroll 1
    for (uint32_t bit = 0x80000000u; bit >= kStep && bit != 0; bit >>= 1) {
      if (CountReaching<E>(row, highest | bit, lane) >= k) highest |= bit;
    }
    // The order itself: the smallest one that is listed with these leading bits.
    if (kStep > 1 && CountReaching<E>(row, highest | (kStep - 1), lane) >= k) highest |= kStep - 1;
  }
  __syncwarp();
  if (lane == 0) row.scratch.n_listed = 0;
  __syncwarp();
  const SelectedStrips<E> strips(row, lane);
#pragma unroll 1
  for (int strip = 0; strip < strips.size(); ++strip) {
    const uint32_t first = strips.First(strip);
    uint4 v = strips.Load(first);
#pragma unroll 1
    for (int i = 0; i < E::kPerVector && first + i < static_cast<uint32_t>(row.params.vocab); ++i) {
      const uint32_t ordered = OrderedElement<E>(v, i);
      if (ordered > highest) ListElement(row.scratch, ordered, static_cast<uint32_t>(first + i));
    }
  }
  __syncwarp();
  ListEqual<E>(row, highest, lane);
  // What was listed before and is no part of the result any more.
  const uint32_t end = row.scratch.n_listed + lane;
  if (end < kListSize) row.scratch.list[end] = 0;
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_ROW_ELEMENTS_CUH_
