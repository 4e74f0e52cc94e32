// Where a row is cut: of its weights in the order (weight descending, id ascending), the last one
// ahead of which there is no more than a target, by count (top_k) or by mass (top_p).
//
// Found digit by digit of the weights' bits, as those of numbers that are not negative are in
// order; the first digit, the exponent, has a way of its own, see octaves.cuh. The weights of a
// digit have one exponent, so their mantissas are added up as integers: exact in any order. Masses
// of digits, exact in fp64, are then added in one fixed order.
#ifndef BATON_OPS_SELECT_CUH_
#define BATON_OPS_SELECT_CUH_

#include "baton_ops/octaves.cuh"
#include "baton_ops/row_group.cuh"

namespace baton_ops::cuda {

constexpr uint32_t kDigits = 256;

// One block's part of each digit's sum is high * 4096 + low.
struct DigitSums {
  uint32_t high[kDigits];
  uint32_t low[kDigits];
};

struct SelectShared {
  DigitSums sums[2];  // of this pass, and cleared for the next
  OctaveShared octaves;
  double warp[32];
  double before;
  int32_t chosen;
  uint32_t ties[32];
  uint32_t end;
  uint32_t passes;  // that were made, over all selections of the row
};

// Weights that are larger than `bits`, or equal to it and at one of the block's first `end`
// places, are kept.
struct Cut {
  uint32_t bits;
  uint32_t end;
  __device__ __forceinline__ bool Keeps(float weight, uint32_t at) const {
    const uint32_t other = __float_as_uint(weight);
    return other > bits || (other == bits && at < end);
  }
};

// A digit of a weight's bits. The first is the exponent, three others are the mantissa's.
struct Digit {
  int shift, width;
  static constexpr int kCount = 4;
  static __device__ __forceinline__ Digit At(int i) {
    return i < kCount - 1 ? Digit{23 - 8 * i, 8} : Digit{0, 7};
  }
  __device__ __forceinline__ uint32_t Of(uint32_t bits) const {
    return bits >> shift & ((1u << width) - 1);
  }
  // Whether these bits have the prefix's digits above.
  __device__ __forceinline__ bool Agrees(uint32_t bits, uint32_t prefix) const {
    return (bits ^ prefix) >> shift >> width == 0;
  }
};

template <int kThreads>
__device__ __forceinline__ void ClearSums(DigitSums& sums) {
  for (uint32_t i = threadIdx.x; i < kDigits; i += kThreads) {
    sums.high[i] = 0;
    sums.low[i] = 0;
  }
}

template <bool kByMass>
__device__ __forceinline__ void AddToDigit(DigitSums& sums, uint32_t digit, uint32_t bits,
                                           uint32_t takes_part) {
  const uint32_t leader = __shfl_sync(kFullWarp, digit, __ffs(takes_part) - 1);
  const bool mine = takes_part >> (threadIdx.x % 32) & 1u;
  const bool alone = __all_sync(kFullWarp, !mine || digit == leader);
  uint32_t high = kByMass && mine ? Mantissa(bits) >> 12 : 0;
  uint32_t low = !mine ? 0 : kByMass ? Mantissa(bits) & 0xfffu : 1u;
  if (alone) {  // equal weights would queue for one place
    if (kByMass) high = __reduce_add_sync(kFullWarp, high);
    low = __reduce_add_sync(kFullWarp, low);
    if (threadIdx.x % 32 != 0) return;
  } else if (!mine) {
    return;
  }
  const uint32_t place = alone ? leader : digit;
  if (kByMass) atomicAdd(&sums.high[place], high);
  atomicAdd(&sums.low[place], low);
}

// Adds up the block's weights that agree with `prefix` above a digit.
template <bool kByMass, int kThreads>
__device__ __forceinline__ void SumDigits(const float* weights, uint32_t count, uint32_t prefix,
                                          const Digit& digit, DigitSums& sums) {
#pragma unroll 4
  for (uint32_t first = 0; first < count; first += kThreads) {
    const uint32_t at = first + threadIdx.x;
    const uint32_t bits = at < count ? __float_as_uint(weights[at]) : 0;
    const bool mine = bits != 0 && digit.Agrees(bits, prefix);
    const uint32_t takes_part = __ballot_sync(kFullWarp, mine);
    if (takes_part != 0) AddToDigit<kByMass>(sums, digit.Of(bits), bits, takes_part);
  }
}

// The sum over the threads before this one; the same tree whatever the row.
template <int kThreads>
__device__ __forceinline__ double BlockSumBefore(double mine, SelectShared& shared) {
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  double through = mine;
  for (int offset = 1; offset < 32; offset *= 2) {
    const double other = __shfl_up_sync(kFullWarp, through, offset);
    if (lane >= offset) through += other;
  }
  if (lane == 31) shared.warp[warp] = through;
  double before = __shfl_up_sync(kFullWarp, through, 1);
  if (lane == 0) before = 0;
  __syncthreads();
  double earlier = 0;
  for (uint32_t w = 0; w < warp; ++w) earlier += shared.warp[w];
  return earlier + before;
}

// The whole row's sum of a digit, in units of the digit's exponent.
template <bool kByMass, int kBlocks>
__device__ __forceinline__ uint64_t RowSum(const DigitSums& sums, uint32_t digit) {
  uint64_t sum = 0;
#pragma unroll
  for (uint32_t rank = 0; rank < kBlocks; ++rank) {
    if (kByMass) {
      sum += uint64_t{RowGroup<kBlocks>::Read(&sums.high[digit], rank)} << 12;
    }
    sum += RowGroup<kBlocks>::Read(&sums.low[digit], rank);
  }
  return sum;
}

// Chooses the last digit, from the largest down, that has weights and no more than the target ahead
// of it.
template <bool kByMass, int kBlocks, int kThreads>
__device__ __forceinline__ uint32_t ChooseDigit(const DigitSums& sums, uint32_t prefix, int shift,
                                                double target, SelectShared& shared) {
  static_assert(kThreads >= kDigits);
  const uint32_t digit = kDigits - 1 - threadIdx.x % kDigits;
  double mass = 0;
  if (threadIdx.x < kDigits) {
    const double unit = kByMass ? UnitOf(prefix | digit << shift) : 1.0;
    mass = static_cast<double>(RowSum<kByMass, kBlocks>(sums, digit)) * unit;
  }
  if (threadIdx.x == 0) shared.chosen = -1;
  const double before = shared.before + BlockSumBefore<kThreads>(mass, shared);
  const bool may_be = mass > 0 && before <= target;
  const int32_t place = may_be ? static_cast<int32_t>(threadIdx.x) : -1;
  const int32_t last = __reduce_max_sync(kFullWarp, place);
  if (threadIdx.x % 32 == 0 && last >= 0) atomicMax(&shared.chosen, last);
  __syncthreads();
  if (may_be && place == shared.chosen) shared.before = before;
  __syncthreads();
  return kDigits - 1 - static_cast<uint32_t>(max(shared.chosen, 0));
}

// The place behind the block's n-th weight of these bits. Each thread looks after an interval.
template <int kThreads>
__device__ __forceinline__ uint32_t EndOfTie(const float* weights, uint32_t count, uint32_t bits,
                                             uint32_t n, SelectShared& shared) {
  const uint32_t interval = (count + kThreads - 1) / kThreads | 1u;  // odd: no two in one bank
  const uint32_t first = min(threadIdx.x * interval, count), last = min(first + interval, count);
  uint32_t mine = 0;
  for (uint32_t i = first; i < last; ++i) mine += __float_as_uint(weights[i]) == bits;
  uint32_t through = mine;
  for (int offset = 1; offset < 32; offset *= 2) {
    const uint32_t other = __shfl_up_sync(kFullWarp, through, offset);
    if (threadIdx.x % 32 >= offset) through += other;
  }
  if (threadIdx.x % 32 == 31) shared.ties[threadIdx.x / 32] = through;
  __syncthreads();
  for (uint32_t w = 0; w < threadIdx.x / 32; ++w) through += shared.ties[w];
  uint32_t passed = through - mine;
  for (uint32_t i = first; i < last && passed < n; ++i) {
    if (__float_as_uint(weights[i]) == bits && ++passed == n) shared.end = i + 1;
  }
  __syncthreads();
  return shared.end;
}

// How many of the row's weights of exactly these bits stay, and which of them are the block's.
template <bool kByMass, int kBlocks, int kThreads>
__device__ __forceinline__ Cut CutTies(const float* weights, uint32_t count, uint32_t bits,
                                       double target, const DigitSums& sums, SelectShared& shared) {
  const uint32_t digit = Digit::At(Digit::kCount - 1).Of(bits);
  const uint32_t each = kByMass ? max(Mantissa(bits), 1u) : 1u;
  const double one = kByMass ? static_cast<double>(__uint_as_float(bits)) : 1.0;
  const double room = floor((target - shared.before) / one) + 1.0;
  double earlier = 0;
  uint32_t mine = 0;
  for (uint32_t rank = 0; rank <= RowGroup<kBlocks>::Rank(); ++rank) {
    uint64_t sum = RowGroup<kBlocks>::Read(&sums.low[digit], rank);
    if (kByMass) sum += uint64_t{RowGroup<kBlocks>::Read(&sums.high[digit], rank)} << 12;
    earlier += mine;
    mine = static_cast<uint32_t>(sum / each);
  }
  if (room >= earlier + mine) return {bits, count};
  if (room <= earlier) return {bits, 0};
  const auto stay = static_cast<uint32_t>(room - earlier);
  return {bits, EndOfTie<kThreads>(weights, count, bits, stay, shared)};
}

// All threads of a row's blocks: the cut behind the last of the row's positive weights that has no
// more ahead of it than, by count, `target` weights, or, by mass, `target` of the total.
template <bool kByMass, bool kInColumns, int kBlocks, int kThreads>
__device__ __forceinline__ Cut Select(const float* weights, uint32_t count, double target,
                                      uint32_t* columns, SelectShared& shared) {
  uint32_t pass = shared.passes;
  const Octave first = ChooseOctave<kByMass, kInColumns, kBlocks, kThreads>(
      weights, count, target, columns, shared.octaves);
  if (kByMass) target *= first.total;
  if (threadIdx.x == 0) shared.before = first.is_known ? first.before : 0.0;
  uint32_t prefix = first.is_known ? first.exponent << 23 : 0;
  for (int i = first.is_known ? 1 : 0; i < Digit::kCount; ++i, ++pass) {
    const Digit digit = Digit::At(i);
    DigitSums& sums = shared.sums[pass % 2];
    SumDigits<kByMass, kThreads>(weights, count, prefix, digit, sums);
    RowGroup<kBlocks>::Sync();
    ClearSums<kThreads>(shared.sums[(pass + 1) % 2]);  // the others have read it by now
    prefix |= ChooseDigit<kByMass, kBlocks, kThreads>(sums, prefix, digit.shift, target, shared)
              << digit.shift;
  }
  if (threadIdx.x == 0) shared.passes = pass;
  return CutTies<kByMass, kBlocks, kThreads>(weights, count, prefix, target,
                                             shared.sums[(pass + 1) % 2], shared);
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_SELECT_CUH_
