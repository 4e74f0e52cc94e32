// Attention of the last few queries of many paged contexts, with the bits of canonical_attention.cu
// for the same queries: the order is attention_order.cuh's.
//
// The work is the list of splits of all contexts and heads of keys and values, cut into as many
// equal runs as there are multiprocessors: which program takes a split, and what its neighbours
// are, does not matter to its bits. A program reads tiles of keys and values through one ring (one
// warp) and multiplies them by the queries of all heads that share them (one warpgroup): at most 32
// rows, of which a lane has one (wgmma's rows r + 8 are zeros that nobody stores). Splits from a
// context's first on are merged in registers. Where a context does not lie whole in one program,
// these, merged, and each of the others are left in memory, and the program that brings the last
// of them merges them, in order. bench_decode.py generates wgmma.inc and compiles this.
#include "decode_left.cuh"

namespace {

#include "wgmma.inc"

constexpr int kConsumers = 128, kThreads = kConsumers + 32, kRows = 32;
constexpr int kStages = STAGES;
constexpr int kTilePages = kTile / kPage, kSplitPages = kSplitTiles * kTilePages;
constexpr int kPagesALane = (kSplitPages + 31) / 32;
constexpr int kHalfBytes = kTile * 128, kTileBytes = 2 * kHalfBytes;
// Tiles are read by halves of 128-byte rows: whole 256 bytes would be read twice.
constexpr CUtensorMapL2promotion kPromotion = CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
constexpr int kQueryHalfBytes = 64 * 128;

struct Shared {
  uint8_t ring[kStages][kTileBytes], q[2 * kQueryHalfBytes];
  uint64_t full[kStages], empty[kStages];
  Contexts contexts;
  int is_last;
};

// A place in the ring.
struct Turn {
  int s = 0, phase = 0;
  __device__ void advance() {
    if (++s == kStages) {
      s = 0;
      phase ^= 1;
    }
  }
};

// The pages of a split, kPagesALane a lane; behind the context's last, that one again.
__device__ __forceinline__ void read_pages(int (&ids)[kPagesALane], const int* table, int split,
                                           int last_page) {
#pragma unroll
  for (int i = 0; i < kPagesALane; ++i) {
    ids[i] =
        table[min(split * kSplitPages + i * 32 + static_cast<int>(threadIdx.x % 32), last_page)];
  }
}

__device__ void produce(Shared& shared, const CUtensorMap* map_k, const CUtensorMap* map_v,
                        const int* tables, const Shape& shape) {
  const int lane = threadIdx.x % 32, page = lane / 2, half = lane % 2;
  const int at = half * kHalfBytes + page * kPage * 128;
  Turn turn;
  shared.contexts.for_each_run(shape.rows, shape.kv_heads, [&](const Run& run) {
    const int* table = tables + static_cast<size_t>(run.row) * shape.max_pages;
    const int last_page = (run.context - 1) / kPage;
    int next[kPagesALane];
    read_pages(next, table, run.first, last_page);
    for (int split = run.first; split < run.last; ++split) {
      int ids[kPagesALane];
#pragma unroll
      for (int i = 0; i < kPagesALane; ++i) ids[i] = next[i];
      read_pages(next, table, split + 1, last_page);
      for (int tile = 0; tile < run.tiles(split); ++tile) {
        const int index = tile * kTilePages + page % kTilePages;
        int id = 0;
#pragma unroll
        for (int i = 0; i < kPagesALane; ++i) {
          const int got = __shfl_sync(~0u, ids[i], index % 32);
          if (index / 32 == i) id = got;
        }
        const int row = (id * shape.kv_heads + run.head) * kPage;
        for (const CUtensorMap* map : {map_k, map_v}) {
          if (lane == 0) {
            wait(shared.empty + turn.s, turn.phase ^ 1);
            expect_bytes(shared.full + turn.s, kTileBytes);
          }
          __syncwarp();
          if (page < kTilePages) {
            load_box_once(shared.ring[turn.s] + at, map, half * 64, row, shared.full + turn.s);
          }
          turn.advance();
        }
      }
    }
  });
}

// The warpgroup's state: scores, what a split has made and probabilities, of which rows r + 8 stay
// zero, and what splits before it have made.
class Consumer {
 public:
  __device__ Consumer(Shared& shared, const Shape& shape, const Left& left)
      : shared_(shared),
        shape_(shape),
        left_(left),
        quad_(threadIdx.x % 4),
        row_(threadIdx.x / 32 * 8 + threadIdx.x % 32 / 4) {}

  __device__ void run(const __nv_bfloat16* q, __nv_bfloat16* out) {
    for (int i = threadIdx.x; i < 2 * kQueryHalfBytes / 16; i += kConsumers) {
      reinterpret_cast<uint4*>(shared_.q)[i] = uint4{};
    }
    shared_.contexts.for_each_run(shape_.rows, shape_.kv_heads, [&](const Run& run) {
      load_queries(run, q);
      position_ = run.context - shape_.queries + row_ / shape_.heads_a_kv;
      Row all;
#pragma unroll
      for (float& value : total_) value = 0.f;
      for (int split = run.first; split < run.last; ++split) {
        const Row row = attend(run, split);
        if (run.first == 0) {
          merge(all, row);
        } else {
          leave(row, [&](int j) { return made_of(j); }, run.item + split - run.first);
        }
      }
      if (run.is_whole()) {
        store(run, all, out);
      } else {
        if (run.first == 0) leave(all, [&](int j) { return total_[j]; }, run.item);
        bring(run, out);
      }
    });
  }

 private:
  __device__ __forceinline__ void sync() {
    asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory");
  }

  // Row r of the queries is the product's row r / 8 * 16 + r % 8.
  __device__ __forceinline__ void load_queries(const Run& run, const __nv_bfloat16* q) {
    sync();
    for (int i = threadIdx.x; i < shape_.used_rows() * 16; i += kConsumers) {
      const int row = i / 16, to = row / 8 * 16 + row % 8, chunk = i % 16;
      uint8_t* at = shared_.q + chunk / 8 * kQueryHalfBytes + to * 128;
      *reinterpret_cast<uint4*>(at + ((chunk ^ row) % 8) * 16) =
          *reinterpret_cast<const uint4*>(q + shape_.element(run, row) + chunk * 8);
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    sync();
  }

  // Waits for the ring's next tile, and returns it.
  __device__ __forceinline__ const uint8_t* next_tile() {
    wait(shared_.full + turn_.s, turn_.phase);
    return shared_.ring[turn_.s];
  }
  __device__ __forceinline__ void release_tile() {
    if (threadIdx.x == 0) arrive(shared_.empty + turn_.s);
    turn_.advance();
  }
  __device__ __forceinline__ void settle() {
    hold(scores_);
    hold(made_);
    hold(weights_);
    fence_products();
  }

  __device__ __forceinline__ Row attend(const Run& run, int split) {
    Row row;
#pragma unroll
    for (int i = 0; i < 64; ++i) scores_[i] = made_[i] = 0.f;
#pragma unroll
    for (int i = 0; i < 32; ++i) weights_[i] = 0;
    const int tiles = run.tiles(split);
    for (int tile = 0; tile < tiles; ++tile) {
      score();
      hide((split * kSplitTiles + tile) * kTile);
      const float alpha = soften(row, scores_, 0, shape_.scale_log2);
#pragma unroll
      for (int j = 0; j < 32; ++j) made_of(j) *= alpha;
#pragma unroll
      for (int j = 0; j < 16; ++j) weights_[j * 2] = packed(scores_[j * 4], scores_[j * 4 + 1]);
      weigh();
    }
    return row;
  }

  __device__ __forceinline__ void score() {
    const uint64_t q = descriptor(shared_.q), k = descriptor(next_tile());
    settle();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      multiply(scores_, q + i / 4 * (kQueryHalfBytes >> 4) + i % 4 * 2,
               k + i / 4 * (kHalfBytes >> 4) + i % 4 * 2, i != 0);
    }
    commit_products();
    await_products<0>();
    hold(scores_);
    release_tile();
  }

  // Hides what a query must not see.
  __device__ __forceinline__ void hide(int first_key) {
    if (first_key + kTile - 1 <= position_) return;
#pragma unroll
    for (int j = 0; j < 32; ++j) {
      const int i = j / 2 * 4 + j % 2;
      if (first_key + i / 4 * 8 + quad_ * 2 + i % 4 > position_) scores_[i] = -INFINITY;
    }
  }

  __device__ __forceinline__ void weigh() {
    const uint64_t values = descriptor(next_tile(), kHalfBytes);
    settle();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      add_weighted(made_, weights_[i * 4], weights_[i * 4 + 1], weights_[i * 4 + 2],
                   weights_[i * 4 + 3], values + i * (2048 >> 4));
    }
    commit_products();
    await_products<0>();
    hold(made_);
    release_tile();
  }

  // The j-th of this lane's 32 elements of its row, column j / 2 * 8 + quad * 2 + j % 2.
  __device__ __forceinline__ float& made_of(int j) { return made_[j / 2 * 4 + j % 2]; }

  __device__ __forceinline__ void merge(Row& all, const Row& row) {
    const Merge merged(all, row);
#pragma unroll
    for (int j = 0; j < 32; ++j) {
      total_[j] = merged.sum(total_[j], made_of(j));
    }
  }

  __device__ __forceinline__ void store(const Run& run, const Row& all, __nv_bfloat16* out) {
    const float share = share_of(all.sum);
#pragma unroll
    for (int j = 0; j < 16; j += 4) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        words[i] = packed(total_[(j + i) * 2] * share, total_[(j + i) * 2 + 1] * share);
      }
      transpose_quad(words, quad_);
      if (row_ < shape_.used_rows()) {
        *reinterpret_cast<uint4*>(out + shape_.element(run, row_) + (j + quad_) * 8) =
            make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }

  template <class Made>
  __device__ __forceinline__ void leave(const Row& row, Made made, int item) {
    if (row_ >= shape_.used_rows()) return;
    const uint32_t at = item * shape_.used_rows() + row_;
    left_.sums[at * 4 + quad_] = row.sum;
    if (quad_ == 0) left_.tops[at] = row.top;
#pragma unroll
    for (int j = 0; j < 32; j += 2) {
      *reinterpret_cast<float2*>(left_.made + at * kDim + j * 4 + quad_ * 2) =
          make_float2(made(j), made(j + 1));
    }
  }

  // Says that the splits of a run are there; who brings the last ones merges them all.
  __device__ __forceinline__ void bring(const Run& run, __nv_bfloat16* out) {
    __threadfence();
    sync();
    if (threadIdx.x == 0) {
      int* brought = left_.brought + run.row * shape_.kv_heads + run.head;
      const int count = run.last - run.first;
      shared_.is_last = atomicAdd(brought, count) + count == run.splits;
      if (shared_.is_last) *brought = 0;
    }
    sync();
    if (!shared_.is_last) return;
    __threadfence();
    left_.merge(run, shape_, shared_.contexts.in_first_run(run), out);
  }

  Shared& shared_;
  const Shape& shape_;
  const Left& left_;
  const int quad_, row_;
  int position_ = 0;
  Turn turn_;
  float scores_[64], made_[64], total_[32];
  uint32_t weights_[32];
};

__global__ __launch_bounds__(kThreads, 1) void decode(const __grid_constant__ CUtensorMap map_k,
                                                      const __grid_constant__ CUtensorMap map_v,
                                                      const __nv_bfloat16* q, const int* tables,
                                                      const int* contexts, __nv_bfloat16* out,
                                                      const Left left, const Shape shape) {
  extern __shared__ __align__(1024) uint8_t bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(bytes);
  let_next_start();
  if (threadIdx.x == kConsumers) {
    prefetch_map(&map_k);
    prefetch_map(&map_v);
  }
  await_previous();
  if (threadIdx.x < 32) {
    shared.contexts.read(contexts, shape.rows, shape.kv_heads);
  } else if (threadIdx.x == 32) {
    for (int s = 0; s < kStages; ++s) {
      init_barrier(shared.full + s, 1);
      init_barrier(shared.empty + s, 1);
    }
    publish_barriers();
  }
  __syncthreads();
  if (threadIdx.x < kConsumers) {
    Consumer(shared, shape, left).run(q, out);
  } else {
    produce(shared, &map_k, &map_v, tables, shape);
  }
}

}  // namespace

// q and out: bf16[rows, queries, heads, 128], a row's queries being its context's last; k and v:
// bf16[pages, kv heads, PAGE, 128]; page_tables: i32[rows, max_pages]; contexts: i32[rows], 0 for a
// row that is not there, whose output is left alone. For `splits` splits of all heads and contexts
// together, made: f32[splits, queries * heads_a_kv, 128], sums: f32[.., 4], tops: f32[..]; brought:
// i32[rows, kv heads] of zeros, which it leaves. Slots of the context's last page behind its end
// must be finite. Returns a cudaError_t, or -1 for sizes that it does not take.
extern "C" int decode_attention(const void* q, const void* k, const void* v,
                                const void* page_tables, const void* contexts, void* out,
                                void* made, void* sums, void* tops, void* brought, int rows,
                                int queries, int kv_heads, int heads_a_kv, int max_pages, int pages,
                                float scale_log2, int overlaps, void* stream) {
  CUtensorMap map_k, map_v;
  const uint64_t keys = static_cast<uint64_t>(pages) * kv_heads * kPage;
  if (rows < 1 || rows > kMaxContexts || queries < 1 || queries * heads_a_kv > kRows ||
      !describe(&map_k, k, keys, kDim, kPage, kPromotion) ||
      !describe(&map_v, v, keys, kDim, kPage, kPromotion)) {
    return -1;
  }
  const Left left{static_cast<float*>(made), static_cast<float*>(sums), static_cast<float*>(tops),
                  static_cast<int*>(brought)};
  return launch(decode, {processors_of_device(), kThreads, sizeof(Shared), 1, overlaps != 0},
                stream, map_k, map_v, static_cast<const __nv_bfloat16*>(q),
                static_cast<const int*>(page_tables), static_cast<const int*>(contexts),
                static_cast<__nv_bfloat16*>(out), left,
                Shape{rows, queries, kv_heads, heads_a_kv, max_pages, scale_log2});
}
