// Small parts of a sum over ranks, which each rank pushes to the others instead of letting them
// read it: the way there and no way back, and no flag that a fence holds up until the part is
// written.
//
// Behind the flags of a buffer's head every rank has places for each other one, in two halves that
// calls take in turns as they do those of parts. A vector of 16 bytes goes there as four words of
// eight, four bytes of it beside the number of the team's meeting. A word is written at once, so
// who reads that number beside it has what was pushed in this call; until then it looks again.
// Teams count for themselves, so each has places of its own: in another's an old word might have
// its number.
//
// Why no word is overwritten before it is read: what call n pushes lies where call n + 2 does. Who
// makes that one is through with call n + 1, so has met, or had a word of, every other rank, which
// had waited for its rank's call n to be complete. Who gave up pushes nothing any more. So unlike
// parts that are read over the links, words that came in time stay right however late they are
// read. A word that was left 2^32 meetings ago would be taken for a new one; a team that meets so
// often pushes in between.
#ifndef BATON_OPS_RANK_PUSH_CUH_
#define BATON_OPS_RANK_PUSH_CUH_

#include "baton_ops/rank_team.cuh"

namespace baton_ops::cuda {

constexpr int kPushedWords = 4;  // of a vector

__device__ __forceinline__ void PushWord(uint64_t* at, uint64_t word) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(at), "l"(word) : "memory");
}

__device__ __forceinline__ uint64_t PolledWord(const uint64_t* at) {
  uint64_t word;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(word) : "l"(at) : "memory");
  return word;
}

// What a thread pushes and gets in one meeting of its team, of this number.
template <int kRanks>
class RankPush {
 public:
  __device__ __forceinline__ RankPush(const RankExchange& exchange, uint32_t number)
      : exchange_(exchange), number_(number) {}

  // A vector of the team's, of this number, to all other ranks.
  __device__ __forceinline__ void Push(int vector, const uint4& value) const {
    const uint32_t parts[kPushedWords] = {value.x, value.y, value.z, value.w};
#pragma unroll
    for (int r = 0; r < kRanks; ++r) {
      if (r == exchange_.rank) continue;
#pragma unroll
      for (int i = 0; i < kPushedWords; ++i) {
        PushWord(Place(r, exchange_.rank, i) + vector, uint64_t{number_} << 32 | parts[i]);
      }
    }
  }

  // Whether what another rank pushed came within the limit, which is one for all that the thread
  // awaits: whoever is missing has been waited for since the first was.
  __device__ __forceinline__ bool Await(int rank, int vector, uint4& value) {
    if (HasCome(rank, vector, value)) return true;
    if (began_ == 0) began_ = Nanoseconds();
    while (!HasCome(rank, vector, value)) {
      // Once more, for what came while this thread could not look.
      if (Nanoseconds() - began_ > exchange_.limit_ns) return HasCome(rank, vector, value);
    }
    return true;
  }

 private:
  __device__ __forceinline__ bool HasCome(int rank, int vector, uint4& value) const {
    uint32_t parts[kPushedWords];
    bool has_come = true;
#pragma unroll
    for (int i = 0; i < kPushedWords; ++i) {
      const uint64_t word = PolledWord(Place(exchange_.rank, rank, i) + vector);
      parts[i] = static_cast<uint32_t>(word);
      has_come &= static_cast<uint32_t>(word >> 32) == number_;
    }
    value = {parts[0], parts[1], parts[2], parts[3]};
    return has_come;
  }

  // In the buffer of rank `to`, the team's words of this number that `from` pushes.
  __device__ __forceinline__ uint64_t* Place(int to, int from, int word) const {
    const int64_t of_team = (exchange_.half * kMostRanks + from) * kMostPushedRows + blockIdx.x;
    const int64_t place = of_team * kPushedWords + word;
    char* places = exchange_.buffers[to] + sizeof(ExchangeHead);
    return reinterpret_cast<uint64_t*>(places) + place * kMostPushedVectors;
  }

  const RankExchange& exchange_;
  const uint32_t number_;
  uint64_t began_ = 0;  // to wait, 0: it has not
};

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_RANK_PUSH_CUH_
