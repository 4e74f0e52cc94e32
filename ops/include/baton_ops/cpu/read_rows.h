// Rows of numbers from a file to memory, converted on the way, by several threads.
#ifndef BATON_OPS_CPU_READ_ROWS_H_
#define BATON_OPS_CPU_READ_ROWS_H_

#include <cstdint>

namespace baton_ops::cpu {

enum class Number : int64_t { kE4m3 = 0, kBFloat16 = 1, kFloat16 = 2, kFloat32 = 3 };

constexpr int64_t SizeOf(Number number) {
  return number == Number::kE4m3 ? 1 : number == Number::kFloat32 ? 4 : 2;
}

// Where rows lie: each of `row_items` numbers without gaps, `pitch_bytes` from one to the next.
struct StoredRows {
  int descriptor;
  int64_t offset;
  int64_t rows;
  int64_t row_items;
  int64_t pitch_bytes;
  Number stored;
};

constexpr int kNoError = 0;
constexpr int kEndOfFile = -1;

struct ReadOutcome {
  int error;       // kNoError, kEndOfFile or an errno
  int64_t at;      // the byte of the file at which the first failure was
  bool is_finite;  // of all numbers, as they were written
};

// Writes rows to `out` without gaps, as `wanted`: e4m3 as it is stored, others as bfloat16 or
// float32. Widening is exact; bfloat16 is rounded to nearest, ties to even, a NaN stays one. About
// `block_bytes` are read at a time, by at most `threads` threads, the caller's among them, each of
// which keeps as much memory where it converts. What is stored as it is wanted, and lies without
// gaps, is read straight to its place. `out` is undefined behind a failure, which is ENOMEM where
// there is no memory to convert through.
ReadOutcome ReadRows(const StoredRows& rows, Number wanted, void* out, int64_t block_bytes,
                     int threads);

}  // namespace baton_ops::cpu

#endif  // BATON_OPS_CPU_READ_ROWS_H_
