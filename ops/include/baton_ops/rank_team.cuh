// How the ranks of a tensor-parallel group meet in the middle of a kernel: each rank is a GPU of
// its own with an exchange buffer that all of them have mapped. Knows nothing of what is exchanged.
//
// A buffer is a head of flags, places for what is pushed (rank_push.cuh), and two halves. Calls
// take the halves in turns, on every rank the same calls in the same order. Blocks of one number on
// all ranks are a team. A team meets:
//
//   count += 1                       the block's own, kept in its rank's head
//   fence.acq_rel.sys
//   for every rank: st.relaxed.sys   its arrived[team][me] = count
//   for every rank: ld.acquire.sys   until my arrived[team][rank] reaches count
//
// After a meeting a block sees what the others' ranks wrote before it. What kernels before this one
// wrote is visible to the block since it waited for them; what its own threads wrote, since they
// met at a barrier before the meeting. A fence at system scope is cumulative: with the store behind
// it, it releases both to whoever acquires the flag there, and the barrier behind the acquire
// passes them on to all threads of that block.
//
// Why two halves are enough, and no meeting is needed at a call's end: a half that call n has read
// is written again by what runs before call n + 2, on a rank that is through with call n + 1. There
// it met a block of every other rank, which had waited for its rank's call n to be complete. So
// nobody reads the half any more. Call n + 1 itself uses the other one.
//
// Nothing is reset between calls, or replays of a graph. A rank's flag is at most one meeting ahead
// of who waits for it, since the next one needs that one's arrival. Flags are compared by the sign
// of a 32-bit difference, which stays right when they wrap around. Each block counts for itself, so
// calls may have different numbers of blocks: a team's members have always met equally often.
//
// Who waits too long gives up: it leaves its reason in the head's error, and no later call of this
// rank arrives or waits any more, so that the others give up in turn. What runs on there may
// overwrite a half that a rank still reads which met it in time, but is slower by more than the
// limit. Such a rank has finite values that are wrong, and no error of its own before the call
// after its next, for the others may have arrived at one before they gave up. But a half is only
// overwritten behind an error in its own rank's head: where all heads are read behind the last
// call that counts, by a launch of its own, and none has an error, all that was read was right. So
// what ranks have computed holds where none has an error, and before the next call all heads must
// be zeroed, with no call under way.
#ifndef BATON_OPS_RANK_TEAM_CUH_
#define BATON_OPS_RANK_TEAM_CUH_

#include <cstdint>

namespace baton_ops::cuda {

constexpr int kMostRanks = 8;
constexpr int kMostTeams = 128;  // all resident at once, on any GPU with as many processors
constexpr int kHalfReused = kMostRanks + 1;
constexpr int kMostPushedRows = 16, kMostPushedVectors = 1024;  // of a part, and of a row

// Zeros before the first call. The words that others write share no line with the rank's own.
struct alignas(256) ExchangeHead {
  int32_t error;       // 0, 1 + the rank that did not come, or kHalfReused
  uint32_t last_half;  // 1 + the last call's, 0 before the first
  uint32_t unused[62];
  uint32_t meetings[kMostTeams];             // of this rank's block in each team
  uint32_t arrived[kMostTeams][kMostRanks];  // written by the ranks
};

// By value, so that no address is read from memory.
struct RankExchange {
  char* buffers[kMostRanks];  // of every rank, as this one has them mapped
  int32_t rank;
  int32_t half;       // 0 or 1
  int64_t part;       // where this call's half begins in every buffer, in bytes
  uint64_t limit_ns;  // of one meeting
};

// Makes the store behind it a release. Apart from it, so that it takes its time while what is
// stored is still being read.
__device__ __forceinline__ void FenceSystem() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

__device__ __forceinline__ void StoreRelaxed(uint32_t* at, uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

__device__ __forceinline__ uint32_t LoadAcquire(const uint32_t* at) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}

// Of another rank's head, which that one may be writing.
__device__ __forceinline__ int32_t LoadAcquire(const int32_t* at) {
  return static_cast<int32_t>(LoadAcquire(reinterpret_cast<const uint32_t*>(at)));
}

// What other blocks may be writing.
__device__ __forceinline__ int32_t LoadRelaxed(const int32_t* at) {
  int32_t value;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}

// Of a clock that moves on in steps of up to a microsecond.
__device__ __forceinline__ uint64_t Nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  return now;
}

// Whether a flag is at `count` or past it, also across the wrap-around.
__device__ __forceinline__ bool HasReached(uint32_t flag, uint32_t count) {
  return static_cast<int32_t>(flag - count) >= 0;
}

__device__ __forceinline__ bool AwaitFlag(const uint32_t* flag, uint32_t count, uint64_t limit_ns) {
  if (HasReached(LoadAcquire(flag), count)) return true;
  const uint64_t begin = Nanoseconds();
  while (!HasReached(LoadAcquire(flag), count)) {
    // Once more, for what came while this thread could not look.
    if (Nanoseconds() - begin > limit_ns) return HasReached(LoadAcquire(flag), count);
  }
  return true;
}

// A block among those of its number on all ranks. All its threads make one, after they have waited
// for earlier grids, meet, and leave.
template <int kRanks>
class RankTeam {
 public:
  __device__ __forceinline__ explicit RankTeam(const RankExchange& exchange)
      : exchange_(exchange),
        own_(Head(exchange.rank)),
        error_(LoadRelaxed(&own_->error)),
        count_(own_->meetings[blockIdx.x]) {}

  // Whether every rank came in time: the same in all threads. What they wrote before is visible
  // then. Threads that wrote for others meet at a barrier first.
  __device__ __forceinline__ bool Meet() {
    ++count_;
    const int other = threadIdx.x;
    return AreAllHere(other < kRanks && !MeetRank(other));
  }

  // A meeting whose arrivals are what is pushed: `meet(number)` pushes and awaits this thread's
  // share, and returns a rank of which something did not come, or -1. Otherwise as Meet.
  template <class MeetByPushing>
  __device__ __forceinline__ bool MeetBy(const MeetByPushing& meet) {
    ++count_;
    const int missing = error_ == 0 ? meet(count_) : -1;
    if (missing >= 0) GiveUp(missing);
    return AreAllHere(error_ != 0 || missing >= 0);
  }

  // Keeps what the next call needs. No thread may meet any more.
  __device__ __forceinline__ void Leave() const {
    if (threadIdx.x != 0) return;
    own_->meetings[blockIdx.x] = count_;
    if (blockIdx.x == 0) KeepHalf();
  }

 private:
  __device__ __forceinline__ ExchangeHead* Head(int rank) const {
    return reinterpret_cast<ExchangeHead*>(exchange_.buffers[rank]);
  }

  __device__ __forceinline__ bool MeetRank(int other) const {
    FenceSystem();
    if (error_ != 0) return false;
    StoreRelaxed(&Head(other)->arrived[blockIdx.x][exchange_.rank], count_);
    if (AwaitFlag(&own_->arrived[blockIdx.x][other], count_, exchange_.limit_ns)) return true;
    GiveUp(other);
    return false;
  }

  __device__ __forceinline__ void GiveUp(int rank) const { atomicMax(&own_->error, 1 + rank); }

  __device__ __forceinline__ bool AreAllHere(bool is_missing) {
    const bool are_here = !__syncthreads_or(is_missing);
    // What this block would have written is not there: nobody may take it for that.
    if (!are_here) error_ = 1;
    return are_here;
  }

  // A caller who takes a half twice running may have written to it while others still read.
  __device__ __forceinline__ void KeepHalf() const {
    const uint32_t half = exchange_.half + 1;
    if (own_->last_half == half) atomicMax(&own_->error, kHalfReused);
    own_->last_half = half;
  }

  const RankExchange& exchange_;
  ExchangeHead* own_;
  int32_t error_;  // of earlier calls and of this block; of others of this call, maybe
  uint32_t count_;
};

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_RANK_TEAM_CUH_
