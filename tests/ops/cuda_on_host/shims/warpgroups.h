// Products of Hopper's warpgroups, on the host: a warp's rows of a product are made as late as its
// wait allows, from what then lies in shared memory. Owns what of these no kernel may.
#ifndef BATON_TESTS_CUDA_ON_HOST_WARPGROUPS_H_
#define BATON_TESTS_CUDA_ON_HOST_WARPGROUPS_H_

#include <array>
#include <vector>

#include "device_language.h"

namespace host_cuda {

constexpr unsigned kGroupThreads = 128, kGroupRows = 64, kDepth = 16, kMostColumns = 256;
constexpr unsigned kByteDepth = 32;  // of operands that are bytes

// What lies in shared memory: bfloat16, the same with x turned, or e4m3 numbers.
enum class Operands { kBFloat16, kTurned, kE4m3 };

struct Product {
  uint64_t x, y;
  unsigned columns;
  bool adds;
  Operands operands;
  float* sums[kGroupThreads];                 // of each thread
  const uint32_t* words[kGroupThreads] = {};  // of x where it is in registers: then y is turned
};

// What a warp has of products: 16 rows.
struct WarpProducts {
  std::vector<size_t> ends;  // of what was committed together: an index behind its last
  size_t made = 0;           // so many of the first
};

struct Warpgroup {
  Meeting meeting;
  std::vector<Product> products;  // that are under way, in order
  WarpProducts warps[kGroupThreads / kWarpThreads];
  unsigned forgotten = 0;             // the meeting's turn when those that are made were forgotten
  unsigned next[kGroupThreads] = {};  // each thread's next product
};

inline Warpgroup& MyGroup();  // the calling thread's

// Where a byte of rows of 128 bytes lies, swizzled.
inline uint32_t Swizzled(uint32_t at) { return at ^ (at >> 7 & 7) << 4; }

// Of a descriptor's 16 columns, element c of row r.
inline float OperandAt(uint64_t descriptor, uint32_t r, uint32_t c) {
  const auto start = static_cast<uint32_t>(descriptor & 0x3fff) * 16;
  const uint32_t at = start + r / 8 * 1024 + r % 8 * 128 + c * 2;
  if (at + 2 > kMostShared) Fail("a product reads beyond shared memory", int(at));
  uint16_t bits;
  memcpy(&bits, MyShared() + Swizzled(at), 2);
  return __uint_as_float(uint32_t{bits} << 16);
}

// The same of a descriptor's 16 rows that are columns: element k of what is column n.
inline float TurnedAt(uint64_t descriptor, uint32_t n, uint32_t k) {
  const auto start = static_cast<uint32_t>(descriptor & 0x3fff) * 16;
  const auto next = static_cast<uint32_t>(descriptor >> 16 & 0x3fff) * 16;
  const uint32_t at = start + n / 64 * next + k / 8 * 1024 + k % 8 * 128 + n % 64 * 2;
  if (at + 2 > kMostShared) Fail("a product reads beyond shared memory", int(at));
  uint16_t bits;
  memcpy(&bits, MyShared() + Swizzled(at), 2);
  return __uint_as_float(uint32_t{bits} << 16);
}

// Element c of row r that registers hold.
inline float HeldAt(const Product& product, unsigned r, unsigned c) {
  const unsigned thread = r / 16 * 32 + r % 8 * 4 + c % 8 / 2;
  const uint32_t word = product.words[thread][r % 16 / 8 + c / 8 * 2];
  return __uint_as_float(c % 2 ? word & 0xffff0000u : word << 16);
}

constexpr unsigned kWarpRows = kGroupRows / (kGroupThreads / kWarpThreads);

// Of a warp's rows, from `first` on. Each element sums its 16 products from the first on, and adds
// that to what there was.
__attribute__((optimize("O3"))) inline void Make(const Product& product, unsigned first) {
  static float y[kDepth][kMostColumns];
  const unsigned columns = product.columns;
  const bool is_held = product.words[first / kWarpRows * kWarpThreads] != nullptr;
  for (unsigned j = 0; j < columns; ++j) {
    for (unsigned c = 0; c < kDepth; ++c) {
      y[c][j] = is_held ? TurnedAt(product.y, j, c) : OperandAt(product.y, j, c);
    }
  }
  for (unsigned r = first; r < first + kWarpRows; ++r) {
    float sums[kMostColumns] = {};
    for (unsigned c = 0; c < kDepth; ++c) {
      const float x = is_held                                 ? HeldAt(product, r, c)
                      : product.operands == Operands::kTurned ? TurnedAt(product.x, r, c)
                                                              : OperandAt(product.x, r, c);
      for (unsigned j = 0; j < columns; ++j) sums[j] += x * y[c][j];
    }
    for (unsigned j = 0; j < columns; ++j) {
      const unsigned thread = r / 16 * 32 + r % 8 * 4 + j % 8 / 2;
      float& sum = product.sums[thread][j / 8 * 4 + r % 16 / 8 * 2 + j % 2];
      sum = (product.adds ? sum : 0.0f) + sums[j];
    }
  }
}

// Numbers that are bytes, by these.
inline const float* NumbersOfE4m3() {
  static const auto numbers = [] {
    std::array<float, 256> made{};
    for (int bits = 0; bits < 256; ++bits) {
      const int exponent = bits >> 3 & 15, mantissa = bits & 7;
      const float size = exponent == 0 ? ldexpf(static_cast<float>(mantissa), -9)
                                       : ldexpf(static_cast<float>(8 + mantissa), exponent - 10);
      made[static_cast<size_t>(bits)] = (bits & 127) == 127 ? NAN : bits < 128 ? size : -size;
    }
    return made;
  }();
  return numbers.data();
}

// Where rows of bytes lie that a descriptor is of: 16 of them together, swizzled in rows of 128
// bytes or in blocks of eight rows, which follow each other in depth by what it says.
class ByteRows {
 public:
  explicit ByteRows(uint64_t descriptor)
      : start_(Field(descriptor, 0)),
        in_depth_(Field(descriptor, 16)),
        of_rows_(Field(descriptor, 32)),
        is_swizzled_(descriptor >> 62 == 1) {
    if (!is_swizzled_ && descriptor >> 62 != 0) Fail("a swizzle that nothing stands for", 0);
    if (!is_swizzled_) return;
    if (of_rows_ != 1024) Fail("swizzled rows that do not follow each other", int(of_rows_));
    if (start_ % 1024 > 128 - kByteDepth) Fail("rows that begin within a swizzle", int(start_));
  }
  // 16 of a row's 32 bytes.
  const uint8_t* At(uint32_t row, uint32_t half) const {
    const uint32_t in_block = row % 8 * (is_swizzled_ ? 128 : 16);
    const uint32_t place = start_ + row / 8 * of_rows_ + in_block;
    const uint32_t at = place + half * (is_swizzled_ ? 16 : in_depth_);
    if (at + 16 > MyBlock().shared_used) Fail("a product reads beyond shared memory", int(at));
    return reinterpret_cast<const uint8_t*>(MyShared()) + (is_swizzled_ ? Swizzled(at) : at);
  }

 private:
  static uint32_t Field(uint64_t descriptor, int bit) {
    return static_cast<uint32_t>(descriptor >> bit & 0x3fff) * 16;
  }
  uint32_t start_, in_depth_, of_rows_;
  bool is_swizzled_;
};

// The same of e4m3 numbers. Each element adds its 32 products from the first on to what there was.
__attribute__((optimize("O3"))) inline void MakeOfE4m3(const Product& product, unsigned first) {
  static float y[kByteDepth][kMostColumns];
  const unsigned columns = product.columns;
  const float* const numbers = NumbersOfE4m3();
  const ByteRows rows_of_x(product.x), rows_of_y(product.y);
  for (unsigned j = 0; j < columns; ++j) {
    for (unsigned k = 0; k < kByteDepth; ++k) y[k][j] = numbers[rows_of_y.At(j, k / 16)[k % 16]];
  }
  for (unsigned r = first; r < first + kWarpRows; ++r) {
    const unsigned quad = r / 16 * 32 + r % 8 * 4;
    const auto sum = [&](unsigned j) -> float& {
      return product.sums[quad + j % 8 / 2][j / 8 * 4 + r % 16 / 8 * 2 + j % 2];
    };
    float sums[kMostColumns];
    for (unsigned j = 0; j < columns; ++j) sums[j] = product.adds ? sum(j) : 0.0f;
    for (unsigned k = 0; k < kByteDepth; ++k) {
      const float x = numbers[rows_of_x.At(r, k / 16)[k % 16]];
      for (unsigned j = 0; j < columns; ++j) sums[j] += x * y[k][j];
    }
    for (unsigned j = 0; j < columns; ++j) sum(j) = sums[j];
  }
}

inline void StartProduct(float* sums, uint64_t x, uint64_t y, unsigned columns, bool adds,
                         const uint32_t* words = nullptr, Operands operands = Operands::kBFloat16) {
  Warpgroup& group = MyGroup();
  const unsigned thread = Me().thread % kGroupThreads, at = group.next[thread]++;
  if (at == group.products.size()) {
    group.products.push_back({x, y, columns, adds, operands, {}, {}});
  }
  Product& product = group.products[at];
  if (product.x != x || product.y != y || product.adds != adds) {
    Fail("threads of a warpgroup multiply different things", int(at));
  }
  product.sums[thread] = sums;
  product.words[thread] = words;
}

inline WarpProducts& MyWarpProducts() {
  return MyGroup().warps[Me().thread % kGroupThreads / kWarpThreads];
}

inline void CommitProducts() {
  if (Lane() == 0) MyWarpProducts().ends.push_back(MyGroup().next[Me().thread % kGroupThreads]);
}

// Makes a warp's rows of what it does not keep under way, by one thread.
inline void MakeRows(size_t keep) {
  WarpProducts& mine = MyWarpProducts();
  if (mine.ends.size() <= keep) return;
  const auto over = mine.ends.end() - static_cast<long>(keep);
  const unsigned first = Me().thread % kGroupThreads / kWarpThreads * kWarpRows;
  for (; mine.made < *std::prev(over); ++mine.made) {
    const Product& product = MyGroup().products[mine.made];
    (product.operands == Operands::kE4m3 ? MakeOfE4m3 : Make)(product, first);
  }
  mine.ends.erase(mine.ends.begin(), over);
}

// What all warps have made.
inline void ForgetMade() {
  Warpgroup& group = MyGroup();
  size_t made = group.warps[0].made;
  for (const WarpProducts& warp : group.warps) {
    if (warp.made != made && !settings.are_warps_apart) {
      Fail("warps of a warpgroup wait for different products", int(made));
    }
    made = std::min(made, warp.made);
  }
  group.products.erase(group.products.begin(), group.products.begin() + long(made));
  for (unsigned& next : group.next) next -= static_cast<unsigned>(made);
  for (WarpProducts& warp : group.warps) {
    warp.made -= made;
    for (size_t& end : warp.ends) end -= made;
  }
}

// A warp's rows are made once its threads are here, of what others of its group have written by
// then; nobody goes on before all of the group's are, unless warps are apart.
inline void AwaitProducts(int keep) {
  Meet(MyWarp().meeting, -1);
  if (Lane() == 0) MakeRows(static_cast<size_t>(keep));
  if (settings.are_warps_apart) {
    if (Lane() == 0) ForgetMade();
    return Meet(MyWarp().meeting, -2);
  }
  Meet(MyGroup().meeting, -2);
  Warpgroup& group = MyGroup();
  if (std::exchange(group.forgotten, group.meeting.turn) != group.meeting.turn) ForgetMade();
}

}  // namespace host_cuda

#endif  // BATON_TESTS_CUDA_ON_HOST_WARPGROUPS_H_
