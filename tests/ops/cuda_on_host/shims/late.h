// What the grid before writes, on the host. Owns that it is not there before somebody waits.
#ifndef BATON_TESTS_CUDA_ON_HOST_LATE_H_
#define BATON_TESTS_CUDA_ON_HOST_LATE_H_

#include <cstdint>
#include <cstring>
#include <iterator>
#include <map>
#include <utility>
#include <vector>

namespace host_cuda {

// While one of these is there launches find it so. At its end all is again what it was.
class Late {
 public:
  Late() { current = this; }
  ~Late() {
    Come();
    current = nullptr;
  }
  Late(const Late&) = delete;
  Late& operator=(const Late&) = delete;

  // Has so many bytes be `until` then.
  void Hide(const void* place, int64_t bytes, int until = 0xff) {
    if (place == nullptr || bytes == 0) return;
    char* const from = static_cast<char*>(const_cast<void*>(place));
    const bool is_new = values_.emplace(from, std::vector<char>(from, from + bytes)).second;
    if (is_new) memset(from, until, static_cast<size_t>(bytes));
  }
  void Come() {
    if (std::exchange(has_come_, true)) return;
    for (const auto& [place, values] : values_) memcpy(place, values.data(), values.size());
  }
  bool Holds(const char* p) const {
    const auto next = values_.upper_bound(const_cast<char*>(p));
    return next != values_.begin() && p < std::prev(next)->first + std::prev(next)->second.size();
  }

  static inline Late* current;

 private:
  std::map<char*, std::vector<char>> values_;  // by place
  bool has_come_ = false;
};

// What grids before read or write still: nobody writes there before he waits. While one of these is
// there the first who waits looks.
class Untouched {
 public:
  Untouched() { current = this; }
  ~Untouched() { current = nullptr; }
  Untouched(const Untouched&) = delete;
  Untouched& operator=(const Untouched&) = delete;

  void Add(const void* place, int64_t bytes) {
    const auto* from = static_cast<const char*>(place);
    values_.emplace(from, std::vector<char>(from, from + bytes));
  }
  // Whether all is what it was, as far as anybody asks: those who come later may have written.
  bool Holds() {
    if (std::exchange(is_over_, true)) return true;
    for (const auto& [place, values] : values_) {
      if (memcmp(place, values.data(), values.size()) != 0) return false;
    }
    return true;
  }

  static inline Untouched* current;

 private:
  std::map<const char*, std::vector<char>> values_;  // by place
  bool is_over_ = false;
};

}  // namespace host_cuda

#endif  // BATON_TESTS_CUDA_ON_HOST_LATE_H_
