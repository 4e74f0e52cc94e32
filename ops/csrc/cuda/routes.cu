// Launches of what a mixture of experts does beside its products.
#include "baton_ops/combine.cuh"
#include "baton_ops/norm_route.cuh"
#include "baton_ops/router.cuh"
#include "baton_ops/routes.cuh"
#include "early_launch.h"
#include "element_types.h"
#include "experts.h"
#include "norm_launch.h"
#include "row_launch.h"

namespace baton_ops::cuda {
namespace {

static_assert(kMostExperts == kMostExpertsOfLayer && kMostChosen == kMostExpertsOfToken);
static_assert(kMostCombined == kMostExpertsOfToken);
constexpr int64_t kMostGridRows = 65535;

// Up to so many tokens the router's products are bound by waiting for memory: more warps have
// fewer.
constexpr int64_t kRoutedByTwo = 16, kRoutedByFour = 64;
// From so many tokens on the router's products are bound by reading x again for every few experts,
// and from more on by reading the router again for every few tokens.
constexpr int64_t kSomeTokens = 192, kManyTokens = 768;

template <int kTokens, int kExperts, int kAcross, class E>
Error RunRouterBy(const RouterParams<E>& params, bool is_wide, Stream stream) {
  const int64_t across = DivideUp<int64_t>(params.experts, kAcross * kExperts);
  const int64_t down = DivideUp<int64_t>(params.tokens, kRouterWarps / kAcross * kTokens);
  if (down > kMostGridRows) return "x has too many rows";
  const Grid grid{dim3(static_cast<unsigned>(across), static_cast<unsigned>(down)), kRouterThreads};
  return is_wide
             ? LaunchEarly(RouterKernel<E, true, kTokens, kExperts, kAcross>, grid, stream, params)
             : LaunchEarly(RouterKernel<E, false, kTokens, kExperts, kAcross>, grid, stream,
                           params);
}

template <class E>
Error RunRouter(const RouteInput& in, float* products, Stream stream) {
  const RouterParams<E> params{
      static_cast<const E*>(in.x.data), in.router, products, in.x.stride, in.tokens, in.hidden,
      static_cast<int>(in.experts)};
  const bool is_wide = AreVectors(in.x, in.hidden, ElementBytes(in.type)) &&
                       IsOnVector(in.router) && in.hidden % kChunk == 0;
  if (in.tokens == 1) return RunRouterBy<1, 1, kRouterWarps>(params, is_wide, stream);
  if (in.tokens <= kRoutedByTwo) return RunRouterBy<2, 1, kRouterWarps>(params, is_wide, stream);
  if (in.tokens <= kRoutedByFour) return RunRouterBy<4, 1, kRouterWarps>(params, is_wide, stream);
  if (in.tokens < kSomeTokens) return RunRouterBy<8, 1, kRouterWarps>(params, is_wide, stream);
  if (in.tokens < kManyTokens) return RunRouterBy<8, 4, kRouterWarps>(params, is_wide, stream);
  return RunRouterBy<8, 8, 2>(params, is_wide, stream);
}

Error Check(const RouteInput& in) {
  if (in.experts > kMostExperts) return "more than 512 experts";
  if (in.chosen > kMostChosen) return "a token takes more than 32 experts";
  if (in.groups > kMostExpertGroups) return "experts stand in more than 32 groups";
  return nullptr;
}

ChooseParams ParamsOf(const RouteInput& in, const RouteOutput& out) {
  ChooseParams p{};
  p.products = out.products;
  p.bias = in.bias;
  p.expert = out.expert;
  p.weight = out.weight;
  p.place = out.place;
  p.row = out.row;
  p.starts = out.starts;
  p.tokens = in.tokens;
  p.experts = static_cast<int>(in.experts);
  p.chosen = static_cast<int>(in.chosen);
  p.groups = static_cast<int>(in.groups);
  p.chosen_groups = static_cast<int>(in.chosen_groups);
  p.is_sigmoid = in.is_sigmoid;
  p.normalises = in.normalises;
  p.least_sum = in.least_sum;
  p.scaling = in.scaling;
  return p;
}

// Sorts as well, if kSorts.
template <bool kSorts>
Error Choose(const RouteInput& in, const RouteOutput& out, Stream stream) {
  const ChooseParams p = ParamsOf(in, out);
  const auto blocks = DivideUp<int64_t>(in.tokens, kChooseTokens);
  const Grid grid{dim3(static_cast<unsigned>(blocks)), kChooseThreads};
  if (in.experts <= 2 * kWarp) return LaunchEarly(ChooseKernel<2, kSorts>, grid, stream, p);
  if (in.experts <= 4 * kWarp) return LaunchEarly(ChooseKernel<4, kSorts>, grid, stream, p);
  if (in.experts <= 8 * kWarp) return LaunchEarly(ChooseKernel<8, kSorts>, grid, stream, p);
  return LaunchEarly(ChooseKernel<16, kSorts>, grid, stream, p);
}

template <class E, int kAtOnce>
Error CombineBy(const CombineParams<E>& params, const Grid& grid, bool is_wide, Stream stream) {
  return is_wide ? LaunchEarly(CombineKernel<E, true, kAtOnce>, grid, stream, params)
                 : LaunchEarly(CombineKernel<E, false, kAtOnce>, grid, stream, params);
}

// Of a sum that is not stored, `out` is none.
template <class E>
CombineParams<E> CombineParamsOf(const CombineInput& in, const Rows& out) {
  return {static_cast<const E*>(in.made.data),
          in.place,
          in.weight,
          static_cast<const E*>(in.beside.data),
          static_cast<E*>(out.data),
          in.made.stride,
          in.beside.stride,
          out.stride,
          in.columns,
          static_cast<int>(in.chosen)};
}

bool AreInputsWide(const CombineInput& in) {
  const int64_t bytes = ElementBytes(in.type);
  const bool is_beside_wide = in.beside.data == nullptr || AreVectors(in.beside, in.columns, bytes);
  return AreVectors(in.made, in.columns, bytes) && is_beside_wide && in.columns % kChunk == 0;
}

template <class E>
Error CombineOf(const CombineInput& in, const Rows& out, Stream stream) {
  const CombineParams<E> params = CombineParamsOf<E>(in, out);
  const bool is_wide = AreInputsWide(in) && AreVectors(out, in.columns, ElementBytes(in.type));
  const Grid grid{RowGrid(in.tokens, in.columns, kCombineThreads * kChunk), kCombineThreads};
  return in.tokens <= kCombineFewTokens
             ? CombineBy<E, kCombineOfFew>(params, grid, is_wide, stream)
             : CombineBy<E, kCombineOfMany>(params, grid, is_wide, stream);
}

template <class E>
Error CombineNormOf(const CombineInput& in, const AddNormInput& norm, const Rows& out,
                    Stream stream) {
  const Grid grid{static_cast<unsigned>(in.tokens), NormThreads(in.columns)};
  const CombineParams<E> params = CombineParamsOf<E>(in, {});
  const NormParams<E> norm_params = NormParamsOf<E>(norm, out);
  constexpr int kOfFew = sizeof(E) == 2 ? kCombineOfFew : kCombineOfMany;  // what registers hold
  const bool are_few = in.tokens <= kCombineFewTokens;
  const auto kernel = grid.threads > kCombineFewThreads
                          ? CombineNormKernel<E, kCombineOfWide, kMostNormThreads>
                      : are_few ? CombineNormKernel<E, kOfFew, kCombineFewThreads>
                                : CombineNormKernel<E, kCombineOfMany, kCombineFewThreads>;
  const bool rehearses = in.tokens <= kCombineRehearsed;
  return LaunchEarly(kernel, grid, stream, params, norm_params, rehearses);
}

// Of a block's rows of the router, how many it holds.
int HeldRows(const RouteInput& in) {
  const int64_t of_block = DivideUp<int64_t>(in.experts, kRouteBlocks);
  return static_cast<int>(std::min<int64_t>(of_block, kHeldRouterBytes / 4 / in.hidden));
}

// Whether one kernel may norm and choose, if the device takes its cluster.
bool IsOneKernel(const AddNormInput& norm, const RouteInput& in) {
  return in.tokens == 1 && in.chosen_groups == in.groups && in.experts <= kMostRouteExperts &&
         IsNormWide(norm, in.x) && IsOnVector(in.router) && in.hidden <= kMostNormThreads * kChunk;
}

Error NormThenRoute(const AddNormInput& norm, const RouteInput& in, const RouteOutput& out,
                    Stream stream) {
  const Error error = AddNorm(norm, in.x, stream);
  return error ? error : Route(in, out, stream);
}

template <class E>
Error NormRouteOf(const AddNormInput& norm, const RouteInput& in, const RouteOutput& out,
                  Stream stream) {
  const NormRouteParams<E> params{NormParamsOf<E>(norm, in.x), ParamsOf(in, out), in.router,
                                  HeldRows(in)};
  const size_t row_bytes = static_cast<size_t>(in.hidden) * sizeof(float);
  const ClusterGrid grid{
      1, kRouteBlocks, std::max(kLeastRouteThreads, NormThreads(in.hidden)),
      static_cast<size_t>(params.held) * row_bytes + static_cast<size_t>(in.hidden) * sizeof(E)};
  const auto kernel = NormRouteKernel<E>;
  if (!TakesCluster(kernel, grid)) return NormThenRoute(norm, in, out, stream);
  // Else a multiprocessor has as much shared memory as one block needs, and a cluster no room.
  const cudaError_t status = cudaFuncSetAttribute(
      kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  if (status != cudaSuccess) return ErrorOf(status);
  return LaunchRows(kernel, grid, params, stream);
}

}  // namespace

Error NormRoute(const AddNormInput& norm, const RouteInput& in, const RouteOutput& out,
                Stream stream) {
  if (!IsOneKernel(norm, in)) return NormThenRoute(norm, in, out, stream);
  if (const Error error = Check(in)) return error;
  return ForElement(
      in.type, [&](auto element) { return NormRouteOf<decltype(element)>(norm, in, out, stream); });
}

Error Route(const RouteInput& in, const RouteOutput& out, Stream stream) {
  if (in.tokens == 0) return nullptr;
  if (const Error error = Check(in)) return error;
  const Error error = ForElement(in.type, [&](auto element) {
    return RunRouter<decltype(element)>(in, out.products, stream);
  });
  if (error) return error;
  if (in.tokens <= kChooseTokens) return Choose<true>(in, out, stream);
  if (const Error choosing = Choose<false>(in, out, stream)) return choosing;
  const OrderParams order{out.expert,
                          out.place,
                          out.row,
                          out.starts,
                          in.tokens * in.chosen,
                          static_cast<int>(in.chosen)};
  const Grid grid{dim3(static_cast<unsigned>(in.experts)), kOrderThreads};
  return IsOnVector(out.expert) ? LaunchEarly(OrderKernel<true>, grid, stream, order)
                                : LaunchEarly(OrderKernel<false>, grid, stream, order);
}

Error Combine(const CombineInput& in, const Rows& out, Stream stream) {
  if (in.tokens == 0 || in.columns == 0) return nullptr;
  if (in.chosen > kMostCombined) return "a token takes more than 32 experts";
  return ForElement(in.type,
                    [&](auto element) { return CombineOf<decltype(element)>(in, out, stream); });
}

Error CombineNorm(const CombineInput& in, const AddNormInput& norm, const Rows& out,
                  Stream stream) {
  const bool is_wide = AreInputsWide(in) && IsNormWide(norm, out);
  if (!is_wide || in.columns > kMostNormThreads * kChunk) {
    AddNormInput behind = norm;  // which reads a chunk of a row before it writes it
    behind.x = out;
    const Error error = Combine(in, out, stream);
    return error ? error : AddNorm(behind, out, stream);
  }
  if (in.tokens == 0 || in.columns == 0) return nullptr;
  if (in.chosen > kMostCombined) return "a token takes more than 32 experts";
  return ForElement(in.type, [&](auto element) {
    return CombineNormOf<decltype(element)>(in, norm, out, stream);
  });
}

}  // namespace baton_ops::cuda
