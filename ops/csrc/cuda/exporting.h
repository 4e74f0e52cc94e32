// What exports of CUDA ops share: where a tensor must be, the caller's stream, errors that name the
// op.
#ifndef BATON_OPS_CSRC_CUDA_EXPORTING_H_
#define BATON_OPS_CSRC_CUDA_EXPORTING_H_

#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/extra/cuda/device_guard.h>
#include <tvm/ffi/function.h>

#include "arguments.h"
#include "launch.h"

namespace baton_ops {

inline void RequireCuda(const TensorView& tensor, const char* name) {
  if (tensor.device().device_type == kDLCUDA) return;
  TVM_FFI_THROW(ValueError) << name << " must be on a CUDA device, got device type "
                            << tensor.device().device_type;
}

inline void* StreamOf(DLDevice device) {
  return TVMFFIEnvGetStream(device.device_type, device.device_id);
}

inline void Raise(const char* op, cuda::Error error) {
  if (error) TVM_FFI_THROW(RuntimeError) << op << " failed: " << error;
}

// A contiguous matrix.
template <typename T>
T* Matrix(const TensorView& tensor, const char* name, DLDataType dtype, int64_t rows,
          int64_t columns, DLDevice device) {
  const Checked checked(tensor, name);
  checked.HasDtype(dtype).HasRank(2).HasSize(0, rows).HasSize(1, columns);
  checked.IsContiguous().IsOn(device);
  return checked.Data<T>();
}

}  // namespace baton_ops

// Exports a function over an ArgumentReader, which names arguments.
#define BATON_EXPORT_CUDA(name, arguments, function)                                              \
  extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_##name(void*, const TVMFFIAny* args, int32_t count, \
                                                     TVMFFIAny*) {                                \
    TVM_FFI_SAFE_CALL_BEGIN();                                                                    \
    const auto* views = reinterpret_cast<const tvm::ffi::AnyView*>(args);                         \
    baton_ops::function(baton_ops::ArgumentReader(views, count, arguments));                      \
    TVM_FFI_SAFE_CALL_END();                                                                      \
  }

#endif  // BATON_OPS_CSRC_CUDA_EXPORTING_H_
