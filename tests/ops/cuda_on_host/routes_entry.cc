// The launches of what a mixture of experts does beside its products under C names; arguments are
// laid out by baton_testing/host_routes.py, eight bytes each. Returns null or what went wrong.
#include <cuda_runtime.h>

#include <utility>

#include "rewritten/experts.h"
#include "words.h"

using namespace baton_ops::cuda;

namespace {

RouteInput ReadRouting(const int64_t*& words, double least_sum, double scaling, RouteOutput& out) {
  RouteInput in{};
  in.least_sum = least_sum;
  in.scaling = scaling;
  in.x.data = At<void>(words);
  in.x.stride = *words++;
  in.type = TypeOf(*words++);
  in.tokens = *words++;
  in.hidden = *words++;
  in.router = At<const float>(words);
  in.bias = At<const float>(words);
  in.experts = *words++;
  in.chosen = *words++;
  in.groups = *words++;
  in.chosen_groups = *words++;
  in.is_sigmoid = *words++ != 0;
  in.normalises = *words++ != 0;
  out.products = At<float>(words);
  out.expert = At<int32_t>(words);
  out.weight = At<float>(words);
  out.place = At<int32_t>(words);
  out.row = At<int32_t>(words);
  out.starts = At<int32_t>(words);
  return in;
}

AddNormInput ReadNorm(const int64_t*& words, double eps, Rows& out) {
  AddNormInput in{};
  in.eps = static_cast<float>(eps);
  for (Rows* rows : {&in.x, &in.residual, &out}) {
    rows->data = At<void>(words);
    rows->stride = *words++;
  }
  in.weight = At<const void>(words);
  in.type = TypeOf(*words++);
  in.rows = *words++;
  in.columns = *words++;
  return in;
}

CombineInput ReadCombining(const int64_t*& words) {
  CombineInput in{};
  in.made.data = At<void>(words);
  in.made.stride = *words++;
  in.type = TypeOf(*words++);
  in.place = At<const int32_t>(words);
  in.weight = At<const float>(words);
  in.beside.data = At<void>(words);
  in.beside.stride = *words++;
  in.tokens = *words++;
  in.chosen = *words++;
  in.columns = *words++;
  return in;
}

}  // namespace

extern "C" {

void host_clusters(int clusters) { host_cuda::active_clusters = clusters; }

// Returns how many kernels were launched since this was last called.
int host_launches() { return std::exchange(host_cuda::launches, 0); }

Error host_route(const int64_t* words, double least_sum, double scaling) {
  RouteOutput out{};
  const RouteInput in = ReadRouting(words, least_sum, scaling, out);
  return Route(in, out, nullptr);
}

Error host_norm(const int64_t* words, double eps) {
  Rows out{};
  const AddNormInput in = ReadNorm(words, eps, out);
  return AddNorm(in, out, nullptr);
}

Error host_norm_route(const int64_t* words, double eps, double least_sum, double scaling) {
  Rows normed{};
  const AddNormInput norm = ReadNorm(words, eps, normed);
  RouteOutput out{};
  const RouteInput in = ReadRouting(words, least_sum, scaling, out);
  return NormRoute(norm, in, out, nullptr);
}

Error host_combine(const int64_t* words) {
  const CombineInput in = ReadCombining(words);
  Rows out{};
  out.data = At<void>(words);
  out.stride = *words++;
  return Combine(in, out, nullptr);
}

Error host_combine_norm(const int64_t* words, double eps) {
  const CombineInput in = ReadCombining(words);
  Rows out{};
  const AddNormInput norm = ReadNorm(words, eps, out);
  return CombineNorm(in, norm, out, nullptr);
}
}
