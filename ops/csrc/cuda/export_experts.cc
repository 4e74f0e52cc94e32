// Exports of the ops of mixtures of experts.
#include <algorithm>
#include <cstdint>
#include <limits>

#include "decoder_arguments.h"
#include "hopper_matmul.h"

namespace baton_ops {
namespace {

// What a choice reads and writes, of a call's rows.
struct Routing {
  cuda::RouteInput in{};
  cuda::RouteOutput out{};
};

// Reads router, bias?, chosen, groups, chosen_groups, is_sigmoid, normalises, least_sum, scaling,
// products, expert, weight, place, row, starts.
Routing ReadRouting(ArgumentReader* reader, const Call& call, const TensorView& x,
                    const char* name) {
  ArgumentReader& args = *reader;
  const TensorView router = args.Tensor("router");
  const auto bias = args.OptionalTensor("bias");
  cuda::RouteInput in{};
  in.chosen = args.Int("chosen");
  in.groups = args.Int("groups");
  in.chosen_groups = args.Int("chosen_groups");
  in.is_sigmoid = args.Int("is_sigmoid") != 0;
  in.normalises = args.Int("normalises") != 0;
  in.least_sum = args.Float("least_sum");
  in.scaling = args.Float("scaling");
  const TensorView products = args.Tensor("products"), expert = args.Tensor("expert");
  const TensorView weight = args.Tensor("weight"), place = args.Tensor("place");
  const TensorView row = args.Tensor("row"), starts = args.Tensor("starts");
  in.type = call.type;
  in.x = call.Rows(x, name, -1, -1);
  in.tokens = x.size(0);
  in.hidden = x.size(1);
  Checked(router, "router").HasRank(2);
  in.experts = router.size(0);
  in.router = Matrix<const float>(router, "router", kFloat32, in.experts, in.hidden, call.device);
  in.bias = OptionalVector<const float>(bias, "bias", kFloat32, in.experts, call.device);
  CheckRange("experts", 0, in.experts, 1, cuda::kMostExpertsOfLayer);
  CheckRange("chosen", 0, in.chosen, 1, std::min(in.experts, cuda::kMostExpertsOfToken));
  CheckRange("groups", 0, in.groups, 1, cuda::kMostExpertsOfToken);
  CheckRange("chosen_groups", 0, in.chosen_groups, 1, in.groups);
  if (in.experts % in.groups != 0) {
    TVM_FFI_THROW(ValueError) << "groups must divide the " << in.experts << " experts, got "
                              << in.groups;
  }
  // A group's worth is that of its two best; who chooses more than it may takes what it must not.
  const int64_t size = in.experts / in.groups;
  if (in.chosen_groups < in.groups) CheckRange("experts of a group", 0, size, 2, in.experts);
  CheckRange("chosen", 0, in.chosen, 1, size * in.chosen_groups);
  const int64_t pairs = in.tokens * in.chosen;
  const cuda::RouteOutput out{
      Matrix<float>(products, "products", kFloat32, in.tokens, in.experts, call.device),
      call.Ints<int32_t>(expert, "expert", pairs),
      Vector<float>(weight, "weight", kFloat32, pairs, call.device),
      call.Ints<int32_t>(place, "place", pairs),
      call.Ints<int32_t>(row, "row", pairs),
      call.Ints<int32_t>(starts, "starts", in.experts + 1)};
  return {in, out};
}

// Reads x, and what ReadRouting does.
void RunRoute(ArgumentReader args) {
  const TensorView x = args.Tensor("x");
  const Call call(x, "x");
  const Routing routing = ReadRouting(&args, call, x, "x");
  const tvm::ffi::CUDADeviceGuard guard(call.device.device_id);
  Raise("route", cuda::Route(routing.in, routing.out, StreamOf(call.device)));
}

// Reads x?, residual, norm_weight, eps, normed, and what ReadRouting does.
void RunNormRoute(ArgumentReader args) {
  const auto x = args.OptionalTensor("x");
  const TensorView residual = args.Tensor("residual"), weight = args.Tensor("norm_weight");
  const double eps = args.Float("eps");
  const TensorView normed = args.Tensor("normed");
  const Call call(residual, "residual");
  const Routing routing = ReadRouting(&args, call, normed, "normed");
  cuda::AddNormInput norm = ReadNorm(call, residual, weight, "norm_weight", eps);
  call.Rows(normed, "normed", norm.rows, norm.columns);
  if (x) norm.x = call.Rows(*x, "x", norm.rows, norm.columns);
  const tvm::ffi::CUDADeviceGuard guard(call.device.device_id);
  Raise("norm_route", cuda::NormRoute(norm, routing.in, routing.out, StreamOf(call.device)));
}

// Reads x, starts, weight, out and, if gated, known; `way`: what measures one way after the other,
// or null.
void RunGrouped(ArgumentReader args, bool is_gated, const cuda::MatmulWay* way = nullptr) {
  const TensorView x = args.Tensor("x"), starts = args.Tensor("starts");
  const TensorView weight = args.Tensor("weight"), out = args.Tensor("out");
  const Call call(x, "x");
  cuda::GroupedInput in{};
  in.product.type = call.type;
  in.product.x = call.Rows(x, "x", -1, -1);
  in.product.rows = x.size(0);
  in.product.in = x.size(1);
  Checked(out, "out").HasRank(2);
  if (x.size(0) == 1 && out.size(0) > 1) {
    in.product.rows = out.size(0);
    in.product.x.stride = 0;
  }
  Checked(starts, "starts").HasRank(1).HasSizeAtLeast(0, 2);
  in.groups = starts.size(0) - 1;
  in.starts = call.Ints<const int32_t>(starts, "starts", in.groups + 1);
  CheckRange("groups", 0, in.groups, 1, cuda::kMostExpertsOfLayer);
  in.product.out = out.size(1) * (is_gated ? 2 : 1);
  // A group's rows of the weight are addressed in 32 bits.
  const int64_t weight_rows = in.groups * in.product.out;
  CheckRange("weight.shape", 0, weight_rows, 0, std::numeric_limits<int32_t>::max() / 2);
  in.product.weight = Matrix<const void>(weight, "weight", DtypeOf(call.type), weight_rows,
                                         in.product.in, call.device);
  const cuda::Rows to = call.Rows(out, "out", in.product.rows, -1);
  if (is_gated && !way) in.are_known = args.Int("known") != 0;
  const tvm::ffi::CUDADeviceGuard guard(call.device.device_id);
  if (way) {
    Raise("expert_by", cuda::GroupedBy(*way, in, is_gated, to, StreamOf(call.device)));
  } else if (is_gated) {
    Raise("expert_gate_up_silu", cuda::GroupedGateUpSilu(in, to, StreamOf(call.device)));
  } else {
    Raise("expert_matmul", cuda::GroupedMatmul(in, to, StreamOf(call.device)));
  }
}

void RunExpertMatmul(ArgumentReader args) { RunGrouped(args, false); }

void RunExpertGateUpSilu(ArgumentReader args) { RunGrouped(args, true); }

// Reads way, and what RunGrouped does.
void RunBy(ArgumentReader args, bool is_gated) {
  const int64_t way = args.Int("way");
  CheckRange("way", 0, way, 0, cuda::kMatmulWays - 1);
  const auto by = static_cast<cuda::MatmulWay>(way);
  RunGrouped(args, is_gated, &by);
}

void RunExpertMatmulBy(ArgumentReader args) { RunBy(args, false); }

void RunExpertGateUpSiluBy(ArgumentReader args) { RunBy(args, true); }

// Reads made, place, weight, beside?, of what is added to rows of `out`.
cuda::CombineInput ReadCombining(ArgumentReader* reader, const TensorView& made, const Call& call,
                                 const TensorView& out) {
  ArgumentReader& args = *reader;
  const TensorView place = args.Tensor("place"), weight = args.Tensor("weight");
  const auto beside = args.OptionalTensor("beside");
  cuda::CombineInput in{};
  in.type = call.type;
  Checked(out, "out").HasRank(2);
  in.tokens = out.size(0);
  in.columns = out.size(1);
  Checked(made, "made").HasRank(2);
  const int64_t pairs = made.size(0);
  if (in.tokens == 0 ? pairs != 0 : pairs % in.tokens != 0) {
    TVM_FFI_THROW(ValueError) << "made.shape[0] must be a multiple of out.shape[0] (" << in.tokens
                              << "), got " << pairs;
  }
  in.chosen = in.tokens == 0 ? 0 : pairs / in.tokens;
  in.made = call.Rows(made, "made", pairs, in.columns);
  in.place = call.Ints<const int32_t>(place, "place", pairs);
  in.weight = Vector<const float>(weight, "weight", kFloat32, pairs, call.device);
  if (beside) in.beside = call.Rows(*beside, "beside", in.tokens, in.columns);
  return in;
}

// Reads out, made, and what ReadCombining does.
void RunCombine(ArgumentReader args) {
  const TensorView out = args.Tensor("out"), made = args.Tensor("made");
  const Call call(made, "made");
  const cuda::CombineInput in = ReadCombining(&args, made, call, out);
  const cuda::Rows to = call.Rows(out, "out", in.tokens, in.columns);
  const tvm::ffi::CUDADeviceGuard guard(call.device.device_id);
  Raise("combine", cuda::Combine(in, to, StreamOf(call.device)));
}

// Reads residual, norm_weight, eps, out, made, and what ReadCombining does.
void RunCombineNorm(ArgumentReader args) {
  const TensorView residual = args.Tensor("residual"), weight = args.Tensor("norm_weight");
  const double eps = args.Float("eps");
  const TensorView out = args.Tensor("out"), made = args.Tensor("made");
  const Call call(made, "made");
  const cuda::CombineInput in = ReadCombining(&args, made, call, out);
  const cuda::AddNormInput norm = ReadNorm(call, residual, weight, "norm_weight", eps);
  const cuda::Rows to = call.Rows(out, "out", norm.rows, norm.columns);
  const tvm::ffi::CUDADeviceGuard guard(call.device.device_id);
  Raise("combine_norm", cuda::CombineNorm(in, norm, to, StreamOf(call.device)));
}

}  // namespace
}  // namespace baton_ops

BATON_EXPORT_CUDA(cuda_route, 16, RunRoute)
BATON_EXPORT_CUDA(cuda_expert_matmul, 4, RunExpertMatmul)
BATON_EXPORT_CUDA(cuda_expert_matmul_by, 5, RunExpertMatmulBy)
BATON_EXPORT_CUDA(cuda_expert_gate_up_silu_by, 5, RunExpertGateUpSiluBy)
BATON_EXPORT_CUDA(cuda_expert_gate_up_silu, 5, RunExpertGateUpSilu)
BATON_EXPORT_CUDA(cuda_norm_route, 20, RunNormRoute)
BATON_EXPORT_CUDA(cuda_combine, 5, RunCombine)
BATON_EXPORT_CUDA(cuda_combine_norm, 8, RunCombineNorm)
