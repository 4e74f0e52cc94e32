// What a block of Hopper has beyond older ones, over fibers: barriers that count arrivals and
// bytes, and the copy engine's boxes, which arrive at once or as late as they may. Owns what of
// these no kernel may.
#ifndef BATON_TESTS_CUDA_ON_HOST_HOPPER_H_
#define BATON_TESTS_CUDA_ON_HOST_HOPPER_H_

#include <cuda.h>

#include <array>
#include <map>
#include <set>
#include <vector>

#include "device_language.h"
#include "late.h"
#include "warpgroups.h"

namespace host_cuda {

constexpr unsigned kAllRegisters = 64 << 10;

inline const void* written_before;  // by the grid before: nobody may read it before he waits
// Begin and end of what copies may read: x, the weight, and the scales of both.
inline std::vector<std::pair<const char*, const char*>> readable;
inline int planted;      // the number of the fault that is planted, or 0
inline bool lets_early;  // whether a launch let the next grid start before it waited itself

struct Barrier {
  int arrivals = 0, pending = 0, phase = 0;
  int64_t bytes = 0;  // expected, and not there yet
  std::vector<unsigned> waiting;
};

// A copy of a thread's own. A device makes it at any time until the thread's arrival behind it is,
// or until it is waited for: here at the last moment, or with an odd seed at once.
struct BegunCopy {
  uint32_t to, room;
  const void* from;
  int bytes;  // the rest of its room is zeros
};

struct BegunCopies {
  std::vector<BegunCopy> copies;
  std::vector<size_t> ends;  // of what was counted as one: an index behind its last
};

struct Hopper {
  std::map<unsigned, BegunCopies> begun;  // by thread
  std::set<unsigned> waited;              // threads that waited for earlier grids themselves
  std::map<uint32_t, Barrier> barriers;   // by shared address
  Warpgroup groups[1024 / kGroupThreads];
  std::map<int, Meeting> named;  // barriers of some warps, by number
  int registers = 0;
};

inline Hopper& MyHopper() {
  Block& block = MyBlock();
  if (block.hopper == nullptr) block.hopper = std::make_shared<Hopper>();
  return *static_cast<Hopper*>(block.hopper.get());
}

inline Warpgroup& MyGroup() {
  Warpgroup& group = MyHopper().groups[Me().thread / kGroupThreads];
  group.meeting.members = kGroupThreads;
  return group;
}

inline Barrier& BarrierAt(uint32_t at) {
  const auto found = MyHopper().barriers.find(at);
  if (found == MyHopper().barriers.end()) Fail("no barrier was made here", int(at));
  return found->second;  // which stays where it is
}

inline void CompleteIf(Barrier& barrier) {
  if (barrier.pending < 0) Fail("more threads arrive than a barrier waits for", 0);
  if (barrier.bytes < 0) Fail("more bytes arrive than a barrier expects", int(barrier.bytes));
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  barrier.phase ^= 1;
  barrier.pending = barrier.arrivals;
  for (const unsigned fiber : barrier.waiting) Wake(fiber);
  barrier.waiting.clear();
}

inline void InitBarrier(uint32_t at, int arrivals) {
  if (at % 8 != 0 || at + 8 > MyBlock().shared_used) Fail("no place for a barrier", int(at));
  Barrier barrier;
  barrier.arrivals = barrier.pending = arrivals;
  if (!MyHopper().barriers.emplace(at, barrier).second) Fail("a barrier is made twice", int(at));
}

inline void ArriveExpecting(uint32_t at, int bytes) {
  Linger();
  Barrier& barrier = BarrierAt(at);
  barrier.bytes += bytes;
  --barrier.pending;
  CompleteIf(barrier);
  Linger();
}
inline void Arrive(uint32_t at) { ArriveExpecting(at, 0); }

__attribute__((noinline)) inline void AwaitPhase(uint32_t at, int parity) {
  Linger();
  while (BarrierAt(at).phase == (parity & 1)) {
    BarrierAt(at).waiting.push_back(cluster.current);
    if (_setjmp(Me().at) == 0) RunAnother();
  }
}

inline uint32_t HasCome(uint32_t at, int parity) {
  Linger();
  return BarrierAt(at).phase != (parity & 1);
}

inline bool IsReadable(const char* p) {
  const auto holds = [=](const auto& range) { return p >= range.first && p < range.second; };
  return std::any_of(readable.begin(), readable.end(), holds);
}

// Floats that a thread reads itself: one, or from a sum on a vector of four.
class ReadFloats {
 public:
  ReadFloats(const float* at = nullptr) : at_(at) {}
  float operator[](int i) const { return *Checked(at_ + i, 1); }
  const float* operator+(int i) const {
    if (reinterpret_cast<uintptr_t>(at_ + i) % 16 != 0) Fail("a vector where none may begin", i);
    return Checked(at_ + i, 4);
  }

 private:
  static const float* Checked(const float* p, int count) {
    const auto first = reinterpret_cast<const char*>(p), end = first + count * sizeof(float);
    if (!IsReadable(first) || !IsReadable(end - 1)) Fail("reads beside what there is", count);
    return p;
  }

  const float* at_;
};

// What the calling thread may not read yet, if there is anything.
inline const Late* NotYet() {
  return MyHopper().waited.count(Me().thread) == 0 ? Late::current : nullptr;
}

// So many of the 16 bytes that lie together however rows are swizzled; the others are zeros.
inline void BringVector(char* to, const char* from, int64_t bytes, const Late* late) {
  memset(to, 0, 16);
  if (bytes <= 0) return;
  const char* const last = from + bytes - 1;
  if (!IsReadable(from) || !IsReadable(last)) Fail("a matrix is described as larger than it is", 0);
  if (late != nullptr && (late->Holds(from) || late->Holds(last)))
    Fail("reads before it waited", 0);
  memcpy(to, from, static_cast<size_t>(bytes));
}

// A box whose first element is at that place, into a block's shared memory.
template <size_t kRank>
void BringBox(char* shared, uint32_t to, uint32_t bytes, const CUtensorMap* map,
              const std::array<int, kRank>& at, const Late* late) {
  const uint32_t of_line = map->box[0] * map->width;  // elements that are neighbours
  if (of_line % 16 != 0 || at[0] < 0) Fail("a box of no vectors", int(of_line));
  for (uint32_t line = 0; line < bytes / of_line; ++line) {
    const char* from = map->data + int64_t{at[0]} * map->width;
    int64_t there = (static_cast<int64_t>(map->size[0]) - at[0]) * map->width;  // or fewer than 0
    for (uint32_t d = 1, rest = line; d < kRank; rest /= map->box[d++]) {
      const int64_t place = at[d] + static_cast<int64_t>(rest % map->box[d]);
      if (place < 0 || place >= static_cast<int64_t>(map->size[d])) there = 0;
      from += place * static_cast<int64_t>(map->stride_bytes[d]);
    }
    for (uint32_t i = 0; i < of_line; i += 16) {
      char* const vector = shared + Swizzled(to + line * of_line + i);
      BringVector(vector, from + i, std::min<int64_t>(there - i, 16), late);
    }
  }
}

template <size_t kRank>
void LoadBoxAt(uint32_t to, const CUtensorMap* map, const std::array<int, kRank>& at,
               uint32_t full) {
  Linger();
  uint32_t bytes = map->width;
  for (const uint32_t side : map->box) bytes *= side == 0 ? 1 : side;
  if (map->rank != kRank) Fail("a box of another rank than its matrix", int(map->rank));
  if (map->data == written_before && !Me().waited_for_grids) Fail("reads before it waited", 0);
  if (to % 1024 != 0 || to + bytes > MyBlock().shared_used) Fail("no place for a box", int(to));
  const auto next = MyHopper().barriers.lower_bound(to);
  if (next != MyHopper().barriers.end() && next->first < to + bytes) Fail("a box on a barrier", 0);
  const auto bring = [=, of = *map, shared = MyShared(), block = &MyBlock(),
                      barrier = &BarrierAt(full), late = NotYet()] {
    if (block->has_ended) Fail("a box comes behind its block's end", int(to));
    BringBox(shared, to, bytes, &of, at, late);
    barrier->bytes -= bytes;
    CompleteIf(*barrier);
  };
  if (settings.are_copies_late) {
    cluster.copies.emplace_back(bring);
  } else {
    bring();
  }
}

inline void LoadBox(uint32_t to, const CUtensorMap* map, int column, int row, uint32_t full) {
  LoadBoxAt<2>(to, map, {column, row}, full);
}
inline void LoadBoxBy(uint32_t to, const CUtensorMap* map, int column, int row, uint32_t full,
                      uint64_t) {
  LoadBox(to, map, column, row, full);
}
inline void LoadPairs(uint32_t to, const CUtensorMap* map, int column, int pair, int zero,
                      uint32_t full) {
  LoadBoxAt<4>(to, map, {column, zero, zero, pair}, full);
}
inline void LoadOfStack(uint32_t to, const CUtensorMap* map, int column, int zero, int block,
                        int nth, uint32_t full) {
  LoadBoxAt<5>(to, map, {column, zero, zero, block, nth}, full);
}
inline uint64_t ReadOncePolicy() { return 0; }
inline void Prefetch(const CUtensorMap*) {}

inline void Make(const BegunCopy& copy) {
  memset(MyShared() + copy.to, 0, copy.room);
  memcpy(MyShared() + copy.to, copy.from, static_cast<size_t>(copy.bytes));
}
inline void BeginEarlyCopyOf(uint32_t to, uint32_t room, const void* from, int bytes) {
  if (to % room != 0 || to + room > MyBlock().shared_used) Fail("no place for a copy", int(to));
  if (reinterpret_cast<uintptr_t>(from) % room != 0) Fail("a copy of no vector", int(room));
  const auto first = static_cast<const char*>(from);
  if (bytes > 0 && !(IsReadable(first) && IsReadable(first + bytes - 1))) {
    Fail("a copy reads beside what there is", bytes);
  }
  const Late* const late = NotYet();
  if (bytes > 0 && late != nullptr && late->Holds(first)) Fail("reads before it waited", 0);
  const BegunCopy copy{to, room, from, bytes};
  if (settings.seed % 2 == 1) return Make(copy);
  MyHopper().begun[Me().thread].copies.push_back(copy);
}
inline void BeginCopyOf(uint32_t to, uint32_t room, const void* from, int bytes) {
  if (!Me().waited_for_grids) Fail("reads before it waited", 0);
  BeginEarlyCopyOf(to, room, from, bytes);
}
inline void BeginCopyOrZeros(uint32_t to, const void* from, int bytes) {
  BeginCopyOf(to, 16, from, bytes);
}
inline void BeginCopyOfFour(uint32_t to, const void* from) { BeginCopyOf(to, 4, from, 4); }
// Of a weight, or its scales.
inline void BeginEarlyCopyOrZeros(uint32_t to, const void* from, int bytes) {
  BeginEarlyCopyOf(to, 16, from, bytes);
}
inline void BeginEarlyCopyOfFour(uint32_t to, const void* from) {
  BeginEarlyCopyOf(to, 4, from, 4);
}
// Makes the first copies.
inline void MakeCopies(BegunCopies& mine, size_t count) {
  for (size_t i = 0; i < count; ++i) Make(mine.copies[i]);
  mine.copies.erase(mine.copies.begin(), mine.copies.begin() + long(count));
}
inline void CountCopies() {
  BegunCopies& mine = MyHopper().begun[Me().thread];
  mine.ends.push_back(mine.copies.size());
}
inline void AwaitCopies(int keep) {
  BegunCopies& mine = MyHopper().begun[Me().thread];
  if (mine.ends.size() <= static_cast<size_t>(keep)) return;
  const size_t over = mine.ends.size() - static_cast<size_t>(keep), made = mine.ends[over - 1];
  MakeCopies(mine, made);
  mine.ends.erase(mine.ends.begin(), mine.ends.begin() + long(over));
  for (size_t& end : mine.ends) end -= made;
}
inline void ArriveBehindCopies(uint32_t at) {
  BegunCopies& mine = MyHopper().begun[Me().thread];
  MakeCopies(mine, mine.copies.size());
  Arrive(at);
}

// Waits for the block.
inline void WaitForGridsOnce() {
  if (!Me().waited_for_grids && Late::current != nullptr) Late::current->Come();
  for (Fiber& fiber : cluster.fibers) fiber.waited_for_grids = true;
  MyHopper().waited.insert(Me().thread);
}
// Lets grids start, before or behind that: what a launch reads before it waits nobody writes then.
inline void LetGridsStartAnyTime() { lets_early = lets_early || !Me().waited_for_grids; }
inline void Nothing() {}
// Named barriers: a warpgroup has one of its own.
inline void SyncGroup(int, int threads) {
  if (threads != int(kGroupThreads)) Fail("a barrier of other than a warpgroup", threads);
  Meet(MyGroup().meeting, -4);
}
inline void SyncFirstGroup(int threads) { SyncGroup(1, threads); }
inline void SyncOwnGroup(int number) { SyncGroup(number, int(kGroupThreads)); }
// The same of several warpgroups, where some may only arrive.
inline Meeting& NamedMeeting(int number, int threads) {
  if (number < 1 || number > 15) Fail("no named barrier", number);
  Meeting& meeting = MyHopper().named[number];
  meeting.members = static_cast<unsigned>(threads);
  return meeting;
}
inline void SyncNamed(int number, int threads) { Meet(NamedMeeting(number, threads), -4 - number); }
inline void ArriveNamed(int number, int threads) {
  Linger();
  Meeting& meeting = NamedMeeting(number, threads);
  meeting.line = -4 - number;
  if (++meeting.come == meeting.members) LetGo(meeting);
  Linger();
}
inline float PowerOfTwo(float x) { return exp2f(x); }
template <class... Arguments>
[[noreturn]] void NotOnHost(Arguments...) {
  Fail("an instruction that nothing stands for", 0);
}

inline void SetRegisters(int each) {
  if (each % 8 != 0 || each < 24 || each > 256) Fail("no number of registers", each);
  if (Me().thread % kGroupThreads == 0) MyHopper().registers += each * int(kGroupThreads);
  // A block begins with as many, and has no others.
  const unsigned most = kAllRegisters / blockDim.x / 8 * 8 * blockDim.x;
  if (MyHopper().registers > static_cast<int>(most)) Fail("more registers than there are", each);
}

template <int kEach>
void SetRegistersTo() {
  SetRegisters(kEach);
}

// Turns a block of 8 x 8 bf16 over: lane l has two neighbours of row l / 4.
inline uint32_t TurnBlock(uint32_t pair) {
  const uint64_t* lanes = Exchange(~0u, pair, -3);
  const unsigned row = Lane() / 4, column = Lane() % 4 * 2, shift = row % 2 * 16;
  const uint64_t low = lanes[column * 4 + row / 2], high = lanes[(column + 1) * 4 + row / 2];
  return static_cast<uint32_t>((low >> shift & 0xffff) | (high >> shift & 0xffff) << 16);
}

inline void StoreVector(void* to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  if (reinterpret_cast<uintptr_t>(to) % 16 != 0) Fail("a vector where none may begin", 0);
  const uint32_t words[] = {a, b, c, d};
  memcpy(to, words, sizeof(words));
}

}  // namespace host_cuda

inline void* __cvta_generic_to_global(void* p) { return p; }

#endif  // BATON_TESTS_CUDA_ON_HOST_HOPPER_H_
