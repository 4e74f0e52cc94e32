// Rows to e4m3, with a scale for each group of columns: the group's largest / 448. A warp has a
// group, or some of many rows', or where a row is one of more than 128 a block. Where the scale is
// 0 the numbers are; a NaN or an infinity breaks the group's scale and no other.
#ifndef BATON_OPS_QUANTISE_CUH_
#define BATON_OPS_QUANTISE_CUH_

#include "baton_ops/e4m3.cuh"
#include "baton_ops/grid_order.cuh"
#include "baton_ops/mma.cuh"
#include "baton_ops/values.cuh"

namespace baton_ops::cuda {

constexpr int kQuantiseWarps = 8;

constexpr int kRowQuad = 4;  // columns of a range that a lane quantises
constexpr float kLargestFloat = 0x1.fffffep127f;

constexpr int kManyQuantiseGroups = 4;  // of a warp, of many rows

// Rows whose blocks a GPU has room for at once, and who goes through its code before it counts. Of
// those behind them the code is there, and going through it twice takes nearly twice as long.
constexpr int64_t kRehearsedRows = 64;

template <class E>
struct QuantiseParams {
  const E* x;
  E4m3* values;   // [rows, columns]
  float* scales;  // [rows, groups]
  int64_t x_stride;
  int64_t columns;
  int64_t group;  // columns of each, the last maybe fewer
  int64_t groups;
};

// The larger, or NaN if one is.
__device__ __forceinline__ float LargerOrNan(float a, float b) { return b > a || b != b ? b : a; }

__device__ __forceinline__ float LargestOfWarp(float value) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    value = LargerOrNan(value, __shfl_xor_sync(kEveryLane, value, distance));
  }
  return value;
}

template <class E>
__device__ __forceinline__ E4m3 Quantised(E value, float scale) {
  return scale == 0.0f ? E4m3{0} : ToE4m3(__fdiv_rn(ToFloat(value), scale));
}

// What __fdiv_rn(value, scale) is where `reciprocal` is __fdiv_rn(1, scale), but for a zero's sign:
// an estimate that is corrected twice, as a division does it, by what it leaves.
__device__ __forceinline__ float Quotient(float value, float scale, float reciprocal) {
  float quotient = __fmul_rn(value, reciprocal);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    quotient = __fmaf_rn(__fmaf_rn(-quotient, scale, value), reciprocal, quotient);
  }
  return quotient;
}

// A power of two that makes of a scale one with a normal reciprocal, and of a value what leaves no
// less than fp32 can tell: but of values so small that their quotient is none.
__device__ __forceinline__ float FactorFor(float scale) {
  const float up = scale < 0x1p-90f ? 0x1p100f : 1.0f;
  return scale > 0x1p90f ? 0x1p-100f : up;
}

// A lane's numbers of a group, of which it returns the scale. With `kIsStored` they have the bits
// that a division gives, a zero its sign; where the scale is infinite or NaN too.
template <class E, bool kIsStored = false>
__device__ __forceinline__ float QuantiseQuad(const Packed<E, kRowQuad>& quad, uint32_t& numbers) {
  float values[kRowQuad];
  uint32_t largest = 0;  // as numbers without a sign are ordered, NaN last
#pragma unroll
  for (int j = 0; j < kRowQuad; ++j) {
    values[j] = ToFloat(quad.at[j]);
    largest = max(largest, __float_as_uint(values[j]) & 0x7fffffffu);
  }
  largest = __reduce_max_sync(kEveryLane, largest);
  const float scale = __fdiv_rn(__uint_as_float(largest), kLargestE4m3), factor = FactorFor(scale);
  const float divisor = __fmul_rn(scale, factor), reciprocal = __fdiv_rn(1.0f, divisor);
#pragma unroll
  for (int j = 0; j < kRowQuad; ++j) {
    const float quotient = Quotient(__fmul_rn(values[j], factor), divisor, reciprocal);
    values[j] = kIsStored ? copysignf(quotient, values[j]) : quotient;
  }
  numbers = E4m3PairOf(values[0], values[1]) | E4m3PairOf(values[2], values[3]) << 16;
  if (!(scale > 0.0f)) numbers = 0;
  if (kIsStored && !(scale <= kLargestFloat)) {  // the whole warp
    numbers = 0;
#pragma unroll
    for (int j = 0; j < kRowQuad; ++j) {
      numbers |= static_cast<uint32_t>(Quantised(quad.at[j], scale).bits) << 8 * j;
    }
  }
  return scale;
}

// Grid: (rows; groups, kQuantiseWarps a block, or one where a row is a group).
template <class E, bool kIsWhole>
__global__ void __launch_bounds__(kQuantiseWarps* kWarp) QuantiseKernel(QuantiseParams<E> p) {
  __shared__ float largest_of[kQuantiseWarps];
  WaitForEarlierGrids();
  LetNextGridStart();
  const int warp = threadIdx.x / kWarp;
  constexpr int kThreads = kIsWhole ? kQuantiseWarps * kWarp : kWarp;
  const int64_t lane = threadIdx.x % kThreads, row = blockIdx.x;
  const int64_t group = kIsWhole ? 0 : blockIdx.y * static_cast<int64_t>(kQuantiseWarps) + warp;
  if (group >= p.groups) return;  // the whole warp
  const int64_t first = group * p.group, end = min(first + p.group, p.columns);
  const E* x = p.x + row * p.x_stride;
  float largest = 0.0f;
  for (int64_t i = first + lane; i < end; i += kThreads) {
    largest = LargerOrNan(largest, fabsf(ToFloat(x[i])));
  }
  largest = LargestOfWarp(largest);
  if constexpr (kIsWhole) {
    if (threadIdx.x % kWarp == 0) largest_of[warp] = largest;
    __syncthreads();
    largest = LargestOfWarp(largest_of[threadIdx.x % kQuantiseWarps]);
  }
  const float scale = __fdiv_rn(largest, kLargestE4m3);
  if (lane == 0) p.scales[row * p.groups + group] = scale;
  E4m3* values = p.values + row * p.columns;
  for (int64_t i = first + lane; i < end; i += kThreads) values[i] = Quantised(x[i], scale);
}

// The same of groups of kScaledRange where four columns are a vector: each lane has four of a
// group, which it reads once. Of many rows a warp has kEach groups, eight apart, all of which it
// reads before it counts; of few, where that would leave a GPU without work, one. The first rows'
// do all twice: the first time is for nobody, while the kernel before still runs, and leaves
// nothing but this code in the caches, which that one's weights have driven it out of.
template <class E, int kEach>
__global__ void __launch_bounds__(kQuantiseWarps* kWarp) QuantiseFoursKernel(QuantiseParams<E> p) {
  const int64_t row = blockIdx.x, lane = threadIdx.x % kWarp;
  const int64_t first =
      blockIdx.y * static_cast<int64_t>(kQuantiseWarps * kEach) + threadIdx.x / kWarp;
#pragma unroll 1
  for (int turn = row < kRehearsedRows ? 0 : 1; turn < 2; ++turn) {
    const bool is_real = turn > 0;
    if (is_real) {
      WaitForEarlierGrids();
      LetNextGridStart();
    }
    Packed<E, kRowQuad> x[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int64_t at = (first + i * kQuantiseWarps) * kScaledRange + lane * 4;
#pragma unroll
      for (int j = 0; j < 4; ++j) x[i].at[j] = Rounded<E>(is_real ? 0.0f : 1.0f);
      if (is_real && at < p.columns) {
        x[i] = *reinterpret_cast<const Packed<E, 4>*>(p.x + row * p.x_stride + at);
      }
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int64_t group = first + i * kQuantiseWarps, at = group * kScaledRange + lane * 4;
      if (group >= p.groups) continue;  // the whole warp
      uint32_t four;
      const float scale = QuantiseQuad<E, true>(x[i], four);
      if (!is_real || at >= p.columns) continue;
      if (lane == 0) p.scales[row * p.groups + group] = scale;
      *reinterpret_cast<uint32_t*>(p.values + row * p.columns + at) = four;
    }
  }
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_QUANTISE_CUH_
