#include "baton_ops/cpu/pool.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "baton_ops/cpu/settings.h"

namespace baton_ops::cpu {
namespace {

using Body = void (*)(const void* context, int64_t index);

// One call's indices, handed out one by one: rows cost the same, processors do not.
struct Work {
  Body body;
  const void* context;
  int64_t count;
  std::atomic<int64_t> next{0};
  int wanted = 0;  // helpers that may still join; of the pool's state, as `busy`
  int busy = 0;

  Work(Body b, const void* c, int64_t n) : body(b), context(c), count(n) {}

  void Drain() {
    for (int64_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) body(context, i);
  }
};

class Pool {
 public:
  explicit Pool(pid_t owner) : owner_(owner) {}

  pid_t owner() const { return owner_; }

  // False if another thread's call is in progress or the process is exiting: nothing was done.
  bool TryRun(Work* work, int helpers) {
    const std::unique_lock<std::mutex> one_call(call_, std::try_to_lock);
    return one_call.owns_lock() && Run(work, helpers);
  }

  // False if the process is exiting: nothing was done.
  bool Run(Work* work, int helpers) {
    {
      const std::lock_guard<std::mutex> lock(state_);
      if (stopped_) return false;
      works_.push_back(work);  // first, for it may throw
      asked_ += helpers;
      Grow();
      work->wanted = helpers;
    }
    const Removal removal{this, work, helpers};
    // No more than may join: each that wakes takes `state_`, and who is needed would wait for all.
    for (int i = 0; i < helpers; ++i) wake_.notify_one();
    work->Drain();
    return true;
  }

  void Stop() {
    {
      const std::lock_guard<std::mutex> lock(state_);
      stopped_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

 private:
  // Takes a call's work away at its end, though the caller's own part of it throws: it lives on the
  // caller's stack, so nobody may join late or be at it still.
  struct Removal {
    Pool* pool;
    Work* work;
    int helpers;

    ~Removal() {
      std::unique_lock<std::mutex> lock(pool->state_);
      pool->works_.erase(std::find(pool->works_.begin(), pool->works_.end(), work));
      pool->asked_ -= helpers;
      pool->idle_.wait(lock, [this] { return work->busy == 0; });
    }
  };

  void Grow() {
    const int most = std::min(asked_, kMaxThreads - 1);
    try {
      while (static_cast<int>(threads_.size()) < most) {
        threads_.emplace_back([this] { Serve(); });
      }
    } catch (const std::system_error&) {
      // The machine gives no more threads: those that are there do it, the callers' among them.
    } catch (const std::bad_alloc&) {
      // Nor memory for one.
    }
  }

  Work* Joinable() const {
    const auto found = std::find_if(works_.begin(), works_.end(),
                                    [](const Work* work) { return work->wanted > 0; });
    return found == works_.end() ? nullptr : *found;
  }

  void Serve() {
    std::unique_lock<std::mutex> lock(state_);
    for (;;) {
      wake_.wait(lock, [this] { return stopped_ || Joinable() != nullptr; });
      if (stopped_) return;
      Work* work = Joinable();
      --work->wanted;
      ++work->busy;
      lock.unlock();
      work->Drain();
      lock.lock();
      if (--work->busy == 0) idle_.notify_all();
    }
  }

  const pid_t owner_;
  std::mutex call_;
  std::mutex state_;
  std::condition_variable wake_;
  std::condition_variable idle_;
  std::vector<std::thread> threads_;
  std::vector<Work*> works_;  // those in progress, the oldest first
  int asked_ = 0;             // helpers that all of them may have together
  bool stopped_ = false;
};

std::atomic<Pool*> current_pool{nullptr};

// Threads do not survive fork, and a lock may have been held by one of them: a child leaves the
// parent's pool alone and makes its own.
Pool* PoolOfThisProcess() {
  const pid_t self = getpid();
  Pool* pool = current_pool.load(std::memory_order_acquire);
  while (pool == nullptr || pool->owner() != self) {
    Pool* fresh = new Pool(self);
    if (current_pool.compare_exchange_strong(pool, fresh, std::memory_order_acq_rel)) return fresh;
    delete fresh;
  }
  return pool;
}

// Joins the threads at exit. The pool itself stays reachable, for threads that outlive main.
struct StopAtExit {
  ~StopAtExit() {
    Pool* pool = current_pool.load(std::memory_order_acquire);
    if (pool != nullptr && pool->owner() == getpid()) pool->Stop();
  }
};

const StopAtExit stop_at_exit;

}  // namespace

void ParallelFor(int64_t count, int64_t cost, Body body, const void* context) {
  // About 0.2 ms of work: below, waking a thread costs a good part of what it saves.
  constexpr int64_t kMinParallelCost = int64_t{1} << 19;
  Work work(body, context, count);
  const bool small = count * cost < kMinParallelCost;
  const int threads = small ? 1 : static_cast<int>(std::min<int64_t>(ThreadCount(), count));
  if (threads > 1 && PoolOfThisProcess()->TryRun(&work, threads - 1)) return;
  work.Drain();
}

void ParallelBeside(int64_t count, int threads, Body body, const void* context) {
  Work work(body, context, count);
  const int most = static_cast<int>(std::min<int64_t>(threads, count));
  if (most > 1 && PoolOfThisProcess()->Run(&work, most - 1)) return;
  work.Drain();
}

}  // namespace baton_ops::cpu
