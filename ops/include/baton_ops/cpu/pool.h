// A few threads that share the rows of one call, or the blocks of several.
#ifndef BATON_OPS_CPU_POOL_H_
#define BATON_OPS_CPU_POOL_H_

#include <cstdint>

namespace baton_ops::cpu {

// Calls body(context, i) for every i in [0, count), on at most ThreadCount() threads, the caller's
// among them, and returns when all calls have. `cost` is that of one index, in logits read; a call
// too small to gain stays on the caller's thread, as does one made while another is in progress.
// `body` must not throw, but on the caller's own thread: then the call ends by that once nobody is
// at it any more, and some indices may be left out. Threads start with the first call that needs
// them, live until the process exits, and are started afresh in a forked child.
void ParallelFor(int64_t count, int64_t cost, void (*body)(const void* context, int64_t index),
                 const void* context);

// As ParallelFor on at most `threads` threads, whatever the size and beside other calls: for work
// that waits, or that several callers have at once. There are as many threads as all calls that are
// in progress ask for together, kMaxThreads at most.
void ParallelBeside(int64_t count, int threads, void (*body)(const void* context, int64_t index),
                    const void* context);

}  // namespace baton_ops::cpu

#endif  // BATON_OPS_CPU_POOL_H_
