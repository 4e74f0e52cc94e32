// Causal attention of n queries at the end of a paged context, whose bits do not depend on n.
//
// The order is attention_order.cuh's. What lies behind a query adds exact zeros, so it does not
// matter which queries share a program.
//
// A program has one warp that loads and two warpgroups of 64 queries each, which take turns with
// the tensor cores: while one multiplies, the other has its softmax. It stays, and takes one block
// of 128 queries of a head after the other, the longest first. What earlier splits made waits in
// shared memory. bench_attention.py generates wgmma.inc and compiles this.
#include "attention_order.cuh"

namespace {

constexpr int kBlock = 128, kStages = 2;
constexpr int kTilePages = kTile / kPage, kLoads = 2 * kTilePages;     // a half of a page each
constexpr int kHalfBytes = 128 * 64 * 2, kTileBytes = 2 * kHalfBytes;  // 128 rows of 64 or 128 bf16
constexpr int kConsumers = 256, kThreads = 384;
constexpr int kFirstTurn = 1;  // the named barrier at which group 0 waits; the next is group 1's

#include "wgmma.inc"

struct Shared {
  uint8_t q[kTileBytes], k[kStages][kTileBytes], v[kStages][kTileBytes];
  float total[64][kConsumers];
  uint64_t q_full, q_empty, k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
};

struct Shape {
  int queries, context, heads, heads_a_kv;
  float scale_log2;
  __device__ int blocks() const { return (queries + kBlock - 1) / kBlock; }
};

// One block of queries of one head.
struct Work {
  int block, head, position, tiles;
  __device__ Work(const Shape& shape, int index) {
    block = shape.blocks() - 1 - index / shape.heads;
    head = index % shape.heads;
    position = shape.context - shape.queries + block * kBlock;
    tiles = min(shape.context - 1, position + kBlock - 1) / kTile + 1;
  }
};

// The index of a program's turn-th work: to and fro, so that everybody has long and short ones.
__device__ int work_index(int turn) {
  const int programs = gridDim.x, mine = blockIdx.x;
  return turn * programs + (turn & 1 ? programs - 1 - mine : mine);
}

__device__ void produce(Shared& shared, const CUtensorMap* map_q, const CUtensorMap* map_k,
                        const CUtensorMap* map_v, const int* pages, const Shape& shape) {
  const int lane = threadIdx.x, half = lane & 1, kv_heads = shape.heads / shape.heads_a_kv;
  const int last_page = (shape.context - 1) / kPage, all = shape.blocks() * shape.heads;
  const int at = half * kHalfBytes + lane / 2 * kPage * 128;
  int tile = 0;
  for (int turn = 0; turn * static_cast<int>(gridDim.x) < all; ++turn) {
    if (work_index(turn) >= all) continue;
    const Work work(shape, work_index(turn));
    if (lane == 0) {
      wait(&shared.q_empty, turn & 1 ^ 1);
      expect_bytes(&shared.q_full, kTileBytes);
      for (int i = 0; i < 2; ++i) {
        load_box(shared.q + i * kHalfBytes, map_q, work.head * kDim + i * 64, work.block * kBlock,
                 &shared.q_full);
      }
    }
    for (int j = 0; j < work.tiles; ++j, ++tile) {
      const int s = tile % kStages, parity = tile / kStages & 1 ^ 1;
      const int page = pages[min(j * kTilePages + lane % kLoads / 2, last_page)];
      const int row = (page * kv_heads + work.head / shape.heads_a_kv) * kPage;
      if (lane == 0) {
        wait(&shared.k_empty[s], parity);
        expect_bytes(&shared.k_full[s], kTileBytes);
      }
      __syncwarp();
      if (lane < kLoads) load_box(shared.k[s] + at, map_k, half * 64, row, &shared.k_full[s]);
      if (lane == 0) {
        wait(&shared.v_empty[s], parity);
        expect_bytes(&shared.v_full[s], kTileBytes);
      }
      __syncwarp();
      if (lane < kLoads) load_box(shared.v[s] + at, map_v, half * 64, row, &shared.v_full[s]);
    }
  }
}

// A warpgroup's share of a block: scores of a tile, what the split has made, and probabilities.
class Consumer {
 public:
  __device__ Consumer(Shared& shared, const Shape& shape)
      : shared_(shared),
        shape_(shape),
        group_(threadIdx.x / 128 - 1),
        thread_(threadIdx.x % 128),
        quad_(threadIdx.x % 4),
        row_(group_ * 64 + thread_ / 32 * 16 + thread_ % 32 / 4),
        total_(&shared.total[0][threadIdx.x - 128]) {}

  __device__ void run(__nv_bfloat16* out) {
    const int all = shape_.blocks() * shape_.heads;
    for (int turn = 0; turn * static_cast<int>(gridDim.x) < all; ++turn) {
      if (work_index(turn) >= all) continue;
      const Work work(shape_, work_index(turn));
      wait(&shared_.q_full, turn & 1);
      attend(work, turn == 0);
      store(work, out);
    }
    if (group_ == 0) take_turn();  // hears the other's last word
  }

 private:
  __device__ __forceinline__ void take_turn() {
    asm volatile("bar.sync %0, %1;" ::"r"(kFirstTurn + group_), "n"(kConsumers) : "memory");
  }
  __device__ __forceinline__ void give_turn() {
    asm volatile("bar.arrive %0, %1;" ::"r"(kFirstTurn + 1 - group_), "n"(kConsumers) : "memory");
  }
  __device__ __forceinline__ void release(uint64_t* barrier) {
    if (thread_ == 0) arrive(barrier);
  }

  __device__ __forceinline__ void attend(const Work& work, bool is_first_work) {
    Row rows[2];
    all_[0] = all_[1] = Row();
#pragma unroll
    for (float& value : made_) value = 0.f;
    if (group_ == 1 || !is_first_work) take_turn();
    score();
    give_turn();
    await_products<0>();
    hold(scores_);
    scored(work, 0);
    float alpha[2];
    softmax(rows, alpha);
    pack();
    for (int j = 1; j < work.tiles; ++j) {
      take_turn();
      const uint64_t values = values_of(tile_ - 1);
      score();
      weigh(tile_ - 2, values);
      give_turn();
      await_products<1>();
      hold(scores_);
      scored(work, j);
      const bool begins_split = j % kSplitTiles == 0;
      const Row before[2] = {rows[0], rows[1]};
      if (begins_split) rows[0] = rows[1] = Row();
      softmax(rows, alpha);
      await_products<0>();
      hold(made_);
      release(&shared_.v_empty[(tile_ - 2) % kStages]);
      if (begins_split) {
        merge(before, j == kSplitTiles, false);
      } else {
#pragma unroll
        for (int i = 0; i < 64; ++i) made_[i] *= alpha[i >> 1 & 1];
      }
      pack();
    }
    const uint64_t values = values_of(tile_ - 1);
    settle();
    weigh(tile_ - 1, values);
    await_products<0>();
    hold(made_);
    release(&shared_.v_empty[(tile_ - 1) % kStages]);
    merge(rows, work.tiles <= kSplitTiles, true);
  }

  // Whatever products read or add to is made before the first of them begins: else each would wait
  // for the one before.
  __device__ __forceinline__ void settle() {
    hold(scores_);
    hold(made_);
    hold(weights_);
    fence_products();
  }

  // Begins the products of the queries and the next tile's keys.
  __device__ __forceinline__ void score() {
    const int s = tile_ % kStages;
    wait(&shared_.k_full[s], tile_ / kStages & 1);
    const uint64_t q = descriptor(shared_.q + group_ * 64 * 128), k = descriptor(shared_.k[s]);
    settle();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int at = i / 4 * (kHalfBytes >> 4) + i % 4 * 2;
      multiply(scores_, q + at, k + at, i != 0);
    }
    commit_products();
    ++tile_;
  }

  // The tile is no longer needed; hides what a query must not see.
  __device__ __forceinline__ void scored(const Work& work, int j) {
    release(&shared_.k_empty[(tile_ - 1) % kStages]);
    if (j == work.tiles - 1) release(&shared_.q_empty);
    if ((j + 1) * kTile - 1 <= work.position + group_ * 64) return;
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      const int key = j * kTile + i / 4 * 8 + quad_ * 2 + (i & 1);
      if (key > work.position + row_ + (i >> 1 & 1) * 8) scores_[i] = -INFINITY;
    }
  }

  __device__ __forceinline__ uint64_t values_of(int tile) const {
    return descriptor(shared_.v[tile % kStages], kHalfBytes);
  }

  // Begins to add the weighted values of a tile.
  __device__ __forceinline__ void weigh(int tile, uint64_t values) {
    wait(&shared_.v_full[tile % kStages], tile / kStages & 1);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      add_weighted(made_, weights_[i * 4], weights_[i * 4 + 1], weights_[i * 4 + 2],
                   weights_[i * 4 + 3], values + i * (2048 >> 4));
    }
    commit_products();
  }

  __device__ __forceinline__ void softmax(Row (&rows)[2], float (&alpha)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) alpha[h] = soften(rows[h], scores_, h, shape_.scale_log2);
  }

  // Rounds probabilities to bf16, once no product reads the last ones.
  __device__ __forceinline__ void pack() {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      weights_[i] = packed(scores_[i * 2], scores_[i * 2 + 1]);
    }
  }

  // Adds a split to those before it. The first has nothing before it, the last stays in registers.
  __device__ __forceinline__ void merge(const Row (&split)[2], bool is_first, bool is_last) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const Merge merged(all_[h], split[h]);
      if (is_first && is_last) continue;
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        const int at = i / 2 * 4 + h * 2 + (i & 1);
        const float sum = merged.sum(is_first ? 0.f : total_[at * kConsumers], made_[at]);
        if (!is_last) total_[at * kConsumers] = sum;
        made_[at] = is_last ? sum : 0.f;
      }
    }
  }

  __device__ __forceinline__ void store(const Work& work, __nv_bfloat16* out) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float share = share_of(all_[h].sum);
      const int query = work.block * kBlock + row_ + h * 8;
#pragma unroll
      for (int j = 0; j < 16; j += 4) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = (j + i) * 4 + h * 2;
          words[i] = packed(made_[at] * share, made_[at + 1] * share);
        }
        transpose_quad(words, quad_);
        if (query < shape_.queries) {
          const size_t at = (static_cast<size_t>(query) * shape_.heads + work.head) * kDim;
          *reinterpret_cast<uint4*>(out + at + (j + quad_) * 8) =
              make_uint4(words[0], words[1], words[2], words[3]);
        }
      }
    }
  }

  Shared& shared_;
  const Shape& shape_;
  const int group_, thread_, quad_, row_;
  float* const total_;
  int tile_ = 0;
  Row all_[2];
  float scores_[64], made_[64];
  uint32_t weights_[32];
};

__global__ __launch_bounds__(kThreads, 1) void attention(const __grid_constant__ CUtensorMap map_q,
                                                         const __grid_constant__ CUtensorMap map_k,
                                                         const __grid_constant__ CUtensorMap map_v,
                                                         const int* pages, __nv_bfloat16* out,
                                                         const Shape shape) {
  extern __shared__ __align__(1024) uint8_t bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(bytes);
  if (threadIdx.x == 0) {
    init_barrier(&shared.q_full, 1);
    init_barrier(&shared.q_empty, 2);
    for (int s = 0; s < kStages; ++s) {
      init_barrier(&shared.k_full[s], 1);
      init_barrier(&shared.v_full[s], 1);
      init_barrier(&shared.k_empty[s], 2);
      init_barrier(&shared.v_empty[s], 2);
    }
    publish_barriers();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x < 32) produce(shared, &map_q, &map_k, &map_v, pages, shape);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    Consumer(shared, shape).run(out);
  }
}

}  // namespace

// q and out: bf16[queries, heads, 128]; k and v: bf16[pages, kv heads, PAGE, 128]; page_table:
// i32[ceil(context / PAGE)]. Queries are the context's last. Returns a cudaError_t, or -1.
extern "C" int attend(const void* q, const void* k, const void* v, const int* page_table, void* out,
                      int queries, int context, int heads, int heads_a_kv, int pages,
                      float scale_log2, void* stream) {
  CUtensorMap map_q, map_k, map_v;
  const uint64_t rows = static_cast<uint64_t>(pages) * (heads / heads_a_kv) * kPage;
  if (queries < 1 || queries > context || !describe(&map_q, q, queries, heads * kDim, kBlock) ||
      !describe(&map_k, k, rows, kDim, kPage) || !describe(&map_v, v, rows, kDim, kPage)) {
    return -1;
  }
  int device = 0, processors = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  cudaFuncSetAttribute(attention, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared));
  const int work = (queries + kBlock - 1) / kBlock * heads;
  const int programs = work < processors ? work : processors;
  attention<<<programs, kThreads, sizeof(Shared), static_cast<cudaStream_t>(stream)>>>(
      map_q, map_k, map_v, page_table, static_cast<__nv_bfloat16*>(out),
      Shape{queries, context, heads, heads_a_kv, scale_log2});
  return cudaGetLastError();
}
