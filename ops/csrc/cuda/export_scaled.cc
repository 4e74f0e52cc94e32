// Exports of the ops of FP8.
#include <cstdint>
#include <limits>
#include <optional>

#include "decoder_arguments.h"
#include "experts.h"
#include "hopper_scaled.h"

namespace baton_ops {
namespace {

constexpr int64_t kMostColumns = std::numeric_limits<int32_t>::max();

// How many columns have a scale of their own, of how many scales a row has.
int64_t GroupOf(const TensorView& scales, const char* name, int64_t columns) {
  Checked(scales, name).HasRank(2);
  const int64_t groups = (columns + cuda::kScaledGroup - 1) / cuda::kScaledGroup;
  if (scales.size(1) == 1) return columns;
  if (scales.size(1) == groups) return cuda::kScaledGroup;
  TVM_FFI_THROW(ValueError) << name << ".shape[1] must be 1, or " << groups
                            << " for a scale for each " << cuda::kScaledGroup << " columns, got "
                            << scales.size(1);
}

// Of a weight of so many rows, in all.
float* ReadScales(const TensorView& scales, const char* name, int64_t rows,
                  const cuda::ScaledMatmulInput& in, DLDevice device) {
  const int64_t groups = (in.in + in.group - 1) / in.group;
  return Matrix<float>(scales, name, kFloat32, rows >> in.scale_shift, groups, device);
}

// How many rows of a weight have a scale in common, as a power of two: its scales have a row for
// each of its rows, or for each block. `part`: of rows that no block may reach beyond.
int ScaleShiftOf(const TensorView& scales, const char* name, int64_t rows, int64_t part,
                 int64_t group) {
  Checked(scales, name).HasRank(2);
  if (scales.size(0) == rows) return 0;
  const bool are_blocks = part % cuda::kScaledGroup == 0 && group <= cuda::kScaledGroup;
  if (are_blocks && scales.size(0) == rows >> cuda::kBlockShift) return cuda::kBlockShift;
  if (are_blocks) {
    TVM_FFI_THROW(ValueError) << name << ".shape[0] must be " << rows << ", or "
                              << (rows >> cuda::kBlockShift) << " for a scale for each "
                              << cuda::kScaledGroup << " rows, got " << scales.size(0);
  }
  TVM_FFI_THROW(ValueError) << name << ".shape[0] must be " << rows << ", got " << scales.size(0);
}

// Reads activations, whose scales are of rows.
cuda::ScaledRows ReadActivations(const TensorView& values, const TensorView& scales,
                                 const char* name, const char* scales_name, int64_t rows,
                                 int64_t columns, int64_t group, DLDevice device) {
  const int64_t groups = (columns + group - 1) / group;
  return {Matrix<uint8_t>(values, name, kUInt8, rows, columns, device),
          Matrix<float>(scales, scales_name, kFloat32, rows, groups, device)};
}

// Reads x, values, scales.
void RunQuantiseRows(ArgumentReader args) {
  const TensorView x = args.Tensor("x");
  const TensorView values = args.Tensor("values"), scales = args.Tensor("scales");
  const Call call(x, "x");
  cuda::QuantiseInput in{};
  in.type = call.type;
  in.x = call.Rows(x, "x", -1, -1);
  in.rows = x.size(0);
  in.columns = x.size(1);
  CheckRange("x.shape", 1, in.columns, 1, kMostColumns);
  in.group = GroupOf(scales, "scales", in.columns);
  const cuda::ScaledRows out = ReadActivations(values, scales, "values", "scales", in.rows,
                                               in.columns, in.group, call.device);
  const tvm::ffi::CUDADeviceGuard guard(call.device.device_id);
  Raise("quantise_rows", cuda::QuantiseRows(in, out, StreamOf(call.device)));
}

struct Product {
  bool is_gated, has_row, has_experts;
  bool is_plain = false;  // x is room for what is made of rows of E
};
constexpr Product kMatmul{false, false, false}, kGateUp{true, false, false},
    kExperts{false, false, true}, kExpertsGateUp{true, true, true};

constexpr Product Plain(Product product) {
  product.is_plain = true;
  return product;
}

// Reads what a product beside others is given where it has no row of its own: nothing.
void ReadNothing(ArgumentReader* args) {
  for (const char* name :
       {"beside_x", "beside_x_scales", "beside_weight", "beside_weight_scales", "beside_out"}) {
    if (!args->OptionalTensor(name)) continue;
    TVM_FFI_THROW(TypeError) << name << " must be None where beside_plain is";
  }
}

// Reads beside_plain, beside_x, beside_x_scales, beside_weight, beside_weight_scales, beside_out:
// all of them, of one row at least beside one at least, or none.
void ReadBeside(ArgumentReader* args, const Call& call, cuda::ScaledMatmulInput* in) {
  const auto plain = args->OptionalTensor("beside_plain");
  if (!plain) return ReadNothing(args);
  CheckRange("out.shape", 0, in->rows, 1, cuda::kMostScaledRows);
  const TensorView x = args->Tensor("beside_x"), x_scales = args->Tensor("beside_x_scales");
  const TensorView weight = args->Tensor("beside_weight");
  const TensorView weight_scales = args->Tensor("beside_weight_scales");
  const TensorView out = args->Tensor("beside_out");
  const int64_t weight_rows = (in->is_gated ? 2 : 1) * in->out;
  Checked(*plain, "beside_plain").HasRank(2).HasSizeAtLeast(0, 1);
  const int64_t rows = in->beside.rows = plain->size(0);
  in->beside.plain = call.Rows(*plain, "beside_plain", rows, in->in);
  in->beside.x = ReadActivations(x, x_scales, "beside_x", "beside_x_scales", rows, in->in,
                                 in->group, call.device);
  in->beside.weight = {
      Matrix<uint8_t>(weight, "beside_weight", kUInt8, weight_rows, in->in, call.device),
      ReadScales(weight_scales, "beside_weight_scales", weight_rows, *in, call.device)};
  in->beside.out = call.Rows(out, "beside_out", rows, in->out);
}

// Reads `plain` of what has it, x, x_scales, then `row` and `starts` of what has them, weight,
// weight_scales, out, of plain rows' experts what ReadBeside does.
void RunProduct(ArgumentReader args, const Product& product, const cuda::ScaledWay* way = nullptr) {
  const auto [is_gated, has_row, has_experts, is_plain] = product;
  std::optional<TensorView> plain;
  if (is_plain) plain = args.Tensor("plain");
  const TensorView x = args.Tensor("x"), x_scales = args.Tensor("x_scales");
  std::optional<TensorView> row, starts;
  if (has_row) row = args.Tensor("row");
  if (has_experts) starts = args.Tensor("starts");
  const TensorView weight = args.Tensor("weight"), weight_scales = args.Tensor("weight_scales");
  const TensorView out = args.Tensor("out");
  const Call call(out, "out");
  const TensorView& given = plain ? *plain : x;  // what x's rows are told by
  Checked(given, plain ? "plain" : "x").HasRank(2);
  Checked(out, "out").HasRank(2);
  cuda::ScaledMatmulInput in{};
  in.is_gated = is_gated;
  const int64_t x_rows = given.size(0);
  in.rows = has_row ? out.size(0) : x_rows;
  Checked(weight, "weight").HasRank(2);
  in.in = plain ? weight.size(1) : x.size(1);
  in.out = out.size(1);
  CheckRange(plain ? "weight.shape" : "x.shape", 1, in.in, 1, kMostColumns);
  in.group = GroupOf(x_scales, "x_scales", in.in);
  in.x = ReadActivations(x, x_scales, "x", "x_scales", x_rows, in.in, in.group, call.device);
  if (plain) {
    in.plain = call.Rows(*plain, "plain", x_rows, in.in);
    in.plain_rows = x_rows;
    in.are_starts_known = !has_row;  // an expert's second product comes behind the first
  }
  if (row) in.row = call.Ints<const int32_t>(*row, "row", in.rows);
  if (starts) {
    Checked(*starts, "starts").HasRank(1).HasSizeAtLeast(0, 2);
    in.experts = starts->size(0) - 1;
    CheckRange("experts", 0, in.experts, 1, cuda::kMostExpertsOfLayer);
    in.starts = call.Ints<const int32_t>(*starts, "starts", in.experts + 1);
  }
  const int64_t weight_rows = (is_gated ? 2 : 1) * in.out * (starts ? in.experts : 1);
  in.weight.values = Matrix<uint8_t>(weight, "weight", kUInt8, weight_rows, in.in, call.device);
  in.scale_shift = ScaleShiftOf(weight_scales, "weight_scales", weight_rows, in.out, in.group);
  in.weight.scales = ReadScales(weight_scales, "weight_scales", weight_rows, in, call.device);
  if (is_plain && has_experts) ReadBeside(&args, call, &in);
  const cuda::Rows to = call.Rows(out, "out", in.rows, in.out);
  const tvm::ffi::CUDADeviceGuard guard(call.device.device_id);
  const cuda::Stream stream = StreamOf(call.device);
  Raise("scaled_matmul", way ? cuda::ScaledMatmulBy(*way, in, to, call.type, stream)
                             : cuda::ScaledMatmul(in, to, call.type, stream));
}

// Reads way and what RunProduct does: for who measures one way after the other.
void RunProductBy(ArgumentReader args, const Product& product) {
  const int64_t way = args.Int("way");
  CheckRange("way", 0, way, 0, cuda::kScaledWays - 1);
  const auto by = static_cast<cuda::ScaledWay>(way);
  RunProduct(args, product, &by);
}

void RunScaledMatmul(ArgumentReader args) { RunProduct(args, kMatmul); }
void RunScaledMatmulBy(ArgumentReader args) { RunProductBy(args, kMatmul); }

void RunQuantiseMatmul(ArgumentReader args) { RunProduct(args, Plain(kMatmul)); }
void RunQuantiseGateUpSilu(ArgumentReader args) { RunProduct(args, Plain(kGateUp)); }
void RunQuantiseExpertGateUpSilu(ArgumentReader args) { RunProduct(args, Plain(kExpertsGateUp)); }
void RunQuantiseExpertMatmul(ArgumentReader args) { RunProduct(args, Plain(kExperts)); }

void RunScaledGateUpSilu(ArgumentReader args) { RunProduct(args, kGateUp); }
void RunScaledGateUpSiluBy(ArgumentReader args) { RunProductBy(args, kGateUp); }

void RunScaledExpertMatmul(ArgumentReader args) { RunProduct(args, kExperts); }
void RunScaledExpertMatmulBy(ArgumentReader args) { RunProductBy(args, kExperts); }

void RunScaledExpertGateUpSilu(ArgumentReader args) { RunProduct(args, kExpertsGateUp); }
void RunScaledExpertGateUpSiluBy(ArgumentReader args) { RunProductBy(args, kExpertsGateUp); }

}  // namespace
}  // namespace baton_ops

BATON_EXPORT_CUDA(cuda_quantise_rows, 3, RunQuantiseRows)
BATON_EXPORT_CUDA(cuda_quantise_matmul, 6, RunQuantiseMatmul)
BATON_EXPORT_CUDA(cuda_quantise_gate_up_silu, 6, RunQuantiseGateUpSilu)
BATON_EXPORT_CUDA(cuda_quantise_expert_gate_up_silu, 14, RunQuantiseExpertGateUpSilu)
BATON_EXPORT_CUDA(cuda_quantise_expert_matmul, 13, RunQuantiseExpertMatmul)
BATON_EXPORT_CUDA(cuda_scaled_matmul, 5, RunScaledMatmul)
BATON_EXPORT_CUDA(cuda_scaled_matmul_by, 6, RunScaledMatmulBy)
BATON_EXPORT_CUDA(cuda_scaled_gate_up_silu, 5, RunScaledGateUpSilu)
BATON_EXPORT_CUDA(cuda_scaled_gate_up_silu_by, 6, RunScaledGateUpSiluBy)
BATON_EXPORT_CUDA(cuda_scaled_expert_matmul, 6, RunScaledExpertMatmul)
BATON_EXPORT_CUDA(cuda_scaled_expert_matmul_by, 7, RunScaledExpertMatmulBy)
BATON_EXPORT_CUDA(cuda_scaled_expert_gate_up_silu, 7, RunScaledExpertGateUpSilu)
BATON_EXPORT_CUDA(cuda_scaled_expert_gate_up_silu_by, 8, RunScaledExpertGateUpSiluBy)
