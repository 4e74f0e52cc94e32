#include "baton_ops/cpu/read_rows.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "baton_ops/cpu/pool.h"

namespace baton_ops::cpu {
namespace {

constexpr int kHalves = 1 << 16;

uint32_t BitsOf(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

uint16_t RoundedBits(uint32_t bits) {
  const uint32_t nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  const bool is_nan = (bits & 0x7FFFFFFF) > 0x7F800000;  // its low bits may carry into infinity
  return static_cast<uint16_t>(is_nan ? (bits >> 16) | 0x40 : nearest);
}

float ValueOfHalf(int half) {
  const int exponent = (half >> 10) & 31, mantissa = half & 1023;
  float value = std::ldexp(static_cast<float>(exponent ? mantissa | 1024 : mantissa),
                           (exponent ? exponent : 1) - 25);
  if (exponent == 31) {
    value =
        mantissa ? std::numeric_limits<float>::quiet_NaN() : std::numeric_limits<float>::infinity();
  }
  return half & 0x8000 ? -value : value;
}

// What each float16 is in the other two forms. Looked up: a conversion by value would depend on
// whether the thread flushes denormals.
struct OfHalf {
  std::vector<float> wide;
  std::vector<uint16_t> rounded;

  OfHalf() : wide(kHalves), rounded(kHalves) {
    for (int half = 0; half < kHalves; ++half) {
      wide[half] = ValueOfHalf(half);
      rounded[half] = RoundedBits(BitsOf(wide[half]));
    }
  }
};

// Never freed: threads may read while the process exits.
const OfHalf& Halves() {
  static const OfHalf& halves = *new OfHalf;
  return halves;
}

// What a thread converts through: it grows to the largest block that the thread has taken.
class Through {
 public:
  // Null if there is no memory: nothing may be thrown in a thread of the pool.
  uint8_t* Of(int64_t bytes) {
    if (bytes > bytes_) {
      memory_.reset(new (std::nothrow) uint8_t[static_cast<size_t>(bytes)]);
      bytes_ = memory_ ? bytes : 0;
    }
    return memory_.get();
  }

 private:
  std::unique_ptr<uint8_t[]> memory_;
  int64_t bytes_ = 0;
};

void Convert(const uint8_t* from, Number stored, Number wanted, int64_t count, uint8_t* to) {
  if (stored == wanted) {
    std::memcpy(to, from, count * SizeOf(stored));
    return;
  }
  const auto* halves = reinterpret_cast<const uint16_t*>(from);
  auto* narrow = reinterpret_cast<uint16_t*>(to);
  auto* wide = reinterpret_cast<uint32_t*>(to);
  if (stored == Number::kFloat32) {
    const auto* bits = reinterpret_cast<const uint32_t*>(from);
    for (int64_t i = 0; i < count; ++i) narrow[i] = RoundedBits(bits[i]);
  } else if (stored == Number::kBFloat16) {
    for (int64_t i = 0; i < count; ++i) wide[i] = uint32_t{halves[i]} << 16;
  } else if (wanted == Number::kBFloat16) {
    const uint16_t* rounded = Halves().rounded.data();
    for (int64_t i = 0; i < count; ++i) narrow[i] = rounded[halves[i]];
  } else {
    const float* values = Halves().wide.data();
    for (int64_t i = 0; i < count; ++i) std::memcpy(wide + i, values + halves[i], sizeof(float));
  }
}

template <typename T>
bool AreBelow(const uint8_t* at, int64_t count, T exponent) {
  const T* bits = reinterpret_cast<const T*>(at);
  T found = 0;
  for (int64_t i = 0; i < count; ++i) {
    found = static_cast<T>(found | ((bits[i] & exponent) == exponent ? 1 : 0));
  }
  return found == 0;
}

// e4m3 has no infinity, and one NaN of each sign.
bool AreFinite(const uint8_t* at, Number number, int64_t count) {
  if (number == Number::kE4m3) return AreBelow<uint8_t>(at, count, 0x7F);
  if (number == Number::kFloat32) return AreBelow<uint32_t>(at, count, 0x7F800000);
  return AreBelow<uint16_t>(at, count, 0x7F80);
}

class Read {
 public:
  Read(const StoredRows& rows, Number wanted, uint8_t* out, int64_t block_bytes)
      : rows_(rows),
        wanted_(wanted),
        out_(out),
        size_(SizeOf(rows.stored)),
        has_gaps_(rows.pitch_bytes != rows.row_items * size_),
        units_(has_gaps_ ? rows.rows : rows.rows * rows.row_items),
        unit_items_(has_gaps_ ? rows.row_items : 1),
        unit_bytes_(has_gaps_ ? rows.pitch_bytes : size_),
        step_(std::max<int64_t>(block_bytes / unit_bytes_, 1)) {}

  int64_t blocks() const { return (units_ + step_ - 1) / step_; }

  // Blocks are begun in their order. One behind a failure is left out, one before it is not: so the
  // first of those that fail is always told.
  void Take(int64_t block) {
    thread_local Through through;
    if (block <= failed_.load(std::memory_order_relaxed)) One(block, &through);
  }

  ReadOutcome outcome() const { return {error_, at_, is_finite_.load()}; }

 private:
  void One(int64_t block, Through* through) {
    const int64_t first = block * step_, count = std::min(step_, units_ - first);
    const int64_t span = (count - 1) * unit_bytes_ + unit_items_ * size_;
    uint8_t* to = out_ + first * unit_items_ * SizeOf(wanted_);
    const bool is_straight = !has_gaps_ && rows_.stored == wanted_;
    const int64_t at = rows_.offset + first * unit_bytes_;
    uint8_t* from = is_straight ? to : through->Of(span);
    if (from == nullptr) {
      Fail(ENOMEM, at, block);
      return;
    }
    if (!All(at, span, from, block)) return;
    if (!is_straight) Place(from, count, to);
    if (!AreFinite(to, wanted_, count * unit_items_)) is_finite_.store(false);
  }

  void Place(const uint8_t* from, int64_t count, uint8_t* to) const {
    if (!has_gaps_) return Convert(from, rows_.stored, wanted_, count, to);
    const int64_t row_bytes = unit_items_ * SizeOf(wanted_);
    for (int64_t row = 0; row < count; ++row) {
      Convert(from + row * unit_bytes_, rows_.stored, wanted_, unit_items_, to + row * row_bytes);
    }
  }

  bool All(int64_t at, int64_t left, uint8_t* to, int64_t block) {
    while (left > 0) {
      const ssize_t got = pread(rows_.descriptor, to, left, at);
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) return Fail(got < 0 ? errno : kEndOfFile, at, block);
      at += got;
      to += got;
      left -= got;
    }
    return true;
  }

  bool Fail(int error, int64_t at, int64_t block) {
    const std::lock_guard<std::mutex> lock(failure_);
    if (block < failed_.load()) {
      failed_.store(block);
      error_ = error;
      at_ = at;
    }
    return false;
  }

  const StoredRows& rows_;
  const Number wanted_;
  uint8_t* const out_;
  const int64_t size_;
  const bool has_gaps_;
  const int64_t units_, unit_items_, unit_bytes_, step_;  // rows, or numbers where none has gaps
  std::atomic<bool> is_finite_{true};
  std::atomic<int64_t> failed_{std::numeric_limits<int64_t>::max()};  // the first block that did
  std::mutex failure_;
  int error_ = kNoError;
  int64_t at_ = 0;
};

}  // namespace

ReadOutcome ReadRows(const StoredRows& rows, Number wanted, void* out, int64_t block_bytes,
                     int threads) {
  if (rows.stored == Number::kFloat16) Halves();  // made here, where it may throw
  Read read(rows, wanted, static_cast<uint8_t*>(out), block_bytes);
  const auto body = [](const void* context, int64_t block) {
    static_cast<Read*>(const_cast<void*>(context))->Take(block);
  };
  ParallelBeside(read.blocks(), threads, body, &read);
  return read.outcome();
}

}  // namespace baton_ops::cpu
