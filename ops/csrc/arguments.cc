#include "arguments.h"

#include <tvm/ffi/dtype.h>
#include <tvm/ffi/error.h>

namespace baton_ops {

using tvm::ffi::AnyView;
using tvm::ffi::DLDataTypeToString;

ArgumentReader::ArgumentReader(const AnyView* args, int32_t count, int32_t expected) : args_(args) {
  if (count != expected) {
    TVM_FFI_THROW(TypeError) << "expected " << expected << " arguments, got " << count;
  }
}

TensorView ArgumentReader::Tensor(const char* name) {
  const AnyView& arg = args_[next_++];
  const std::optional<TensorView> tensor = arg.try_cast<TensorView>();
  if (!tensor) TVM_FFI_THROW(TypeError) << name << " must be a tensor, got " << arg.GetTypeKey();
  return *tensor;
}

std::optional<TensorView> ArgumentReader::OptionalTensor(const char* name) {
  if (args_[next_] == nullptr) {
    ++next_;
    return std::nullopt;
  }
  return Tensor(name);
}

int64_t ArgumentReader::Int(const char* name) {
  const AnyView& arg = args_[next_++];
  const std::optional<int64_t> value = arg.try_cast<int64_t>();
  if (!value) TVM_FFI_THROW(TypeError) << name << " must be an int, got " << arg.GetTypeKey();
  return *value;
}

double ArgumentReader::Float(const char* name) {
  const AnyView& arg = args_[next_++];
  const std::optional<double> value = arg.try_cast<double>();
  if (!value) TVM_FFI_THROW(TypeError) << name << " must be a number, got " << arg.GetTypeKey();
  return *value;
}

const Checked& Checked::HasDtype(DLDataType dtype) const {
  const DLDataType got = tensor_.dtype();
  if (got.code != dtype.code || got.bits != dtype.bits || got.lanes != dtype.lanes) {
    TVM_FFI_THROW(TypeError) << name_ << " must be " << DLDataTypeToString(dtype) << ", got "
                             << DLDataTypeToString(got);
  }
  return *this;
}

const Checked& Checked::HasRank(int32_t rank) const {
  if (tensor_.ndim() != rank) {
    TVM_FFI_THROW(ValueError) << name_ << " must have " << rank << " dimensions, got "
                              << tensor_.ndim();
  }
  return *this;
}

const Checked& Checked::HasSize(int32_t axis, int64_t size) const {
  if (tensor_.size(axis) != size) {
    TVM_FFI_THROW(ValueError) << name_ << ".shape[" << axis << "] must be " << size << ", got "
                              << tensor_.size(axis);
  }
  return *this;
}

const Checked& Checked::HasSizeAtLeast(int32_t axis, int64_t size) const {
  if (tensor_.size(axis) < size) {
    TVM_FFI_THROW(ValueError) << name_ << ".shape[" << axis << "] must be at least " << size
                              << ", got " << tensor_.size(axis);
  }
  return *this;
}

const Checked& Checked::IsContiguous() const {
  // Older releases of tvm-ffi take an empty tensor's strides at their word.
  if (tensor_.numel() != 0 && !tensor_.IsContiguous()) {
    TVM_FFI_THROW(ValueError) << name_ << " must be contiguous";
  }
  return *this;
}

const Checked& Checked::HasDenseRows() const {
  if (tensor_.size(0) == 0 || tensor_.size(1) == 0) return *this;
  if (tensor_.size(1) > 1 && tensor_.stride(1) != 1) {
    TVM_FFI_THROW(ValueError) << name_ << " must have unit stride in its last dimension, got "
                              << tensor_.stride(1);
  }
  if (tensor_.size(0) > 1 && tensor_.stride(0) < tensor_.size(1)) {
    TVM_FFI_THROW(ValueError) << name_ << " must have a row stride of at least " << tensor_.size(1)
                              << ", got " << tensor_.stride(0);
  }
  return *this;
}

const Checked& Checked::IsOn(DLDevice device) const {
  const DLDevice got = tensor_.device();
  if (got.device_type != device.device_type || got.device_id != device.device_id) {
    TVM_FFI_THROW(ValueError) << name_ << " must be on the device of the first argument (type "
                              << device.device_type << ", id " << device.device_id << "), got type "
                              << got.device_type << ", id " << got.device_id;
  }
  return *this;
}

void CheckRange(const char* name, int64_t index, int64_t value, int64_t lowest, int64_t highest) {
  if (value < lowest || value > highest) {
    TVM_FFI_THROW(ValueError) << name << "[" << index << "] must be in [" << lowest << ", "
                              << highest << "], got " << value;
  }
}

}  // namespace baton_ops
