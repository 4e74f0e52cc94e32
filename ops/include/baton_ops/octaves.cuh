// The first step of a cut, see select.cuh: the exponent of the weight at which a row is cut. It is
// the one step that every weight takes part in, so it has to be cheap: each thread adds up
// mantissas in a column of its own, where nobody waits for anybody. Exact: a thread has few
// weights.
#ifndef BATON_OPS_OCTAVES_CUH_
#define BATON_OPS_OCTAVES_CUH_

#include "baton_ops/row_group.cuh"

namespace baton_ops::cuda {

// Weights from 1 down to 2^-14 have an octave each; the smaller ones are one sum in fp64, in a
// fixed order. A cut among those is found without octaves.
constexpr uint32_t kOctaves = 15;
constexpr uint32_t kSmall = kOctaves;    // where the sum of the smaller ones is
constexpr uint32_t kMostOfThread = 255;  // weights in a column: their mantissas' sum fits 32 bits

// Bytes of shared memory for the columns of so many threads.
constexpr uint32_t ColumnBytes(uint32_t threads) { return kOctaves * threads * 4; }

struct OctaveShared {
  uint64_t mass[kOctaves + 1];  // of this block, as the bits of fp64
  double small[32];             // of each warp
};

// The exponent of the weight at the cut, what is ahead of all weights of that exponent, and all
// there is; not known where the cut is among the small weights.
struct Octave {
  bool is_known;
  uint32_t exponent;
  double before;
  double total;
};

// A positive weight is Mantissa times UnitOf.
__device__ __forceinline__ uint32_t Mantissa(uint32_t bits) {
  return (bits & 0x7fffffu) | (bits >= 0x800000u ? 0x800000u : 0u);
}

__device__ __forceinline__ double UnitOf(uint32_t bits) {
  const int exponent = max(static_cast<int>(bits >> 23), 1) - 150;
  return __hiloint2double((1023 + exponent) << 20, 0);
}

// Adds a weight to the thread's column, or to `small`. kInColumns: there are columns.
template <bool kByMass, bool kInColumns, int kThreads>
__device__ __forceinline__ void AddToColumn(uint32_t* column, uint32_t bits, double& small) {
  const uint32_t octave = 127u - (bits >> 23);
  if (kInColumns && octave < kOctaves) {
    column[octave * kThreads] += kByMass ? (bits & 0x7fffffu) | 0x800000u : 1u;
  } else if (kByMass) {
    small += static_cast<double>(__uint_as_float(bits));
  } else {
    small += bits != 0 ? 1.0 : 0.0;
  }
}

__device__ __forceinline__ double SumOfWarp(double value) {
  for (int offset = 16; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(kFullWarp, value, offset);
  }
  return value;
}

// Leaves the block's masses in shared memory. A warp sums up one octave's columns.
template <bool kByMass, bool kInColumns, int kThreads>
__device__ __forceinline__ void SumOctaves(const float* weights, uint32_t count, uint32_t* columns,
                                           OctaveShared& shared) {
  static_assert(kThreads / 32 == kOctaves + 1);
  uint32_t* column = columns + threadIdx.x;
#pragma unroll
  for (uint32_t octave = 0; kInColumns && octave < kOctaves; ++octave) {
    column[octave * kThreads] = 0;
  }
  double small = 0;
#pragma unroll 4
  for (uint32_t i = threadIdx.x; i < count; i += kThreads) {
    AddToColumn<kByMass, kInColumns, kThreads>(column, __float_as_uint(weights[i]), small);
  }
  small = SumOfWarp(small);
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (lane == 0) shared.small[warp] = small;
  __syncthreads();
  double mass = 0;
  if (warp < kOctaves) {
    uint64_t sum = 0;
    for (uint32_t i = lane; kInColumns && i < kThreads; i += 32) {
      sum += columns[warp * kThreads + i];
    }
    // Integers of up to 2^39: exact in fp64 whatever the order.
    mass = SumOfWarp(static_cast<double>(sum)) * (kByMass ? UnitOf((127 - warp) << 23) : 1.0);
  } else {
    for (uint32_t w = 0; w < kThreads / 32; ++w) mass += shared.small[w];
  }
  if (lane == 0) shared.mass[warp] = __double_as_longlong(mass);
}

// All threads of a row's blocks. `target` is as for Select; without columns nothing is known but
// the total.
template <bool kByMass, bool kInColumns, int kBlocks, int kThreads>
__device__ __forceinline__ Octave ChooseOctave(const float* weights, uint32_t count, double target,
                                               uint32_t* columns, OctaveShared& shared) {
  SumOctaves<kByMass, kInColumns, kThreads>(weights, count, columns, shared);
  RowGroup<kBlocks>::Sync();
  const uint32_t lane = threadIdx.x % 32;
  double mass = 0;
  for (uint32_t rank = 0; rank < kBlocks; ++rank) {
    if (lane <= kSmall) {
      mass += __longlong_as_double(RowGroup<kBlocks>::Read(&shared.mass[lane], rank));
    }
  }
  double through = mass;
  for (int offset = 1; offset < 32; offset *= 2) {
    const double other = __shfl_up_sync(kFullWarp, through, offset);
    if (lane >= offset) through += other;
  }
  double before = __shfl_up_sync(kFullWarp, through, 1);
  if (lane == 0) before = 0;
  const double total = __shfl_sync(kFullWarp, through, 31);
  if (kByMass) target *= total;
  const uint32_t may_be = __ballot_sync(kFullWarp, mass > 0 && before <= target);
  const uint32_t chosen = may_be == 0 ? kSmall : 31 - __clz(may_be);
  return {chosen < kSmall, 127 - chosen, __shfl_sync(kFullWarp, before, chosen), total};
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_OCTAVES_CUH_
