// What decode's attention has whatever the number of rows: a block's shared memory, its ring, and
// the warpgroup's part of it beside the arithmetic.
#ifndef BATON_OPS_DECODE_WORK_CUH_
#define BATON_OPS_DECODE_WORK_CUH_

#include "baton_ops/decode_left.cuh"

namespace baton_ops::cuda {

constexpr int kDecodeConsumers = 128, kDecodeThreads = kDecodeConsumers + 32;
constexpr int kDecodeStages = 6, kQueryHalfBytes = 64 * 128;
constexpr int kQueryBytes = 24 * 1024;  // of queries, or of what few rows have in their place
static_assert(2 * kQueryHalfBytes <= kQueryBytes);

struct DecodeShared {
  uint8_t ring[kDecodeStages][kTileBytes], q[kQueryBytes];
  uint64_t full[kDecodeStages], empty[kDecodeStages];
  Contexts contexts;
  int is_last;
};

// A place in the ring.
struct DecodeTurn {
  int s = 0, phase = 0;
  __device__ void Advance() {
    if (++s == kDecodeStages) {
      s = 0;
      phase ^= 1;
    }
  }
};

// Adds, and returns what stood there. What the thread's block left before its last meeting is seen
// by whoever finds the sum; what those before left is seen behind it. A fence before and one behind
// are sequentially consistent, which nobody needs here, and a wait each.
__device__ __forceinline__ int AddInOrder(int* at, int value) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(at), "r"(value)
               : "memory");
  return before;
}

// What a warpgroup does with runs: queries in, tiles off the ring, outputs in their places, what
// others left.
class DecodeWork {
 public:
  __device__ DecodeWork(DecodeShared& shared, const PagedKeys& keys, const DecodeShape& shape,
                        const DecodeLeft& left)
      : shared_(shared), keys_(keys), shape_(shape), left_(left), quad_(threadIdx.x % 4) {}

 protected:
  __device__ __forceinline__ void Sync() {
    asm volatile("bar.sync 1, %0;" ::"n"(kDecodeConsumers) : "memory");
  }

  // Makes zeros of where queries lie, kBytes, which rows that are not used read.
  template <int kBytes>
  __device__ __forceinline__ void ClearQueries() {
    for (int i = threadIdx.x; i < kBytes / 16; i += kDecodeConsumers) {
      reinterpret_cast<uint4*>(shared_.q)[i] = uint4{};
    }
  }

  // Where a row of a run begins among queries or outputs.
  __device__ __forceinline__ size_t Element(const Run& run, int row) const {
    const int query = run.row * shape_.queries + row / shape_.heads_a_kv;
    const int head = run.head * shape_.heads_a_kv + row % shape_.heads_a_kv;
    return (static_cast<size_t>(query) * keys_.kv_heads * shape_.heads_a_kv + head) * kHeadDim;
  }

  // Row r of the queries is the product's row r / 8 * 16 + r % 8; kHalfBytesOfAll from one half of
  // all rows to the other. Waits for earlier grids, by those who read what these write.
  template <int kHalfBytesOfAll>
  __device__ __forceinline__ void LoadQueries(const Run& run, const __nv_bfloat16* q) {
    Sync();
    // Not unrolled: a step's weights drive the code out of the caches, and few rows are one round.
#pragma unroll 1
    for (int i = threadIdx.x; i < shape_.UsedRows() * 16; i += kDecodeConsumers) {
      const int row = i / 16, to = row / 8 * 16 + row % 8, chunk = i % 16;
      uint8_t* at = shared_.q + chunk / 8 * kHalfBytesOfAll + to * 128;
      const __nv_bfloat16* from = q + Element(run, row) + chunk * 8;
      WaitForEarlierGrids();  // behind all that is known without
      *reinterpret_cast<uint4*>(at + ((chunk ^ row) % 8) * 16) =
          *reinterpret_cast<const uint4*>(from);
    }
    PublishShared();
    Sync();
  }

  // Waits for the ring's next tile, and returns it.
  __device__ __forceinline__ uint8_t* NextTile() {
    Await(shared_.full + turn_.s, turn_.phase);
    return shared_.ring[turn_.s];
  }
  __device__ __forceinline__ void ReleaseTile() {
    if (threadIdx.x == 0) Arrive(shared_.empty + turn_.s);
    turn_.Advance();
  }

  // Says that the splits of a run are there; who brings the last ones merges them all.
  __device__ __forceinline__ void Bring(const Run& run, const DecodeMerge& merge,
                                        __nv_bfloat16* out) {
    Sync();
    if (threadIdx.x == 0) {
      int* brought = left_.brought + run.row * keys_.kv_heads + run.head;
      const int count = run.last - run.first;
      shared_.is_last = AddInOrder(brought, count) + count == run.splits;
      if (shared_.is_last) *brought = 0;
    }
    Sync();
    if (!shared_.is_last) return;
    merge.ForEachRow([&](int row, int lane, uint2 four) {
      *reinterpret_cast<uint2*>(out + Element(run, row) + lane * 4) = four;
    });
  }

  DecodeShared& shared_;
  const PagedKeys& keys_;
  const DecodeShape& shape_;
  const DecodeLeft& left_;
  const int quad_;
  DecodeTurn turn_;
};

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_DECODE_WORK_CUH_
