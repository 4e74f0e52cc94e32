// Ranks of a tensor-parallel group on the host: the fibers of all ranks' grids take turns, and
// every access to an exchange buffer is held against the order that fences, flags and barriers
// make. Accesses that nothing orders are a race, whatever they happened to read. Owns vector
// clocks, one a fiber, what stands for the instructions that ranks meet by, and a clock that moves
// when it is read.
#ifndef BATON_TESTS_CUDA_ON_HOST_RANKS_H_
#define BATON_TESTS_CUDA_ON_HOST_RANKS_H_

#include <map>
#include <unordered_map>

#include "device_language.h"

#undef __syncthreads
#undef __syncthreads_or
#define __syncthreads() host_cuda::MeetInOrder(host_cuda::MyBlock().meeting, __LINE__)
#define __syncthreads_or(p) host_cuda::MeetInOrderOr(p, __LINE__)

namespace host_cuda {

using Clock = std::vector<uint32_t>;  // how far each fiber was, as far as is known here

// What a fiber knew when it last let others know, after which it counts one more: so who knows of
// that number of it knows all of this.
struct Told {
  unsigned fiber = 0;
  Clock clock;
};

// The last accesses to a vector of an exchange buffer.
struct Accesses {
  unsigned writer = 0;
  uint32_t written = 0;
  std::vector<std::pair<unsigned, uint32_t>> reads;  // since, by fiber
};

constexpr uint64_t kMostPolls = 4'000'000;
constexpr int kReadsWithoutAcquiring = 1;  // the fault that has no place in the sources

inline int planted = 0;
inline bool finds_races = true;
inline uint64_t polls, nanoseconds;
inline bool (*stands_still)() = nullptr;          // whether the thread may not read yet, if set
inline std::vector<Clock> clocks, fenced, began;  // began: when the kernel did that a fiber is in
inline std::unordered_map<const Meeting*, Clock[2]> joined;
inline std::unordered_map<const void*, Told> released;
inline std::unordered_map<const void*, Accesses> accesses;

// Before it has waited itself, which it must have at its end: what grids read early nobody writes.
inline void LetGridsStartAtOnce() {}

inline Clock& MyClock() { return clocks[cluster.current]; }

// Each fiber does this wherever it meets others, with a number for each fiber: so in vectors.
__attribute__((optimize("O3"))) inline void Join(Clock& clock, const Clock& other) {
  uint32_t* const numbers = clock.data();
  const uint32_t* const others = other.data();
  const size_t n = other.size();
  for (size_t i = 0; i < n; ++i) numbers[i] = numbers[i] < others[i] ? others[i] : numbers[i];
}

inline bool IsKnown(unsigned fiber, uint32_t when) { return when <= MyClock()[fiber]; }

// Who polls asks again and again.
inline void Learn(const Told& told) {
  if (told.clock.empty() || IsKnown(told.fiber, told.clock[told.fiber])) return;
  Join(MyClock(), told.clock);
}

inline void BeginClocks(size_t fibers) {
  clocks.assign(fibers, Clock(fibers, 0));
  for (size_t i = 0; i < fibers; ++i) clocks[i][i] = 1;
  fenced = began = std::vector<Clock>(fibers, Clock(fibers, 0));
  joined.clear();
  released.clear();
  accesses.clear();
  polls = nanoseconds = 0;
}

// What all did before they meet comes before what any does after: each knows what all knew.
inline void MeetInOrder(Meeting& meeting, int line) {
  Clock& of_all = joined[&meeting][meeting.turn % 2];
  if (meeting.come == 0) of_all.assign(clocks.size(), 0);
  Join(of_all, MyClock());
  Meet(meeting, line);
  MyClock() = of_all;
  ++MyClock()[cluster.current];
}

inline bool MeetInOrderOr(bool holds, int line) {
  const unsigned turn = MyBlock().meeting.turn % 2;
  MyBlock().meeting.count[turn] += holds;
  MeetInOrder(MyBlock().meeting, line);
  return MyBlock().meeting.count[turn] != 0;
}

// Lets others go first.
inline void Yield() { ComeBack(IsStarved(cluster.current) ? cluster.starved : cluster.ready); }

// Lets others go before the thread looks again. Where the first always runs, it would be the one
// that looks, until it gives up a rank that was never let run: so all others go there, and where
// some are starved.
inline void LookLater() {
  const bool is_ordered = settings.seed == kFirstFirst || settings.starved.count > 0;
  ComeBack(is_ordered ? cluster.idle : cluster.ready);
}

inline void YieldSometimes(unsigned one_in) {
  if (Draw() % one_in == 0) Yield();
}

inline void FenceOfSystem() {
  YieldSometimes(4);
  fenced[cluster.current] = MyClock();
  ++MyClock()[cluster.current];
}

// Releases what came before the last fence.
inline void StoreFlag(uint32_t* at, uint32_t value) {
  released[at] = {cluster.current, fenced[cluster.current]};
  *at = value;
  YieldSometimes(2);
}

inline uint32_t AcquireFlag(const uint32_t* at) {
  LookLater();
  if (++polls > kMostPolls) Fail("a rank waits for ever", 0);
  if (planted != kReadsWithoutAcquiring) Learn(released[at]);
  return *at;
}

// What a word is the sign of: that all is complete that was before the kernel which pushed it. No
// more, for nothing holds it back behind what that kernel itself has read or written.
inline void PushWordOfPart(uint64_t* at, uint64_t word) {
  YieldSometimes(8);
  released[at] = {cluster.current, began[cluster.current]};
  *at = word;
}

inline uint64_t PollWordOfPart(const uint64_t* at) {
  while (stands_still != nullptr && stands_still()) LookLater();
  LookLater();
  if (++polls > kMostPolls) Fail("a rank waits for ever", 0);
  Learn(released[at]);
  return *at;
}

inline void BeginKernel() {
  began[cluster.current] = MyClock();
  ++MyClock()[cluster.current];
}

inline int32_t LoadWord(const int32_t* at) { return *at; }
inline uint64_t ReadTimer() { return ++nanoseconds; }

inline void NoteRead(const void* at) {
  Accesses& known = accesses[at];
  if (finds_races && !IsKnown(known.writer, known.written)) {
    Fail("a race: nothing orders a read behind the write that it reads", 0);
  }
  known.reads.emplace_back(cluster.current, MyClock()[cluster.current]);
}

inline void NoteWrite(const void* at) {
  Accesses& known = accesses[at];
  if (finds_races && !IsKnown(known.writer, known.written)) {
    Fail("a race: nothing orders two writes", 0);
  }
  for (const auto& [fiber, when] : known.reads) {
    if (finds_races && !IsKnown(fiber, when)) {
      Fail("a race: nothing orders a write behind the reads before it", 0);
    }
  }
  known.reads.clear();
  known.writer = cluster.current;
  known.written = MyClock()[cluster.current];
}

template <class Vector>
Vector ReadVector(const Vector* at) {
  static_assert(sizeof(Vector) == 16);
  YieldSometimes(8);
  while (stands_still != nullptr && stands_still()) LookLater();
  NoteRead(at);
  return *at;
}

template <class Vector>
void WriteVector(Vector* at, const Vector& value) {
  static_assert(sizeof(Vector) == 16);
  YieldSometimes(8);
  NoteWrite(at);
  *at = value;
}

}  // namespace host_cuda

#endif  // BATON_TESTS_CUDA_ON_HOST_RANKS_H_
