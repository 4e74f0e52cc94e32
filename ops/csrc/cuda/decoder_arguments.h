// Arguments that the decoder's ops share: rows of elements, the paged pool. Errors name them.
#ifndef BATON_OPS_CSRC_CUDA_DECODER_ARGUMENTS_H_
#define BATON_OPS_CSRC_CUDA_DECODER_ARGUMENTS_H_

#include <tvm/ffi/dtype.h>
#include <tvm/ffi/error.h>

#include "arguments.h"
#include "decoder.h"
#include "export_support.h"

namespace baton_ops {

inline DLDataType DtypeOf(cuda::ElementType type) {
  return type == cuda::ElementType::kFloat32 ? kFloat32 : kBFloat16;
}

inline cuda::ElementType ElementTypeOf(const TensorView& tensor, const char* name) {
  const DLDataType dtype = tensor.dtype();
  const auto is = [&](DLDataType wanted) {
    return dtype.code == wanted.code && dtype.bits == wanted.bits && dtype.lanes == wanted.lanes;
  };
  if (is(kFloat32)) return cuda::ElementType::kFloat32;
  if (is(kBFloat16)) return cuda::ElementType::kBFloat16;
  TVM_FFI_THROW(TypeError) << name << " must be bfloat16 or float32, got "
                           << tvm::ffi::DLDataTypeToString(dtype);
}

// Type and device of a call, as its first tensor has them.
struct Call {
  DLDevice device;
  cuda::ElementType type;

  Call(const TensorView& first, const char* name) : device(first.device()), type{} {
    RequireCuda(first, name);
    type = ElementTypeOf(first, name);
  }

  // A matrix of the call's type, its rows at any distance; -1: any size.
  cuda::Rows Rows(const TensorView& tensor, const char* name, int64_t rows, int64_t columns) const {
    return RowsOf(tensor, name, DtypeOf(type), rows, columns);
  }

  cuda::Rows RowsOf(const TensorView& tensor, const char* name, DLDataType dtype, int64_t rows,
                    int64_t columns) const {
    const Checked checked(tensor, name);
    checked.HasDtype(dtype).HasRank(2);
    if (rows >= 0) checked.HasSize(0, rows);
    if (columns >= 0) checked.HasSize(1, columns);
    checked.HasDenseRows().IsOn(device);
    const bool is_one = tensor.size(0) <= 1;  // whose stride means nothing
    return {checked.Data<void>(), is_one ? tensor.size(1) : tensor.stride(0)};
  }

  template <typename T>
  T* Ints(const TensorView& tensor, const char* name, int64_t size) const {
    return Vector<T>(tensor, name, kInt32, size, device);
  }

  // A contiguous [rows, heads, head_dim].
  void* Heads(const TensorView& tensor, const char* name, int64_t rows, int64_t heads,
              int64_t head_dim) const {
    const Checked checked(tensor, name);
    checked.HasDtype(DtypeOf(type)).HasRank(3).HasSize(0, rows).HasSize(1, heads);
    checked.HasSize(2, head_dim).IsContiguous().IsOn(device);
    return checked.Data<void>();
  }

  cuda::KvPool Pool(const TensorView& kv) const {
    const Checked checked(kv, "kv");
    checked.HasDtype(DtypeOf(type)).HasRank(6).HasSizeAtLeast(0, 2).HasSize(2, 2);
    checked.HasSizeAtLeast(3, 1).HasSizeAtLeast(4, 1).IsContiguous().IsOn(device);
    return {checked.Data<void>(), kv.size(0), kv.size(1), kv.size(3), kv.size(4), kv.size(5)};
  }

  // A pool of rows that all heads share: one part, one head.
  cuda::KvPool RowPool(const TensorView& kv) const {
    const Checked checked(kv, "kv");
    checked.HasDtype(DtypeOf(type)).HasRank(6).HasSizeAtLeast(0, 2).HasSize(2, 1).HasSize(3, 1);
    checked.HasSizeAtLeast(4, 1).IsContiguous().IsOn(device);
    return {checked.Data<void>(), kv.size(0), kv.size(1), 1, kv.size(4), kv.size(5)};
  }

  // i32[sequences, width] of blocks; the sizes are the table's own.
  const int32_t* Tables(const TensorView& tables) const {
    const Checked checked(tables, "tables");
    checked.HasDtype(kInt32).HasRank(2).IsContiguous().IsOn(device);
    return checked.Data<const int32_t>();
  }
};

// Reads cos, sin, is_interleaved: angles for heads of which so many elements rotate.
template <class Input>
void ReadAngles(ArgumentReader* args, const Call& call, int64_t head_dim, Input* in) {
  const TensorView cos = args->Tensor("cos"), sin = args->Tensor("sin");
  Checked(cos, "cos").HasRank(2).HasSizeAtLeast(0, 1);
  in->positions = cos.size(0);
  in->cos = Matrix<const float>(cos, "cos", kFloat32, in->positions, head_dim / 2, call.device);
  in->sin = Matrix<const float>(sin, "sin", kFloat32, in->positions, head_dim / 2, call.device);
  in->interleaved = args->Int("is_interleaved") != 0;
}

// A norm of the rows of `residual`, to which nothing is added yet.
inline cuda::AddNormInput ReadNorm(const Call& call, const TensorView& residual,
                                   const TensorView& weight, const char* name, double eps) {
  cuda::AddNormInput in{};
  in.eps = static_cast<float>(eps);
  in.type = call.type;
  in.residual = call.Rows(residual, "residual", -1, -1);
  in.rows = residual.size(0);
  in.columns = residual.size(1);
  in.weight = Vector<const void>(weight, name, DtypeOf(call.type), in.columns, call.device);
  return in;
}

// Reads sequence, position, tables.
template <class Input>
void ReadPlaces(ArgumentReader* args, const Call& call, Input* in) {
  const TensorView sequence = args->Tensor("sequence"), position = args->Tensor("position");
  const TensorView tables = args->Tensor("tables");
  in->sequence = call.Ints<const int32_t>(sequence, "sequence", in->tokens);
  in->position = call.Ints<const int32_t>(position, "position", in->tokens);
  in->tables = call.Tables(tables);
  in->sequences = tables.size(0);
  in->width = tables.size(1);
}

inline int64_t LayerOf(int64_t layer, const cuda::KvPool& pool) {
  if (layer >= 0 && layer < pool.layers) return layer;
  TVM_FFI_THROW(ValueError) << "layer must be in [0, " << pool.layers << "), got " << layer;
}

struct Attending {
  Call call;
  cuda::AttendInput input;
};

// Reads query, kv, layer, tables, contexts, scale. `rows`: the pool is of rows that all heads
// share.
inline Attending ReadAttending(ArgumentReader* args, bool rows) {
  const TensorView query = args->Tensor("query"), kv = args->Tensor("kv");
  const int64_t layer = args->Int("layer");
  const TensorView tables = args->Tensor("tables"), contexts = args->Tensor("contexts");
  Attending read{Call(query, "query"), {}};
  const Call& call = read.call;
  cuda::AttendInput& in = read.input;
  in.scale = static_cast<float>(args->Float("scale"));
  in.type = call.type;
  in.pool = rows ? call.RowPool(kv) : call.Pool(kv);
  in.layer = LayerOf(layer, in.pool);
  Checked(query, "query").HasRank(3);
  in.tokens = query.size(0);
  in.heads = query.size(1);
  in.query = call.Heads(query, "query", in.tokens, in.heads, in.pool.head_dim);
  in.tables = call.Tables(tables);
  in.sequences = tables.size(0);
  in.width = tables.size(1);
  in.contexts = call.Ints<const int32_t>(contexts, "contexts", in.sequences);
  if (in.heads % in.pool.heads != 0) {
    TVM_FFI_THROW(ValueError) << "query.shape[1] must be a multiple of kv.shape[3] ("
                              << in.pool.heads << "), got " << in.heads;
  }
  if (in.sequences == 0 ? in.tokens != 0 : in.tokens % in.sequences != 0) {
    TVM_FFI_THROW(ValueError) << "query.shape[0] must be a multiple of tables.shape[0] ("
                              << in.sequences << "), got " << in.tokens;
  }
  return read;
}

}  // namespace baton_ops

#endif  // BATON_OPS_CSRC_CUDA_DECODER_ARGUMENTS_H_
