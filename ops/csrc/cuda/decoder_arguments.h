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

  // i32[sequences, width] of blocks; the sizes are the table's own.
  const int32_t* Tables(const TensorView& tables) const {
    const Checked checked(tables, "tables");
    checked.HasDtype(kInt32).HasRank(2).IsContiguous().IsOn(device);
    return checked.Data<const int32_t>();
  }
};

inline int64_t LayerOf(int64_t layer, const cuda::KvPool& pool) {
  if (layer >= 0 && layer < pool.layers) return layer;
  TVM_FFI_THROW(ValueError) << "layer must be in [0, " << pool.layers << "), got " << layer;
}

}  // namespace baton_ops

#endif  // BATON_OPS_CSRC_CUDA_DECODER_ARGUMENTS_H_
