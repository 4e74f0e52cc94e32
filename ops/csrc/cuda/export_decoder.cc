// Exports of the decoder's row-wise CUDA ops.
#include "decoder.h"
#include "decoder_arguments.h"

namespace baton_ops {
namespace {

// Reads table (or x), tokens (or rows), out.
void RunCopyRows(ArgumentReader args, const char* op, const char* table_name,
                 const char* index_name) {
  const TensorView table = args.Tensor(table_name), index = args.Tensor(index_name);
  const TensorView out = args.Tensor("out");
  const Call call(table, table_name);
  cuda::CopyRowsInput in{};
  in.type = call.type;
  in.table = call.Rows(table, table_name, -1, -1);
  in.table_rows = table.size(0);
  in.columns = table.size(1);
  in.rows = index.numel();
  in.index = call.Ints<const int32_t>(index, index_name, in.rows);
  const cuda::Rows to = call.Rows(out, "out", in.rows, in.columns);
  const tvm::ffi::CUDADeviceGuard guard(call.device.device_id);
  Raise(op, cuda::CopyRows(in, to, StreamOf(call.device)));
}

void RunEmbed(ArgumentReader args) { RunCopyRows(args, "embed", "table", "tokens"); }

void RunGather(ArgumentReader args) { RunCopyRows(args, "gather", "x", "rows"); }

// Reads x?, residual, weight, eps, out.
void RunAddNorm(ArgumentReader args) {
  const auto x = args.OptionalTensor("x");
  const TensorView residual = args.Tensor("residual"), weight = args.Tensor("weight");
  const double eps = args.Float("eps");
  const TensorView out = args.Tensor("out");
  const Call call(residual, "residual");
  cuda::AddNormInput in = ReadNorm(call, residual, weight, "weight", eps);
  if (x) in.x = call.Rows(*x, "x", in.rows, in.columns);
  const cuda::Rows to = call.Rows(out, "out", in.rows, in.columns);
  const tvm::ffi::CUDADeviceGuard guard(call.device.device_id);
  Raise("add_norm", cuda::AddNorm(in, to, StreamOf(call.device)));
}

// Reads bias?, query_norm?, key_norm?, eps, cos, sin, is_interleaved.
void ReadRotation(ArgumentReader* args, const Call& call, cuda::RopeStoreInput* in) {
  const int64_t head_dim = in->pool.head_dim, heads = in->heads + 2 * in->pool.heads;
  const auto bias = args->OptionalTensor("bias");
  const auto query_norm = args->OptionalTensor("query_norm");
  const auto key_norm = args->OptionalTensor("key_norm");
  if (!query_norm != !key_norm) {
    TVM_FFI_THROW(ValueError) << "query_norm and key_norm must be given together";
  }
  const DLDataType dtype = DtypeOf(call.type);
  in->bias = OptionalVector<const void>(bias, "bias", dtype, heads * head_dim, call.device);
  in->query_norm =
      OptionalVector<const void>(query_norm, "query_norm", dtype, head_dim, call.device);
  in->key_norm = OptionalVector<const void>(key_norm, "key_norm", dtype, head_dim, call.device);
  in->eps = static_cast<float>(args->Float("eps"));
  ReadAngles(args, call, head_dim, in);
}

// Reads qkv, kv, layer, query, and what ReadRotation and ReadPlaces do.
void RunRopeStore(ArgumentReader args) {
  const TensorView qkv = args.Tensor("qkv"), kv = args.Tensor("kv");
  const int64_t layer = args.Int("layer");
  const TensorView query = args.Tensor("query");
  const Call call(qkv, "qkv");
  cuda::RopeStoreInput in{};
  in.type = call.type;
  in.pool = call.Pool(kv);
  in.layer = LayerOf(layer, in.pool);
  if (in.pool.head_dim % 2 != 0) {
    TVM_FFI_THROW(ValueError) << "kv.shape[5] must be even, got " << in.pool.head_dim;
  }
  Checked(query, "query").HasRank(3);
  in.tokens = query.size(0);
  in.heads = query.size(1);
  const int64_t columns = (in.heads + 2 * in.pool.heads) * in.pool.head_dim;
  in.qkv = call.Rows(qkv, "qkv", in.tokens, columns);
  void* to = call.Heads(query, "query", in.tokens, in.heads, in.pool.head_dim);
  ReadRotation(&args, call, &in);
  ReadPlaces(&args, call, &in);
  const tvm::ffi::CUDADeviceGuard guard(call.device.device_id);
  Raise("rope_store", cuda::RopeStore(in, to, StreamOf(call.device)));
}

// Reads gate_up, out.
void RunSiluMul(ArgumentReader args) {
  const TensorView gate_up = args.Tensor("gate_up"), out = args.Tensor("out");
  const Call call(gate_up, "gate_up");
  Checked(out, "out").HasRank(2);
  const int64_t rows = out.size(0), columns = out.size(1);
  const cuda::Rows from = call.Rows(gate_up, "gate_up", rows, 2 * columns);
  const cuda::Rows to = call.Rows(out, "out", rows, columns);
  const tvm::ffi::CUDADeviceGuard guard(call.device.device_id);
  Raise("silu_mul", cuda::SiluMul(from, call.type, rows, columns, to, StreamOf(call.device)));
}

// Reads x, out.
void RunBrokenRows(ArgumentReader args) {
  const TensorView x = args.Tensor("x"), out = args.Tensor("out");
  const Call call(x, "x");
  const cuda::Rows from = call.Rows(x, "x", -1, -1);
  const int64_t rows = x.size(0), columns = x.size(1);
  uint8_t* to = Vector<uint8_t>(out, "out", kUInt8, rows, call.device);
  const tvm::ffi::CUDADeviceGuard guard(call.device.device_id);
  Raise("broken_rows", cuda::BrokenRows(from, call.type, rows, columns, to, StreamOf(call.device)));
}

}  // namespace
}  // namespace baton_ops

BATON_EXPORT_CUDA(cuda_embed, 3, RunEmbed)
BATON_EXPORT_CUDA(cuda_gather, 3, RunGather)
BATON_EXPORT_CUDA(cuda_add_norm, 5, RunAddNorm)
BATON_EXPORT_CUDA(cuda_rope_store, 14, RunRopeStore)
BATON_EXPORT_CUDA(cuda_silu_mul, 2, RunSiluMul)
BATON_EXPORT_CUDA(cuda_broken_rows, 2, RunBrokenRows)
