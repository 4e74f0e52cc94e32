// Exports of the ops of multi-head latent attention.
#include <algorithm>
#include <limits>

#include "decoder_arguments.h"
#include "latent.h"

namespace baton_ops {
namespace {

constexpr int64_t kMostColumns = std::numeric_limits<int32_t>::max() / 2;

// Heads' matrices: sets kv_rank and value_size of sizes whose heads and nope_size are known.
const void* ReadMatrices(const TensorView& kv_up, const Call& call, cuda::LatentSizes* sizes) {
  Checked(kv_up, "kv_up").HasRank(2);
  const int64_t rows = kv_up.size(0), heads = std::max<int64_t>(sizes->heads, 1);
  sizes->kv_rank = kv_up.size(1);
  if (rows % heads != 0) {
    TVM_FFI_THROW(ValueError) << "kv_up.shape[0] must be a multiple of the " << sizes->heads
                              << " heads, got " << rows;
  }
  CheckRange("nope_size", 0, sizes->nope_size, 0, rows / heads);
  sizes->value_size = rows / heads - sizes->nope_size;
  return Matrix<const void>(kv_up, "kv_up", DtypeOf(call.type), rows, sizes->kv_rank, call.device);
}

// Reads queries, kv_up, nope_size, out.
void RunFold(ArgumentReader args) {
  const TensorView queries = args.Tensor("queries"), kv_up = args.Tensor("kv_up");
  const int64_t nope_size = args.Int("nope_size");
  const TensorView out = args.Tensor("out");
  const Call call(queries, "queries");
  cuda::HeadProductInput in{};
  in.type = call.type;
  Checked(out, "out").HasRank(3);
  in.tokens = out.size(0);
  in.sizes.heads = out.size(1);
  in.sizes.nope_size = nope_size;
  in.kv_up = ReadMatrices(kv_up, call, &in.sizes);
  CheckRange("out.shape", 2, out.size(2), in.sizes.kv_rank, kMostColumns);
  in.sizes.rope_size = out.size(2) - in.sizes.kv_rank;
  const int64_t columns = in.sizes.heads * (nope_size + in.sizes.rope_size);
  in.x = call.Rows(queries, "queries", in.tokens, columns);
  void* to = call.Heads(out, "out", in.tokens, in.sizes.heads, out.size(2));
  const tvm::ffi::CUDADeviceGuard guard(call.device.device_id);
  Raise("fold_queries", cuda::FoldQueries(in, to, StreamOf(call.device)));
}

// Reads attended, kv_up, nope_size, out.
void RunUnfold(ArgumentReader args) {
  const TensorView attended = args.Tensor("attended"), kv_up = args.Tensor("kv_up");
  const int64_t nope_size = args.Int("nope_size");
  const TensorView out = args.Tensor("out");
  const Call call(attended, "attended");
  cuda::HeadProductInput in{};
  in.type = call.type;
  Checked(attended, "attended").HasRank(3);
  in.tokens = attended.size(0);
  in.sizes.heads = attended.size(1);
  in.sizes.nope_size = nope_size;
  in.kv_up = ReadMatrices(kv_up, call, &in.sizes);
  const int64_t heads = in.sizes.heads, rank = in.sizes.kv_rank;
  in.x = {call.Heads(attended, "attended", in.tokens, heads, rank), heads * rank};
  const cuda::Rows to = call.Rows(out, "out", in.tokens, heads * in.sizes.value_size);
  const tvm::ffi::CUDADeviceGuard guard(call.device.device_id);
  Raise("unfold_values", cuda::UnfoldValues(in, to, StreamOf(call.device)));
}

void CheckEven(const char* name, int64_t size) {
  if (size % 2 != 0) TVM_FFI_THROW(ValueError) << name << " must be even, got " << size;
}

// Reads queries, query, rope_size, and what ReadAngles and ReadPlaces do.
void RunRotate(ArgumentReader args) {
  const TensorView queries = args.Tensor("queries"), query = args.Tensor("query");
  const int64_t rope_size = args.Int("rope_size");
  const Call call(queries, "queries");
  cuda::RotateQueriesInput in{};
  in.type = call.type;
  Checked(query, "query").HasRank(3);
  in.places.tokens = query.size(0);
  in.sizes.heads = query.size(1);
  in.sizes.rope_size = rope_size;
  CheckRange("rope_size", 0, rope_size, 0, query.size(2));
  CheckEven("rope_size", rope_size);
  in.sizes.kv_rank = query.size(2) - rope_size;
  in.queries = call.Rows(queries, "queries", in.places.tokens, -1);
  const int64_t columns = queries.size(1), heads = std::max<int64_t>(in.sizes.heads, 1);
  if (columns % heads != 0) {
    TVM_FFI_THROW(ValueError) << "queries.shape[1] must be a multiple of the " << in.sizes.heads
                              << " heads, got " << columns;
  }
  CheckRange("queries.shape", 1, columns, heads * rope_size, kMostColumns);
  in.sizes.nope_size = columns / heads - rope_size;
  void* to = call.Heads(query, "query", in.places.tokens, in.sizes.heads, query.size(2));
  ReadAngles(&args, call, rope_size, &in.places);
  ReadPlaces(&args, call, &in.places);
  const tvm::ffi::CUDADeviceGuard guard(call.device.device_id);
  Raise("rotate_queries", cuda::RotateQueries(in, to, StreamOf(call.device)));
}

// Reads row, kv, layer, norm, eps, and what ReadAngles and ReadPlaces do.
void RunStore(ArgumentReader args) {
  const TensorView row = args.Tensor("row"), kv = args.Tensor("kv");
  const int64_t layer = args.Int("layer");
  const TensorView norm = args.Tensor("norm");
  const Call call(row, "row");
  cuda::StoreRowsInput in{};
  in.eps = static_cast<float>(args.Float("eps"));
  in.type = call.type;
  in.pool = call.RowPool(kv);
  in.layer = LayerOf(layer, in.pool);
  Checked(norm, "norm").HasRank(1);
  in.kv_rank = norm.size(0);
  CheckRange("norm.shape", 0, in.kv_rank, 1, in.pool.head_dim);
  in.norm = Vector<const void>(norm, "norm", DtypeOf(call.type), in.kv_rank, call.device);
  in.rope_size = in.pool.head_dim - in.kv_rank;
  CheckEven("kv.shape[5] less norm.shape[0]", in.rope_size);
  in.row = call.Rows(row, "row", -1, in.pool.head_dim);
  in.places.tokens = row.size(0);
  ReadAngles(&args, call, in.rope_size, &in.places);
  ReadPlaces(&args, call, &in.places);
  const tvm::ffi::CUDADeviceGuard guard(call.device.device_id);
  Raise("store_rows", cuda::StoreRows(in, StreamOf(call.device)));
}

// Reads what ReadAttending does, out, scratch.
void RunAttendRows(ArgumentReader args) {
  const Attending read = ReadAttending(&args, true);
  const TensorView out = args.Tensor("out"), scratch = args.Tensor("scratch");
  const cuda::AttendInput& in = read.input;
  Checked(out, "out").HasRank(3);
  const int64_t value_dim = out.size(2);
  CheckRange("out.shape", 2, value_dim, 1, in.pool.head_dim);
  void* to = read.call.Heads(out, "out", in.tokens, in.heads, value_dim);
  uint8_t* bytes = Output<uint8_t>(scratch, "scratch", kUInt8, 0, read.call.device);
  const cuda::Workspace workspace{bytes, static_cast<size_t>(scratch.numel())};
  const tvm::ffi::CUDADeviceGuard guard(read.call.device.device_id);
  Raise("attend_rows",
        cuda::RowAttention(in, value_dim, to, workspace, StreamOf(read.call.device)));
}

}  // namespace
}  // namespace baton_ops

BATON_EXPORT_CUDA(cuda_fold_queries, 4, RunFold)
BATON_EXPORT_CUDA(cuda_unfold_values, 4, RunUnfold)
BATON_EXPORT_CUDA(cuda_rotate_queries, 9, RunRotate)
BATON_EXPORT_CUDA(cuda_store_rows, 11, RunStore)
BATON_EXPORT_CUDA(cuda_attend_rows, 8, RunAttendRows)
