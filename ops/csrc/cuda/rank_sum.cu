// Launches of the kernels that ranks meet in: how many blocks, and in one shot or two.
#include <algorithm>

#include "baton_ops/rank_norm.cuh"
#include "baton_ops/rank_sum.cuh"
#include "early_launch.h"
#include "element_types.h"
#include "norm_launch.h"
#include "ranks.h"

namespace baton_ops::cuda {
namespace {

// From so many bytes a part on, reading all of everybody's takes longer than meeting again. Two
// ranks read the same in both ways.
constexpr int64_t kTwoShotBytesOf4 = 512 << 10;
constexpr int64_t kTwoShotBytesOf8 = 256 << 10;

bool TakesTwoShots(const RankSumInput& in) {
  if (in.way != SumWay::kChosen) return in.way == SumWay::kTwoShots;
  const int64_t bytes = in.elements * ElementBytes(in.part_type);
  if (in.exchange.ranks == 2) return false;
  return bytes >= (in.exchange.ranks == 4 ? kTwoShotBytesOf4 : kTwoShotBytesOf8);
}

RankExchange ExchangeOf(const ExchangeInput& in) {
  RankExchange exchange{};
  for (int64_t r = 0; r < in.ranks; ++r) {
    exchange.buffers[r] = reinterpret_cast<char*>(in.buffers[r]);
  }
  exchange.rank = static_cast<int32_t>(in.rank);
  exchange.half = static_cast<int32_t>(in.half);
  exchange.part = ExchangeHeadBytes() + in.half * in.half_bytes;
  exchange.limit_ns = static_cast<uint64_t>(in.limit_ns);
  return exchange;
}

// Every rank has the same, which teams rely on.
Grid GridOf(int64_t vectors) {
  const bool is_small = vectors <= int64_t{kMostTeams} * kRankThreads;
  const int threads = is_small ? kRankThreads : kMostRankThreads;
  const int64_t blocks = std::min<int64_t>(DivideUp<int64_t>(vectors, threads), kMostTeams);
  return {static_cast<unsigned>(std::max<int64_t>(blocks, 1)), static_cast<unsigned>(threads)};
}

template <class Work>
Error ForRanks(int64_t ranks, const Work& work) {
  switch (ranks) {
    case 2:
      return work(std::integral_constant<int, 2>{});
    case 4:
      return work(std::integral_constant<int, 4>{});
    case 8:
      return work(std::integral_constant<int, 8>{});
    default:
      return "ranks must be 2, 4 or 8";
  }
}

template <class In, class Out>
Error SumOf(const RankSumInput& in, void* out, Stream stream) {
  const int64_t vectors = in.elements / kPerVector<In>;
  const RankSumParams<In, Out> params{ExchangeOf(in.exchange), static_cast<Out*>(out), vectors};
  const bool is_twice = TakesTwoShots(in);
  const Grid grid = GridOf(is_twice ? DivideUp(vectors, in.exchange.ranks) : vectors);
  return ForRanks(in.exchange.ranks, [&](auto ranks) {
    const auto kernel =
        is_twice ? RankSumTwiceKernel<In, Out, ranks()> : RankSumOnceKernel<In, Out, ranks()>;
    return LaunchEarly(kernel, grid, stream, params);
  });
}

// Whether a block may have each row: all of them must be resident at once, since they meet.
bool IsOneKernel(const RankSumInput& in, const AddNormInput& norm, const Rows& out) {
  return in.part_type == norm.type && norm.rows <= kMostTeams && !TakesTwoShots(in) &&
         IsNormWide(norm, out) && norm.columns <= kMostNormThreads * kChunk;
}

template <class E>
Error SumNormOf(const RankSumInput& in, const AddNormInput& norm, const Rows& out, Stream stream) {
  const RankNormParams<E> params{ExchangeOf(in.exchange), NormParamsOf<E>(norm, out)};
  const Grid grid{static_cast<unsigned>(norm.rows), NormThreads(norm.columns)};
  const bool is_pushed =
      norm.rows <= kMostPushedRows && norm.columns <= kMostPushedVectors * kPerVector<E>;
  return ForRanks(in.exchange.ranks, [&](auto ranks) {
    const auto kernel =
        is_pushed ? RankNormKernel<E, ranks(), true> : RankNormKernel<E, ranks(), false>;
    return LaunchEarly(kernel, grid, stream, params);
  });
}

}  // namespace

int64_t ExchangeHeadBytes() {
  constexpr int64_t kRows = 2 * kMostRanks * kMostPushedRows;  // of each half and rank
  return sizeof(ExchangeHead) + kRows * kMostPushedVectors * kPushedWords * sizeof(uint64_t);
}

Error SumOverRanks(const RankSumInput& in, void* out, Stream stream) {
  if (in.out_type == ElementType::kFloat32) return SumOf<float, float>(in, out, stream);
  return ForElement(in.part_type, [&](auto part) {
    return SumOf<decltype(part), __nv_bfloat16>(in, out, stream);
  });
}

Error SumOverRanksNorm(const RankSumInput& in, const AddNormInput& norm, void* room,
                       const Rows& out, Stream stream) {
  if (!IsOneKernel(in, norm, out)) {
    AddNormInput behind = norm;
    behind.x = {room, norm.columns};
    const Error error = SumOverRanks(in, room, stream);
    return error ? error : AddNorm(behind, out, stream);
  }
  return ForElement(
      norm.type, [&](auto element) { return SumNormOf<decltype(element)>(in, norm, out, stream); });
}

Error GatherFromRanks(const ExchangeInput& exchange, int64_t bytes, void* out, Stream stream) {
  const int64_t vectors = bytes / kVector;
  const RankGatherParams params{ExchangeOf(exchange), static_cast<uint4*>(out), vectors};
  return ForRanks(exchange.ranks, [&](auto ranks) {
    return LaunchEarly(RankGatherKernel<ranks()>, GridOf(vectors), stream, params);
  });
}

Error ErrorsOfRanks(const ExchangeInput& exchange, int32_t* out, Stream stream) {
  const RankErrorsParams params{ExchangeOf(exchange), out};
  return ForRanks(exchange.ranks, [&](auto ranks) {
    return LaunchEarly(RankErrorsKernel<ranks()>, GridOf(1), stream, params);
  });
}

}  // namespace baton_ops::cuda
