// Pairs of a head's elements that rotate together: read, biased, normed, rotated, written.
#ifndef BATON_OPS_HEAD_PAIRS_CUH_
#define BATON_OPS_HEAD_PAIRS_CUH_

#include "baton_ops/values.cuh"

namespace baton_ops::cuda {

// Two pairs of elements that rotate together: a with b.
struct Pairs {
  float a[2];
  float b[2];
};

// Where pairs 2 * group and 2 * group + 1 of a head lie. kWide: both are there, two elements on
// the boundary of two.
template <class E, bool kInterleaved, bool kWide>
struct HeadPairs {
  int half;

  __device__ __forceinline__ int A(int pair) const { return kInterleaved ? 2 * pair : pair; }
  __device__ __forceinline__ int B(int pair) const {
    return kInterleaved ? 2 * pair + 1 : pair + half;
  }
  __device__ __forceinline__ Pairs Load(const E* head, int group) const {
    const int pair = 2 * group;
    Pairs pairs;
    if constexpr (kWide) {
      using Two = Packed<E, 2>;
      const Two first = *reinterpret_cast<const Two*>(head + A(pair));
      const Two second =
          *reinterpret_cast<const Two*>(head + (kInterleaved ? A(pair + 1) : B(pair)));
      pairs.a[0] = ToFloat(first.at[0]);
      pairs.a[1] = ToFloat(kInterleaved ? second.at[0] : first.at[1]);
      pairs.b[0] = ToFloat(kInterleaved ? first.at[1] : second.at[0]);
      pairs.b[1] = ToFloat(second.at[1]);
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const bool is_there = pair + i < half;
        pairs.a[i] = is_there ? ToFloat(head[A(pair + i)]) : 0.0f;
        pairs.b[i] = is_there ? ToFloat(head[B(pair + i)]) : 0.0f;
      }
    }
    return pairs;
  }
  __device__ __forceinline__ void Store(E* head, int group, const Pairs& pairs) const {
    const int pair = 2 * group;
    if constexpr (kWide) {
      using Two = Packed<E, 2>;
      const E a0 = Rounded<E>(pairs.a[0]), a1 = Rounded<E>(pairs.a[1]);
      const E b0 = Rounded<E>(pairs.b[0]), b1 = Rounded<E>(pairs.b[1]);
      *reinterpret_cast<Two*>(head + A(pair)) = kInterleaved ? Two{a0, b0} : Two{a0, a1};
      *reinterpret_cast<Two*>(head + (kInterleaved ? A(pair + 1) : B(pair))) =
          kInterleaved ? Two{a1, b1} : Two{b0, b1};
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (pair + i >= half) break;
        head[A(pair + i)] = Rounded<E>(pairs.a[i]);
        head[B(pair + i)] = Rounded<E>(pairs.b[i]);
      }
    }
  }
};

__device__ __forceinline__ void Add(const Pairs& bias, Pairs* pairs) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    pairs->a[i] = __fadd_rn(pairs->a[i], bias.a[i]);
    pairs->b[i] = __fadd_rn(pairs->b[i], bias.b[i]);
  }
}

// Adds the squares of two pairs to a lane's sum.
__device__ __forceinline__ float Squares(const Pairs& pairs, float sum) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    sum = __fmaf_rn(pairs.a[i], pairs.a[i], sum);
    sum = __fmaf_rn(pairs.b[i], pairs.b[i], sum);
  }
  return sum;
}

// What a head is multiplied by, from its squares' sum.
__device__ __forceinline__ float HeadScale(float sum, int head_dim, float eps) {
  const float mean = __fdiv_rn(sum, static_cast<float>(head_dim));
  return __frsqrt_rn(__fadd_rn(mean, eps));
}

__device__ __forceinline__ void Norm(const Pairs& weight, float scale, Pairs* pairs) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    pairs->a[i] = __fmul_rn(__fmul_rn(pairs->a[i], scale), weight.a[i]);
    pairs->b[i] = __fmul_rn(__fmul_rn(pairs->b[i], scale), weight.b[i]);
  }
}

struct Angles {
  float cos[2];
  float sin[2];
};

template <bool kWide>
__device__ __forceinline__ Angles LoadAngles(const float* cos, const float* sin, int group,
                                             int half) {
  Angles angles;
  const int pair = 2 * group;
  if constexpr (kWide) {
    const float2 c = *reinterpret_cast<const float2*>(cos + pair);
    const float2 s = *reinterpret_cast<const float2*>(sin + pair);
    return {{c.x, c.y}, {s.x, s.y}};
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      angles.cos[i] = pair + i < half ? cos[pair + i] : 0.0f;
      angles.sin[i] = pair + i < half ? sin[pair + i] : 0.0f;
    }
    return angles;
  }
}

__device__ __forceinline__ void Rotate(const Angles& by, Pairs* pairs) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float a = pairs->a[i], b = pairs->b[i];
    pairs->a[i] = __fmaf_rn(a, by.cos[i], -__fmul_rn(b, by.sin[i]));
    pairs->b[i] = __fmaf_rn(b, by.cos[i], __fmul_rn(a, by.sin[i]));
  }
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_HEAD_PAIRS_CUH_
