// A cluster of blocks whose threads are fibers of one host thread. A fiber runs until it meets
// others; who runs next is drawn from a seed, so what relies on an order that no barrier enforces
// goes wrong with some seed. Owns meeting, and what a block or a warp may not do where it meets.
// Knows nothing of CUDA's names.
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

struct Settings {
  uint64_t seed = 1;
  int capability = 9;
  int shared_bytes = 227 << 10;  // that a block may have at most
  int skipped_line = 0;          // of a barrier that is passed by, in skipped_file
  char skipped_file[64] = "";
  int late_thread = -1;  // of each block: goes on behind a barrier in memory once nobody else may
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
  std::vector<unsigned> ready, later;  // later: who runs once nobody is ready
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

// Of those that may run, the first of all threads: so these run ahead as far as barriers let them.
inline unsigned& First() { return *std::min_element(cluster.ready.begin(), cluster.ready.end()); }

[[noreturn]] inline void RunAnother() {
  if (cluster.ready.empty()) cluster.ready.swap(cluster.later);
  if (cluster.ready.empty()) {
    if (cluster.left == 0) _longjmp(cluster.out, 1);
    Fail("threads wait for others that never come", cluster.blocks[0].meeting.line);
  }
  unsigned& drawn =
      settings.seed == kFirstFirst ? First() : cluster.ready[Draw() % cluster.ready.size()];
  cluster.current = std::exchange(drawn, cluster.ready.back());
  cluster.ready.pop_back();
  Fiber& fiber = Me();
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
  for (const unsigned fiber : meeting.waiting) cluster.ready.push_back(fiber);
  meeting.waiting.clear();
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
        static_cast<char*>(mmap(nullptr, 8 * 1024 * kStackBytes, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  }
  cluster.fibers.resize(all);
  cluster.blocks.assign(n_blocks, Block{});
  cluster.warps.assign(n_blocks * warps, Warp{});
  cluster.shared.resize(n_blocks * kSharedBytes);
  cluster.ready.clear();
  cluster.later.clear();
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
    cluster.ready.push_back(i);
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
