// The k largest of a stream of distinct u64 keys, in fixed storage (k <= kMaxTopK).
#ifndef BATON_OPS_CPU_TOP_KEYS_H_
#define BATON_OPS_CPU_TOP_KEYS_H_

#include <algorithm>
#include <cstdint>
#include <functional>

#include "baton_ops/logprob_rules.h"

namespace baton_ops::cpu {

class TopKeys {
 public:
  explicit TopKeys(int capacity) : capacity_(capacity) {}

  bool Admits(uint64_t key) const { return size_ < capacity_ || key > keys_[0]; }

  // Requires Admits(key).
  void Insert(uint64_t key) {
    if (size_ < capacity_) {
      keys_[size_++] = key;
      std::push_heap(keys_, keys_ + size_, std::greater<>());
    } else {
      ReplaceSmallest(key);
    }
  }

  // Ends the stream: afterwards keys are read by index, largest first.
  void SortDescending() { std::sort(keys_, keys_ + size_, std::greater<>()); }

  int size() const { return size_; }
  bool full() const { return size_ == capacity_; }
  uint64_t smallest() const { return keys_[0]; }  // before SortDescending
  uint64_t operator[](int index) const { return keys_[index]; }

 private:
  void ReplaceSmallest(uint64_t key) {
    int hole = 0;
    for (int child = 1; child < size_; child = 2 * hole + 1) {
      if (child + 1 < size_ && keys_[child + 1] < keys_[child]) ++child;
      if (key <= keys_[child]) break;
      keys_[hole] = keys_[child];
      hole = child;
    }
    keys_[hole] = key;
  }

  uint64_t keys_[kMaxTopK];
  int size_ = 0;
  int capacity_;
};

}  // namespace baton_ops::cpu

#endif  // BATON_OPS_CPU_TOP_KEYS_H_
