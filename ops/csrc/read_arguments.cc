#include "read_arguments.h"

#include <tvm/ffi/error.h>

#include <limits>

#include "baton_ops/cpu/read_rows.h"
#include "baton_ops/cpu/settings.h"

namespace baton_ops {
namespace {

using cpu::Number;

constexpr DLDataType kUInt16{kDLUInt, 16, 1};
constexpr int64_t kMost = std::numeric_limits<int64_t>::max() / 8;

int64_t Within(ArgumentReader& args, const char* name, int64_t lowest, int64_t highest) {
  const int64_t value = args.Int(name);
  if (value < lowest || value > highest) {
    TVM_FFI_THROW(ValueError) << name << " must be in [" << lowest << ", " << highest << "], got "
                              << value;
  }
  return value;
}

cpu::StoredRows CheckRows(ArgumentReader& args) {
  cpu::StoredRows rows{};
  rows.descriptor =
      static_cast<int>(Within(args, "descriptor", 0, std::numeric_limits<int>::max()));
  rows.offset = Within(args, "offset", 0, kMost);
  rows.rows = Within(args, "rows", 1, kMost);
  rows.row_items = Within(args, "row_items", 1, kMost / rows.rows);
  const int64_t pitch = args.Int("pitch_bytes");
  rows.stored = static_cast<Number>(Within(args, "stored", 0, 3));
  rows.pitch_bytes = pitch;
  const int64_t least = rows.row_items * cpu::SizeOf(rows.stored);
  if (pitch < least) {
    TVM_FFI_THROW(ValueError) << "pitch_bytes must be at least a row's " << least << ", got "
                              << pitch;
  }
  if (pitch > kMost / rows.rows) {
    TVM_FFI_THROW(ValueError) << "pitch_bytes must be at most " << kMost / rows.rows << " for "
                              << rows.rows << " rows, got " << pitch;
  }
  return rows;
}

Number CheckOut(const TensorView& out, const cpu::StoredRows& rows) {
  const DLDataType type = out.dtype();
  const bool is_e4m3 = rows.stored == Number::kE4m3;
  const Checked checked(out, "out");
  Number wanted = Number::kE4m3;
  if (is_e4m3) {
    checked.HasDtype(kUInt8);
  } else if (type.code == kDLFloat) {
    checked.HasDtype(kFloat32);
    wanted = Number::kFloat32;
  } else {
    checked.HasDtype(kUInt16);
    wanted = Number::kBFloat16;
  }
  checked.HasRank(1).HasSize(0, rows.rows * rows.row_items).IsContiguous();
  return wanted;
}

}  // namespace

void RunReadRows(ArgumentReader args) {
  const cpu::StoredRows rows = CheckRows(args);
  const int64_t block_bytes = Within(args, "block_bytes", 1, kMost);
  const int64_t threads = Within(args, "threads", 1, cpu::kMaxThreads);
  const TensorView out = args.Tensor("out");
  const TensorView told = args.Tensor("told");
  const DLDevice host{kDLCPU, 0};
  const Checked checked(out, "out");
  checked.IsOn(host);
  const Number wanted = CheckOut(out, rows);
  int64_t* outcome = Vector<int64_t>(told, "told", kInt64, 3, host);
  const cpu::ReadOutcome found =
      cpu::ReadRows(rows, wanted, checked.Data<void>(), block_bytes, static_cast<int>(threads));
  outcome[0] = found.error;
  outcome[1] = found.at;
  outcome[2] = found.is_finite ? 1 : 0;
}

}  // namespace baton_ops
