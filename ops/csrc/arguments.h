// Named arguments of an exported function, checked one by one: every error names the argument.
#ifndef BATON_OPS_CSRC_ARGUMENTS_H_
#define BATON_OPS_CSRC_ARGUMENTS_H_

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>

#include <cstdint>
#include <optional>

namespace baton_ops {

using tvm::ffi::PackedArgs;
using tvm::ffi::TensorView;

constexpr DLDataType kInt32{kDLInt, 32, 1};
constexpr DLDataType kUInt8{kDLUInt, 8, 1};
constexpr DLDataType kInt64{kDLInt, 64, 1};
constexpr DLDataType kBFloat16{kDLBfloat, 16, 1};
constexpr DLDataType kFloat32{kDLFloat, 32, 1};
constexpr DLDataType kFloat64{kDLFloat, 64, 1};

// Hands out positional arguments in order. Raises TypeError for a wrong kind.
class ArgumentReader {
 public:
  ArgumentReader(const tvm::ffi::AnyView* args, int32_t count, int32_t expected);
  TensorView Tensor(const char* name);
  std::optional<TensorView> OptionalTensor(const char* name);
  int64_t Int(const char* name);
  double Float(const char* name);

 private:
  const tvm::ffi::AnyView* args_;
  int32_t next_ = 0;
};

// A tensor with its name, for checks that chain. Each raises TypeError or ValueError.
class Checked {
 public:
  Checked(const TensorView& tensor, const char* name) : tensor_(tensor), name_(name) {}

  const Checked& HasDtype(DLDataType dtype) const;
  const Checked& HasRank(int32_t rank) const;
  const Checked& HasSize(int32_t axis, int64_t size) const;
  const Checked& HasSizeAtLeast(int32_t axis, int64_t size) const;
  const Checked& IsContiguous() const;
  // Unit stride in the last of two dimensions; any non-overlapping stride between rows.
  const Checked& HasDenseRows() const;
  const Checked& IsOn(DLDevice device) const;

  template <typename T>
  T* Data() const {
    return reinterpret_cast<T*>(static_cast<char*>(tensor_.data_ptr()) + tensor_.byte_offset());
  }

 private:
  const TensorView& tensor_;
  const char* name_;
};

// A contiguous vector of `size` elements on `device`.
template <typename T>
T* Vector(const TensorView& tensor, const char* name, DLDataType dtype, int64_t size,
          DLDevice device) {
  const Checked checked(tensor, name);
  checked.HasDtype(dtype).HasRank(1).HasSize(0, size).IsContiguous().IsOn(device);
  return checked.Data<T>();
}

// As Vector, or null for an absent tensor.
template <typename T>
T* OptionalVector(const std::optional<TensorView>& tensor, const char* name, DLDataType dtype,
                  int64_t size, DLDevice device) {
  return tensor ? Vector<T>(*tensor, name, dtype, size, device) : nullptr;
}

// An output vector of at least `size` elements.
template <typename T>
T* Output(const TensorView& tensor, const char* name, DLDataType dtype, int64_t size,
          DLDevice device) {
  const Checked checked(tensor, name);
  checked.HasDtype(dtype).HasRank(1).HasSizeAtLeast(0, size).IsContiguous().IsOn(device);
  return checked.Data<T>();
}

// Raises ValueError unless lowest <= value <= highest.
void CheckRange(const char* name, int64_t index, int64_t value, int64_t lowest, int64_t highest);

}  // namespace baton_ops

#endif  // BATON_OPS_CSRC_ARGUMENTS_H_
