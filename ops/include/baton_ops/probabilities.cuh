// From logits to what is sampled from: temperature, min_p, top_k, top_p, in that order, by the
// rules of the CPU sampler. Weights relative to the likeliest, not normalised.
//
// The blocks of a row read it once, keep it in shared memory while it is cut, and write it once. A
// row that is not cut skips that. Vocabularies that do not fit stay where the result goes.
#ifndef BATON_OPS_PROBABILITIES_CUH_
#define BATON_OPS_PROBABILITIES_CUH_

#include "baton_ops/grid_order.cuh"
#include "baton_ops/row_group.cuh"
#include "baton_ops/row_owner.cuh"
#include "baton_ops/select.cuh"

namespace baton_ops::cuda {

struct ProbabilitiesParams {
  const float* logits;  // [rows, vocab]
  uint32_t vocab;
  int32_t batch;
  bool by_vectors;           // every row begins at a multiple of 16 bytes
  const float* temperature;  // [batch]
  const double* top_p;       // [batch]
  const float* min_p;        // [batch]
  const int32_t* top_k;      // [batch], 0: all
  const int32_t* cu_rows;    // [batch + 1]
  float* probs;              // [rows, vocab]
  uint8_t* broken;           // [rows]
};

constexpr int kProbabilitiesThreads = 512;

struct ProbabilitiesShared {
  MaxShared largest;
  MaxShared id;
  SelectShared select;
};

// What one block does of a row. kKept: the block's interval fits `kept`, its shared memory.
template <int kBlocks, bool kKept>
class RowWeights {
 public:
  static constexpr int kThreads = kProbabilitiesThreads;
  static constexpr int kUnroll = 4;

  // `memory`: in kKept's case the interval's room and ColumnBytes behind it.
  __device__ RowWeights(const ProbabilitiesParams& p, int64_t row, float* memory)
      : mine_(IntervalOf(p.vocab, kBlocks, RowGroup<kBlocks>::Rank())),
        logits_(p.logits + row * p.vocab + mine_.first),
        probs_(p.probs + row * p.vocab + mine_.first),
        kept_(kKept ? memory : probs_),
        columns_(reinterpret_cast<uint32_t*>(memory + IntervalSize(p.vocab, kBlocks))),
        vectors_(p.by_vectors ? mine_.count / 4 : 0) {}

  // Brings the logits in, if there is a place for them, and finds the order of the row's largest.
  __device__ __forceinline__ uint32_t Largest(MaxShared& shared) const {
    float largest = -INFINITY;
    ForBatches<kThreads, kUnroll>(reinterpret_cast<const float4*>(logits_), vectors_,
                                  [&](const float4(&x)[kUnroll], uint32_t first) {
#pragma unroll
                                    for (int i = 0; i < kUnroll; ++i) {
                                      const uint32_t at = first + i * kThreads;
                                      largest = MaxOrNan(largest, MaxOrNan(x[i]));
                                      if (kKept && at < vectors_) Kept()[at] = x[i];
                                    }
                                  });
    for (uint32_t i = 4 * vectors_ + threadIdx.x; i < mine_.count; i += kThreads) {
      const float x = logits_[i];
      if (kKept) kept_[i] = x;
      largest = MaxOrNan(largest, x);
    }
    return GroupMax<kBlocks>(OrderedValue(largest), shared);
  }

  // The lowest id of the row's logits of this order.
  __device__ __forceinline__ uint32_t IdOf(uint32_t ordered, MaxShared& shared) const {
    const float* logits = kKept ? kept_ : logits_;
    uint32_t id = 0xffffffffu;
    for (uint32_t i = threadIdx.x; i < mine_.count; i += kThreads) {
      if (OrderedValue(logits[i]) == ordered) id = min(id, mine_.first + i);
    }
    return ~GroupMax<kBlocks>(~id, shared);
  }

  // Writes f(what is in `from` at i, i) to `to` at i, over the block's interval.
  template <class Function>
  __device__ __forceinline__ void Map(const float* from, float* to, const Function& f) const {
#pragma unroll 2
    for (uint32_t v = threadIdx.x; v < vectors_; v += kThreads) {
      const float4 x = reinterpret_cast<const float4*>(from)[v];
      reinterpret_cast<float4*>(to)[v] =
          make_float4(f(x.x, 4 * v), f(x.y, 4 * v + 1), f(x.z, 4 * v + 2), f(x.w, 4 * v + 3));
    }
    for (uint32_t i = 4 * vectors_ + threadIdx.x; i < mine_.count; i += kThreads) {
      to[i] = f(from[i], i);
    }
  }

  __device__ __forceinline__ void WriteOne(uint32_t id) const {
    const uint32_t at = id - mine_.first;
    Map(logits_, probs_, [at](float, uint32_t i) { return i == at ? 1.0f : 0.0f; });
  }

  template <class Function>
  __device__ __forceinline__ void WriteWeights(const Function& weight) const {
    Map(kKept ? kept_ : logits_, probs_, [&](float x, uint32_t) { return weight(x); });
  }

  template <class Function>
  __device__ __forceinline__ void KeepWeights(const Function& weight) const {
    Map(kKept ? kept_ : logits_, kept_, [&](float x, uint32_t) { return weight(x); });
    __syncthreads();
  }

  // Drops what is behind a target, see Select.
  template <bool kByMass>
  __device__ __forceinline__ void Truncate(double target, float* to, SelectShared& shared) const {
    const Cut cut =
        Select<kByMass, kKept, kBlocks, kThreads>(kept_, mine_.count, target, columns_, shared);
    Map(kept_, to, [&](float x, uint32_t i) { return cut.Keeps(x, i) ? x : 0.0f; });
    __syncthreads();
  }

  __device__ __forceinline__ float* probs() const { return probs_; }
  __device__ __forceinline__ float* kept() const { return kept_; }

 private:
  __device__ __forceinline__ float4* Kept() const { return reinterpret_cast<float4*>(kept_); }

  Interval mine_;
  const float* logits_;
  float* probs_;
  float* kept_;
  uint32_t* columns_;
  uint32_t vectors_;
};

// A logit's weight: 1 for the largest, 0 below min_p.
class Weight {
 public:
  __device__ __forceinline__ Weight(float largest, float temperature, float min_p)
      : largest_(largest),
        temperature_(temperature),
        inverse_(1.0f / temperature),
        min_p_(min_p),
        is_usual_(temperature > 0x1p-20f && temperature < 0x1p20f) {}

  __device__ __forceinline__ float operator()(float logit) const {
    const float weight = expf(Scaled(__fsub_rn(logit, largest_)));
    return weight < min_p_ ? 0.0f : weight;
  }

 private:
  // The quotient; of usual temperatures by the steps that a division takes anyway, whose
  // intermediates cannot overflow then. What is so small weighs nothing.
  __device__ __forceinline__ float Scaled(float below) const {
    if (!is_usual_) return __fdiv_rn(below, temperature_);
    below = fmaxf(below, -0x1p90f);
    const float quotient = __fmul_rn(below, inverse_);
    return __fmaf_rn(__fmaf_rn(-quotient, temperature_, below), inverse_, quotient);
  }

  float largest_, temperature_, inverse_, min_p_;
  bool is_usual_;
};

template <int kBlocks, bool kKept>
__device__ __forceinline__ void WriteRow(const ProbabilitiesParams& p, int32_t s, uint32_t largest,
                                         const RowWeights<kBlocks, kKept>& row,
                                         ProbabilitiesShared& shared) {
  const float temperature = p.temperature[s];
  if (temperature == 0.0f || IsBrokenMaximum(largest)) {
    return row.WriteOne(row.IdOf(largest, shared.id));
  }
  const Weight weight{ValueOfOrdered(largest), temperature, p.min_p[s]};
  const int32_t top_k = p.top_k[s];
  const bool by_count = top_k > 0 && static_cast<uint32_t>(top_k) < p.vocab;
  const bool by_mass = p.top_p[s] < 1.0;
  if (!by_count && !by_mass) return row.WriteWeights(weight);
  row.KeepWeights(weight);
  if (by_count) {
    row.template Truncate<false>(top_k - 1.0, by_mass ? row.kept() : row.probs(), shared.select);
  }
  if (by_mass) row.template Truncate<true>(p.top_p[s], row.probs(), shared.select);
}

template <int kBlocks, bool kKept>
__global__ void __launch_bounds__(kProbabilitiesThreads, 2)
    ProbabilitiesKernel(ProbabilitiesParams p) {
  using Group = RowGroup<kBlocks>;
  extern __shared__ float4 kept[];
  __shared__ ProbabilitiesShared shared;
  ClearSums<kProbabilitiesThreads>(shared.select.sums[0]);
  if (threadIdx.x == 0) shared.select.passes = 0;
  WaitForEarlierGrids();
  LetNextGridStart();
  const int64_t r = Group::Row();
  const int32_t s = BlockRequestOf(p.cu_rows, p.batch, r);
  if (s < 0) return;
  const RowWeights<kBlocks, kKept> row(p, r, reinterpret_cast<float*>(kept));
  const uint32_t largest = row.Largest(shared.largest);
  if (Group::Rank() == 0 && threadIdx.x == 0 && IsBrokenMaximum(largest)) p.broken[r] |= 1;
  WriteRow(p, s, largest, row, shared);
  Group::Sync();
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_PROBABILITIES_CUH_
