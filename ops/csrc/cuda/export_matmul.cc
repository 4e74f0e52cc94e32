// Exports of the decoder's matmul and attention.
#include "decoder.h"
#include "decoder_arguments.h"
#include "hopper_matmul.h"

namespace baton_ops {
namespace {

struct Matmul {
  cuda::MatmulInput input;
  cuda::Rows out;
  cuda::ElementType out_type;
  DLDevice device;
};

// Reads x, weight, out; `gated`: the weight has two rows for each column of out.
Matmul ReadMatmul(ArgumentReader* args, bool gated = false) {
  const TensorView x = args->Tensor("x"), weight = args->Tensor("weight");
  const TensorView out = args->Tensor("out");
  const Call call(x, "x");
  Matmul read{};
  read.device = call.device;
  cuda::MatmulInput& in = read.input;
  in.type = call.type;
  in.x = call.Rows(x, "x", -1, -1);
  in.rows = x.size(0);
  in.in = x.size(1);
  Checked(weight, "weight").HasRank(2);
  in.out = weight.size(0);
  in.weight = Matrix<const void>(weight, "weight", DtypeOf(call.type), in.out, in.in, call.device);
  if (gated && in.out % 2 != 0) {
    TVM_FFI_THROW(ValueError) << "weight.shape[0] must be even, got " << in.out;
  }
  const bool is_float = !gated && ElementTypeOf(out, "out") == cuda::ElementType::kFloat32;
  read.out_type = is_float ? cuda::ElementType::kFloat32 : call.type;
  const int64_t columns = gated ? in.out / 2 : in.out;
  read.out = call.RowsOf(out, "out", DtypeOf(read.out_type), in.rows, columns);
  return read;
}

void RunMatmul(ArgumentReader args) {
  const Matmul read = ReadMatmul(&args);
  const tvm::ffi::CUDADeviceGuard guard(read.device.device_id);
  Raise("matmul", cuda::Matmul(read.input, read.out, read.out_type, StreamOf(read.device)));
}

void RunGateUpSilu(ArgumentReader args) {
  const Matmul read = ReadMatmul(&args, true);
  const tvm::ffi::CUDADeviceGuard guard(read.device.device_id);
  Raise("gate_up_silu", cuda::GateUpSilu(read.input, read.out, StreamOf(read.device)));
}

cuda::MatmulWay ReadWay(ArgumentReader* args) {
  const int64_t way = args->Int("way");
  CheckRange("way", 0, way, 0, cuda::kMatmulWays - 1);
  return static_cast<cuda::MatmulWay>(way);
}

// Reads way and what ReadMatmul does: for who measures one way after the other.
void RunMatmulBy(ArgumentReader args) {
  const cuda::MatmulWay way = ReadWay(&args);
  const Matmul read = ReadMatmul(&args);
  const tvm::ffi::CUDADeviceGuard guard(read.device.device_id);
  Raise("matmul", cuda::MatmulBy(way, read.input, read.out, read.out_type, StreamOf(read.device)));
}

void RunGateUpSiluBy(ArgumentReader args) {
  const cuda::MatmulWay way = ReadWay(&args);
  const Matmul read = ReadMatmul(&args, true);
  const tvm::ffi::CUDADeviceGuard guard(read.device.device_id);
  Raise("gate_up_silu", cuda::GateUpSiluBy(way, read.input, read.out, StreamOf(read.device)));
}

// Reads what ReadAttending does, out, scratch.
void RunAttend(ArgumentReader args) {
  const Attending read = ReadAttending(&args, false);
  const TensorView out = args.Tensor("out"), scratch = args.Tensor("scratch");
  const Call& call = read.call;
  const cuda::AttendInput& in = read.input;
  void* to = call.Heads(out, "out", in.tokens, in.heads, in.pool.head_dim);
  uint8_t* bytes = Output<uint8_t>(scratch, "scratch", kUInt8, 0, call.device);
  const cuda::Workspace workspace{bytes, static_cast<size_t>(scratch.numel())};
  const tvm::ffi::CUDADeviceGuard guard(call.device.device_id);
  Raise("attend", cuda::Attention(in, to, workspace, StreamOf(call.device)));
}

int64_t AttentionScratchBytes(int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t sequences,
                              int64_t tokens, int64_t positions) {
  return static_cast<int64_t>(
      cuda::AttentionScratchBytes({heads, kv_heads, head_dim, sequences, tokens, positions}));
}

}  // namespace
}  // namespace baton_ops

BATON_EXPORT_CUDA(cuda_matmul, 3, RunMatmul)
BATON_EXPORT_CUDA(cuda_matmul_by, 4, RunMatmulBy)
BATON_EXPORT_CUDA(cuda_gate_up_silu, 3, RunGateUpSilu)
BATON_EXPORT_CUDA(cuda_gate_up_silu_by, 4, RunGateUpSiluBy)
BATON_EXPORT_CUDA(cuda_attend, 8, RunAttend)

TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_attention_scratch_bytes, baton_ops::AttentionScratchBytes)
