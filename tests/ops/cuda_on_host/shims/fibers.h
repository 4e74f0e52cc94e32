// A cluster of blocks whose threads are fibers of one host thread. A fiber runs until it meets
// others; who runs next is drawn from a seed, so what relies on an order that no barrier enforces
// goes wrong with some seed. Some may be set to come last at every point. Owns meeting, and what a
// block or a warp may not do where it meets. Knows nothing of CUDA's names.
#ifndef BATON_TESTS_CUDA_ON_HOST_FIBERS_H_
#define BATON_TESTS_CUDA_ON_HOST_FIBERS_H_

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace host_cuda {

constexpr unsigned kWarpThreads = 32;
constexpr size_t kStackBytes = 64 << 10;
constexpr size_t kMostFibers = 16 * 1024;   // a cluster has no more blocks, nor a block threads
constexpr size_t kSharedBytes = 256 << 10;  // the distance of two blocks' shared memory
constexpr size_t kMostShared = 227 << 10;
constexpr int kPoison = 0xa5;
constexpr uint64_t kFirstFirst = ~uint64_t{0};  // a seed by which nothing is drawn

struct Index {
  unsigned x = 1, y = 1, z = 1;
};

}  // namespace host_cuda

inline host_cuda::Index threadIdx, blockIdx, blockDim, gridDim;

namespace host_cuda {

// Who comes last at every point: goes on only where nobody else may.
struct Starved {
  int first = 0, count = 0;  // threads of each block
  int block = -1;            // of those that run, or all of them
  bool once_told = false;    // no sooner than a thread of its block has told other blocks something
};

struct Settings {
  uint64_t seed = 1;
  int capability = 9;
  int shared_bytes = 227 << 10;  // that a block may have at most
  int skipped_line = 0;          // of a barrier that is passed by, in skipped_file
  char skipped_file[64] = "";
  Starved starved;
  bool are_copies_late = false;  // the copy engine makes one where all threads wait, else at once
  bool are_warps_apart = false;  // a warp's part of a product ends apart from its group's others
  bool is_side_by_side = false;  // all blocks of a grid run at once, else one after the other
};

inline Settings settings;
inline void (*on_switch)() = nullptr;  // called before another fiber goes on, if set
inline char failure[256];

// Where threads meet: all that are there must come, to the same line, before one goes on.
struct Meeting {
  unsigned members = 0, come = 0, turn = 0;
  int line = 0;
  std::vector<unsigned> waiting;
  uint64_t count[2] = {};  // of the threads for which a predicate holds, by turn
};

struct Warp {
  Meeting meeting;
  uint64_t value[2][kWarpThreads];
};

struct Block {
  Meeting meeting;
  Index index;
  size_t shared_used = 0;
  bool has_begun = false, has_ended = false;   // a thread of it has, and all have
  bool has_told = false;                       // other blocks something
  std::vector<std::pair<int, size_t>> places;  // of shared variables, by number
  std::shared_ptr<void> hopper;                // what only Hopper's blocks have, see hopper.h
};

struct Fiber {
  ucontext_t start;
  jmp_buf at;
  bool has_begun, waited_for_grids;
  unsigned thread, block, warp;
};

struct Cluster {
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::vector<Block> blocks;
  std::vector<unsigned> ready, starved, idle;  // idle: look again once nobody else may go on
  std::vector<std::function<void()>> copies;   // that the copy engine makes once all threads wait
  std::vector<char> shared;
  Meeting meeting;
  unsigned threads = 0, left = 0, current = 0;
  jmp_buf out;
  const std::function<void()>* kernel = nullptr;
  char* stacks = nullptr;
  uint64_t random = 1;
};

inline Cluster cluster;
inline Fiber& Me() { return cluster.fibers[cluster.current]; }
inline Block& MyBlock() { return cluster.blocks[Me().block]; }
inline Warp& MyWarp() { return cluster.warps[Me().warp]; }

// SplitMix64.
inline uint64_t Draw() {
  uint64_t x = cluster.random += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// Ends the launch: what the threads did so far stays.
[[noreturn]] inline void Fail(const char* what, int line) {
  snprintf(failure, sizeof(failure), "%s (line %d)", what, line);
  _longjmp(cluster.out, 1);
}

inline bool IsStarved(unsigned fiber) {
  const Starved& starved = settings.starved;
  const Fiber& who = cluster.fibers[fiber];
  return static_cast<int>(who.thread) - starved.first < starved.count &&
         static_cast<int>(who.thread) >= starved.first &&
         (starved.block < 0 || static_cast<int>(who.block) == starved.block) &&
         (!starved.once_told || cluster.blocks[who.block].has_told);
}

// Lets a thread go on, some time.
inline void Wake(unsigned fiber) {
  (IsStarved(fiber) ? cluster.starved : cluster.ready).push_back(fiber);
}

// Has the block tell others something, from which on threads may be starved.
inline void Tell() {
  if (std::exchange(MyBlock().has_told, true)) return;
  std::vector<unsigned> ready;
  ready.swap(cluster.ready);
  for (const unsigned fiber : ready) Wake(fiber);
}

// Where the first of these threads stands: looked up at each step, so in vectors.
__attribute__((optimize("O3"))) inline size_t FirstOf(const std::vector<unsigned>& among) {
  const unsigned* const fibers = among.data();
  int first = static_cast<int>(fibers[0]);
  for (size_t i = 1; i < among.size(); ++i) first = std::min(first, static_cast<int>(fibers[i]));
  size_t at = 0;
  while (static_cast<int>(fibers[at]) != first) ++at;
  return at;
}

// Of those that may run, the first of all threads: so these run ahead as far as barriers let them.
inline unsigned Taken(std::vector<unsigned>& among, bool is_first) {
  std::swap(among[is_first ? FirstOf(among) : Draw() % among.size()], among.back());
  const unsigned taken = among.back();
  among.pop_back();
  return taken;
}

// The next copy that the engine makes, one of those that were asked for.
inline void MakeCopy() {
  auto& copies = cluster.copies;
  std::swap(copies[Draw() % copies.size()], copies.back());
  const std::function<void()> make = std::move(copies.back());
  copies.pop_back();
  make();
}

// A starved thread, and a copy, comes when all others wait: which of both first is drawn.
inline unsigned NextToRun() {
  while (cluster.ready.empty() && !cluster.copies.empty()) {
    if (!cluster.starved.empty() && Draw() % 2 == 0) break;
    MakeCopy();
  }
  if (!cluster.ready.empty()) return Taken(cluster.ready, settings.seed == kFirstFirst);
  if (!cluster.starved.empty()) return Taken(cluster.starved, false);
  cluster.ready.swap(cluster.idle);
  if (!cluster.ready.empty()) return Taken(cluster.ready, settings.seed == kFirstFirst);
  if (cluster.left == 0) _longjmp(cluster.out, 1);
  Fail("threads wait for others that never come", cluster.blocks[0].meeting.line);
}

[[noreturn]] inline void RunAnother() {
  cluster.current = NextToRun();
  Fiber& fiber = Me();
  MyBlock().has_begun = true;
  threadIdx = {fiber.thread, 0, 0};
  blockIdx = cluster.blocks[fiber.block].index;
  if (on_switch != nullptr) on_switch();
  if (fiber.has_begun) _longjmp(fiber.at, 1);
  fiber.has_begun = true;
  setcontext(&fiber.start);
  __builtin_unreachable();
}

inline void LetGo(Meeting& meeting) {
  meeting.come = 0;
  meeting.count[++meeting.turn % 2] = 0;
  for (const unsigned fiber : meeting.waiting) Wake(fiber);
  meeting.waiting.clear();
}

// Has the thread go on where its queue's turn is.
__attribute__((noinline)) inline void ComeBack(std::vector<unsigned>& among) {
  among.push_back(cluster.current);
  if (_setjmp(Me().at) == 0) RunAnother();
}

// Before and behind all that others may see: a starved thread lets these go first.
inline void Linger() {
  if (IsStarved(cluster.current)) ComeBack(cluster.starved);
}

// The calling thread meets the others. Everybody waits: the last to come is no sooner on its way.
__attribute__((noinline)) inline void Meet(Meeting& meeting, int line) {
  if (meeting.come != 0 && meeting.line != line) Fail("threads meet at different places", line);
  meeting.line = line;
  meeting.waiting.push_back(cluster.current);
  if (++meeting.come == meeting.members) LetGo(meeting);
  if (_setjmp(Me().at) == 0) RunAnother();
}

inline void Leave(Meeting& meeting, bool others_may_wait) {
  --meeting.members;
  if (meeting.come == 0) return;
  if (!others_may_wait) Fail("a thread ended while its warp waited for it", meeting.line);
  if (meeting.come == meeting.members) LetGo(meeting);
}

// A block's shared memory is nobody's any more once its threads have ended.
inline void LeaveBlock() {
  Leave(MyBlock().meeting, true);
  if (MyBlock().meeting.members != 0) return;
  MyBlock().has_ended = true;
  memset(&cluster.shared[Me().block * kSharedBytes], kPoison, kMostShared);
}

inline void RunFiber() {
  (*cluster.kernel)();
  Leave(MyWarp().meeting, false);
  LeaveBlock();
  Leave(cluster.meeting, true);
  --cluster.left;
  RunAnother();
}

inline void Prepare(unsigned n_blocks, unsigned threads) {
  const unsigned all = n_blocks * threads, warps = (threads + kWarpThreads - 1) / kWarpThreads;
  if (cluster.stacks == nullptr) {
    cluster.stacks =
        static_cast<char*>(mmap(nullptr, kMostFibers * kStackBytes, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  }
  cluster.fibers.resize(all);
  cluster.blocks.assign(n_blocks, Block{});
  cluster.warps.assign(n_blocks * warps, Warp{});
  cluster.shared.resize(n_blocks * kSharedBytes);
  cluster.ready.clear();
  cluster.starved.clear();
  cluster.idle.clear();
  cluster.copies.clear();
  cluster.meeting = Meeting{};
  cluster.meeting.members = cluster.left = all;
  cluster.threads = threads;
  for (unsigned i = 0; i < all; ++i) {
    Fiber& fiber = cluster.fibers[i];
    const unsigned block = i / threads;
    fiber.has_begun = fiber.waited_for_grids = false;
    fiber.thread = i % threads;
    fiber.block = block;
    fiber.warp = block * warps + fiber.thread / kWarpThreads;
    ++cluster.blocks[block].meeting.members;
    ++cluster.warps[fiber.warp].meeting.members;
    Wake(i);
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = cluster.stacks + i * kStackBytes;
    fiber.start.uc_stack.ss_size = kStackBytes;
    fiber.start.uc_link = nullptr;
    makecontext(&fiber.start, RunFiber, 0);
  }
}

// Runs one cluster's blocks, the first of which is `first`, to their end or to a failure.
inline void RunCluster(const std::function<void()>& kernel, const std::vector<Index>& blocks,
                       unsigned threads, size_t dynamic_bytes) {
  Prepare(static_cast<unsigned>(blocks.size()), threads);
  for (size_t b = 0; b < blocks.size(); ++b) {
    cluster.blocks[b].index = blocks[b];
    cluster.blocks[b].shared_used = (dynamic_bytes + 15) / 16 * 16;
    memset(&cluster.shared[b * kSharedBytes], kPoison, kMostShared);
  }
  cluster.kernel = &kernel;
  if (_setjmp(cluster.out) == 0) RunAnother();
}

}  // namespace host_cuda

#endif  // BATON_TESTS_CUDA_ON_HOST_FIBERS_H_
