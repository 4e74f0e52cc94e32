// C[M, N] = A[M, K] B[N, K]^T for few rows, with the bits of canonical_matmul.cu: an element is
// summed by wgmma in steps of 16 along K from 0 on, never split.
//
// Time goes into reading B, so B is cut into columns of tiles that give every multiprocessor its
// share, and a ring takes what shared memory there is. A tile has 64 rows, but only the rows that
// exist are loaded: wgmma reads whatever lies behind them, and makes rows that nobody stores.
// Programs of a cluster share A, of which each loads its part for all. B does not depend on the
// kernel before, so a launch that overlaps that one fills its ring with B first.
// bench_matmul_few.py compiles one width, cluster and number of programs a multiprocessor at a
// time.
#include "hopper.cuh"

template <int N>
struct Wgmma;
#include "wgmma.inc"

namespace {

constexpr int kTileN = TILE_N, kCluster = CLUSTER;
constexpr int kProgramsAProcessor = PROGRAMS;
constexpr int kBoxes = BOXES;  // boxes of 64 along K in a stage
// Boxes of B are as wide as one read; more would be read twice.
constexpr CUtensorMapL2promotion kPromotion = CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
constexpr int kMaxRows = 64, kRowBytes = 128, kMaxStages = 48;
constexpr int kConsumers = 128, kThreads = kConsumers + 32;
constexpr int kBytesB = kTileN * kRowBytes;
constexpr int kHeadBytes = 1024, kSharedBytes = (228 / kProgramsAProcessor - 1) * 1024;
static_assert(2 * kMaxStages * sizeof(uint64_t) <= kHeadBytes);

// Stages of kBoxes boxes of A and as many of B; `rows` of A are loaded.
struct Ring {
  uint8_t* bytes;
  uint64_t *full, *empty;
  int stages, rows;
  __device__ int stage_bytes() const { return kBoxes * (rows * kRowBytes + kBytesB); }
  __device__ uint8_t* a(int s, int box) const {
    return bytes + s * stage_bytes() + box * rows * kRowBytes;
  }
  __device__ uint8_t* b(int s, int box) const { return a(s, kBoxes) + box * kBytesB; }
};

// How many stages fit; the last may be read beyond its end.
int stages_for(int rows) {
  const int stage = kBoxes * (rows * kRowBytes + kBytesB);
  const int read = (kMaxRows + (kBoxes - 1) * rows) * kRowBytes;
  const int beyond = read > stage ? read - stage : 0;
  const int fit = (kSharedBytes - kHeadBytes - beyond) / stage;
  return fit < kMaxStages ? fit : kMaxStages;
}

// Where in the tiles of a program, and in the ring, a load or product is.
struct Turn {
  int tile, k = 0, s = 0, phase = 0;
  __device__ explicit Turn(int first) : tile(first) {}
  __device__ void advance(int steps, int stride, int stages) {
    if (++k == steps) {
      k = 0;
      tile += stride;
    }
    if (++s == stages) {
      s = 0;
      phase ^= 1;
    }
  }
};

struct Share {
  int first, stride, rank, tiles, steps;
  __device__ Share(int n, int k) : steps(k / (kBoxes * 64)) {
    rank = blockIdx.x % kCluster;
    first = blockIdx.x / kCluster * kCluster + rank;
    stride = gridDim.x;
    const int columns = (n + kTileN - 1) / kTileN;
    const int clusters = (columns + kCluster - 1) / kCluster, mine = blockIdx.x / kCluster;
    const int step = gridDim.x / kCluster;
    tiles = mine < clusters ? (clusters - 1 - mine) / step + 1 : 0;
  }
};

__device__ void produce(const Ring& ring, const CUtensorMap* map_a, const CUtensorMap* map_b,
                        const Share& share) {
  const int turns = share.tiles * share.steps, part = ring.rows / kCluster;
  const int ahead = min(turns, ring.stages);
  const auto load_weights = [&](const Turn& t) {
    expect_bytes(ring.full + t.s, ring.stage_bytes());
    for (int box = 0; box < kBoxes; ++box) {
      load_box_once(ring.b(t.s, box), map_b, (t.k * kBoxes + box) * 64, t.tile * kTileN,
                    ring.full + t.s);
    }
  };
  const auto load_rows = [&](const Turn& t) {
    const int row = kCluster > 1 ? share.rank * part : 0;
    for (int box = 0; box < kBoxes; ++box) {
      uint8_t* to = ring.a(t.s, box) + row * kRowBytes;
      const int column = (t.k * kBoxes + box) * 64;
      if constexpr (kCluster == 1) {
        load_box(to, map_a, column, row, ring.full + t.s);
      } else {
        load_box_for(kCluster, to, map_a, column, row, ring.full + t.s);
      }
    }
  };
  Turn turn(share.first), behind(share.first);
  for (int i = 0; i < ahead; ++i, turn.advance(share.steps, share.stride, ring.stages)) {
    load_weights(turn);
  }
  await_previous();
  for (int i = 0; i < ahead; ++i, behind.advance(share.steps, share.stride, ring.stages)) {
    load_rows(behind);
  }
  for (int i = ahead; i < turns; ++i, turn.advance(share.steps, share.stride, ring.stages)) {
    wait(ring.empty + turn.s, turn.phase ^ 1);
    load_weights(turn);
    load_rows(turn);
  }
}

__device__ __forceinline__ void release(const Ring& ring, int s) {
  if (threadIdx.x < kCluster) arrive_at(ring.empty + s, threadIdx.x);
}

__device__ void consume(const Ring& ring, const Share& share, __nv_bfloat16* c, int m, int n) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
  Turn turn(share.first);
  for (int t = 0; t < share.tiles; ++t) {
    const int tile = turn.tile;
    float sums[kTileN / 2];
    int last = 0;
    for (int k = 0; k < share.steps; ++k) {
      wait(ring.full + turn.s, turn.phase);
      hold(sums);
      fence_products();
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        const uint64_t a = descriptor(ring.a(turn.s, box));
        const uint64_t b = descriptor(ring.b(turn.s, box));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          Wgmma<kTileN>::run(sums, a + i * 2, b + i * 2, (k | box | i) != 0);
        }
      }
      commit_products();
      // One stage's products stay under way; what those before read may be overwritten.
      await_products<1>();
      if (k > 0) release(ring, last);
      last = turn.s;
      turn.advance(share.steps, share.stride, ring.stages);
    }
    await_products<0>();
    hold(sums);
    release(ring, last);
    store_tile<kTileN>(sums, c, row, tile * kTileN, m, n, lane % 4);
  }
}

__global__ __launch_bounds__(kThreads, kProgramsAProcessor) void matmul(
    const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
    __nv_bfloat16* c, int m, int n, int k, int rows, int stages) {
  extern __shared__ __align__(1024) uint8_t shared[];
  auto* full = reinterpret_cast<uint64_t*>(shared);
  const Ring ring{shared + kHeadBytes, full, full + kMaxStages, stages, rows};
  if (threadIdx.x == 0) {
    for (int s = 0; s < stages; ++s) {
      init_barrier(ring.full + s, 1);
      init_barrier(ring.empty + s, kCluster);
    }
    publish_barriers();
  }
  if (threadIdx.x == kConsumers) {
    prefetch_map(&map_a);
    prefetch_map(&map_b);
  }
  let_next_start();
  sync_programs<kCluster>();
  const Share share(n, k);
  if (threadIdx.x < kConsumers) {
    consume(ring, share, c, m, n);
  } else {
    if (threadIdx.x == kConsumers) produce(ring, &map_a, &map_b, share);
    __syncwarp();
  }
  sync_programs<kCluster>();  // who ends first leaves barriers at which the others still arrive
}

}  // namespace

// Row-major, 16-byte aligned; m at most 64, k a multiple of 64 BOXES, n of 8. With
// `overlaps`, starts while the kernel before it on the stream ends. Returns a cudaError_t, or -1
// for sizes that it does not take.
extern "C" int ENTRY(const void* a, const void* b, void* c, int m, int n, int k, int overlaps,
                     void* stream) {
  CUtensorMap map_a, map_b;
  const int unit = 8 * kCluster, rows = (m + unit - 1) / unit * unit;
  if (m < 1 || rows > kMaxRows || k % (kBoxes * 64) || n % 8 ||
      !describe(&map_a, a, m, k, rows / kCluster) ||
      !describe(&map_b, b, n, k, kTileN, kPromotion)) {
    return -1;
  }
  const int columns = (n + kTileN - 1) / kTileN;
  const int wanted = (columns + kCluster - 1) / kCluster * kCluster;
  const int most = processors_of_device() * kProgramsAProcessor / kCluster * kCluster;
  return launch(
      matmul, {wanted < most ? wanted : most, kThreads, kSharedBytes, kCluster, overlaps != 0},
      stream, map_a, map_b, static_cast<__nv_bfloat16*>(c), m, n, k, rows, stages_for(rows));
}
