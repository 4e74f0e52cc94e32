// Elements of the decoder's tensors as fp32, singly and 16 bytes at a time, and sums over threads
// whose order is that of the threads alone.
#ifndef BATON_OPS_VALUES_CUH_
#define BATON_OPS_VALUES_CUH_

#include <cuda_bf16.h>

#include <cstdint>
#include <cstring>

namespace baton_ops::cuda {

constexpr unsigned kEveryLane = 0xffffffffu;
constexpr int kWarp = 32;

__device__ __forceinline__ float ToFloat(float value) { return value; }
__device__ __forceinline__ float ToFloat(__nv_bfloat16 value) { return __bfloat162float(value); }

template <class E>
__device__ __forceinline__ E Rounded(float value);
template <>
__device__ __forceinline__ float Rounded<float>(float value) {
  return value;
}
template <>
__device__ __forceinline__ __nv_bfloat16 Rounded<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}

// kCount elements side by side, read and written at once where their bytes allow it.
template <class E, int kCount>
struct alignas(sizeof(E) * kCount < 16 ? sizeof(E) * kCount : 16) Packed {
  E at[kCount];
};

template <class E>
constexpr int kPerVector = 16 / static_cast<int>(sizeof(E));

// Elements that a thread takes together, of any type, so that the order of sums is that of columns.
constexpr int kChunk = 8;

// Reads columns first .. first + 7 of a row. kWide: they are all there, on 16 bytes; else those
// beyond `columns` read as zeros.
template <class E, bool kWide>
__device__ __forceinline__ Packed<E, kChunk> LoadChunk(const E* row, int64_t first,
                                                       int64_t columns) {
  if constexpr (kWide) {
    return *reinterpret_cast<const Packed<E, kChunk>*>(row + first);
  } else {
    Packed<E, kChunk> chunk;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      chunk.at[i] = first + i < columns ? row[first + i] : Rounded<E>(0.0f);
    }
    return chunk;
  }
}

// Columns first .. first + 7 as they are read, all there and on 16 bytes. Compilers take elements
// apart right behind their load, which waits for it: so of loads that are to be under way together
// elements are taken from these, behind the last.
template <class E>
struct ChunkWords {
  uint4 at[kChunk / kPerVector<E>];

  __device__ __forceinline__ void Load(const E* row, int64_t first) {
    const uint4* const from = reinterpret_cast<const uint4*>(row + first);
#pragma unroll
    for (int i = 0; i < kChunk / kPerVector<E>; ++i) at[i] = from[i];
  }
  __device__ __forceinline__ Packed<E, kChunk> Elements() const {
    Packed<E, kChunk> chunk;
    memcpy(&chunk, at, sizeof(chunk));
    return chunk;
  }
};

template <class E, bool kWide>
__device__ __forceinline__ void StoreChunk(E* row, int64_t first, int64_t columns,
                                           const Packed<E, kChunk>& chunk) {
  if constexpr (kWide) {
    *reinterpret_cast<Packed<E, kChunk>*>(row + first) = chunk;
  } else {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      if (first + i < columns) row[first + i] = chunk.at[i];
    }
  }
}

// The same bits in every lane: each step adds two lanes' sums, and addition commutes.
__device__ __forceinline__ float SumOfWarp(float value) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    value = __fadd_rn(value, __shfl_xor_sync(kEveryLane, value, distance));
  }
  return value;
}

__device__ __forceinline__ float MaxOfWarp(float value) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    value = fmaxf(value, __shfl_xor_sync(kEveryLane, value, distance));
  }
  return value;
}

// Sums over a block of whole warps, warps in a tree by their number. `shared` holds one float a
// warp and is not used again before the block has met.
__device__ __forceinline__ float SumOfBlock(float value, float* shared) {
  value = SumOfWarp(value);
  const unsigned lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
  if (warps == 1) return value;
  if (lane == 0) shared[threadIdx.x / kWarp] = value;
  __syncthreads();
  return SumOfWarp(lane < warps ? shared[lane] : 0.0f);
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_VALUES_CUH_
