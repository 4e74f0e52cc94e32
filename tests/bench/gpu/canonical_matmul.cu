// C[M, N] = A[M, K] B[N, K]^T in bf16 with fp32 sums, whose bits do not depend on M or on the tile.
//
// One element is summed by wgmma in steps of 16 along K from 0 on, whatever tile it lies in: so
// tiles may be chosen by what fills the device, row by row the result stays the same. K is not
// split. A program has one warpgroup that loads (TMA, mbarriers) and two that multiply, 64 rows
// each; it stays and takes one tile after the other. Two programs of a cluster may share a tile of
// A or B, of which each loads half for both. bench_matmul.py generates wgmma.inc, compiles one
// width and way of sharing at a time (-DTILE_N, -DSTAGES, -DCLUSTER, -DSHARE_A), and loads all of
// them.
#include "hopper.cuh"

template <int N>
struct Wgmma;
#include "wgmma.inc"

namespace {

constexpr int kTileM = 128, kTileN = TILE_N, kTileK = 64;
constexpr int kStages = STAGES, kCluster = CLUSTER;
constexpr bool kShareA = SHARE_A;
constexpr int kBytesA = kTileM * kTileK * 2, kBytesB = kTileN * kTileK * 2;
constexpr int kSharedBytes = kStages * (kBytesA + kBytesB + 2 * static_cast<int>(sizeof(uint64_t)));
constexpr int kThreads = 384, kGroupThreads = 128, kGroupRows = 64;

// Loads a box of a matrix; `n_programs` > 1 into the same place of each program of the cluster.
template <int n_programs>
__device__ __forceinline__ void load(void* to, const CUtensorMap* map, int k, int row,
                                     uint64_t* barrier) {
  if constexpr (n_programs == 1) {
    load_box(to, map, k, row, barrier);
  } else {
    load_box_for(n_programs, to, map, k, row, barrier);
  }
}

// Which tile a program takes as its t-th: neighbours in time share a row or column of tiles.
struct Tiles {
  int rows, columns;
  __device__ Tiles(int m, int n) {
    rows = (m + kTileM - 1) / kTileM;
    columns = (n + kTileN - 1) / kTileN;
    if constexpr (kCluster > 1) {
      (kShareA ? columns : rows) = ((kShareA ? columns : rows) + kCluster - 1) / kCluster;
    }
  }
  __device__ int row(int t, int rank) const {
    return kShareA ? t % rows : t % rows * kCluster + rank;
  }
  __device__ int column(int t, int rank) const {
    return kShareA ? t / rows * kCluster + rank : t / rows;
  }
};

struct Stages {
  uint8_t *a, *b;
  uint64_t *full, *empty;
};

__device__ void produce(const Stages& stages, const CUtensorMap* map_a, const CUtensorMap* map_b,
                        const Tiles& tiles, int rank, int steps) {
  constexpr int kPartsA = kShareA ? kCluster : 1, kPartsB = kShareA ? 1 : kCluster;
  int turn = 0;
  for (int t = blockIdx.x / kCluster; t < tiles.rows * tiles.columns; t += gridDim.x / kCluster) {
    const int row = tiles.row(t, rank) * kTileM + (kPartsA > 1 ? rank * (kTileM / kPartsA) : 0);
    const int column =
        tiles.column(t, rank) * kTileN + (kPartsB > 1 ? rank * (kTileN / kPartsB) : 0);
    for (int k = 0; k < steps; ++k, ++turn) {
      const int s = turn % kStages;
      wait(stages.empty + s, turn / kStages & 1 ^ 1);
      expect_bytes(stages.full + s, kBytesA + kBytesB);
      load<kPartsA>(stages.a + s * kBytesA + (kPartsA > 1 ? rank * (kBytesA / kPartsA) : 0), map_a,
                    k * kTileK, row, stages.full + s);
      load<kPartsB>(stages.b + s * kBytesB + (kPartsB > 1 ? rank * (kBytesB / kPartsB) : 0), map_b,
                    k * kTileK, column, stages.full + s);
    }
  }
}

__device__ __forceinline__ void release(const Stages& stages, int turn, int thread) {
  if (thread < kCluster) arrive_at(stages.empty + turn % kStages, thread);
}

__device__ void consume(const Stages& stages, const Tiles& tiles, int rank, int steps,
                        __nv_bfloat16* c, int m, int n) {
  const int group = threadIdx.x / kGroupThreads - 1, thread = threadIdx.x % kGroupThreads;
  const int lane = thread % 32;
  int turn = 0;
  for (int t = blockIdx.x / kCluster; t < tiles.rows * tiles.columns; t += gridDim.x / kCluster) {
    float sums[kTileN / 2];
    for (int k = 0; k < steps; ++k, ++turn) {
      const int s = turn % kStages;
      wait(stages.full + s, turn / kStages & 1);
      const uint64_t a = descriptor(stages.a + s * kBytesA + group * kGroupRows * kTileK * 2);
      const uint64_t b = descriptor(stages.b + s * kBytesB);
      hold(sums);
      fence_products();
#pragma unroll
      for (int i = 0; i < kTileK / 16; ++i) {
        Wgmma<kTileN>::run(sums, a + i * 2, b + i * 2, (k | i) != 0);
      }
      commit_products();
      // One product stays under way; what the one before read may be overwritten.
      await_products<1>();
      if (k > 0) release(stages, turn - 1, thread);
    }
    await_products<0>();
    hold(sums);
    release(stages, turn - 1, thread);
    const int row = tiles.row(t, rank) * kTileM + group * kGroupRows + thread / 32 * 16 + lane / 4;
    store_tile<kTileN>(sums, c, row, tiles.column(t, rank) * kTileN, m, n, lane % 4);
  }
}

__global__ __launch_bounds__(kThreads, 1) void matmul(const __grid_constant__ CUtensorMap map_a,
                                                      const __grid_constant__ CUtensorMap map_b,
                                                      __nv_bfloat16* c, int m, int n, int k) {
  extern __shared__ __align__(1024) uint8_t shared[];
  uint8_t* b = shared + kStages * kBytesA;
  auto* full = reinterpret_cast<uint64_t*>(b + kStages * kBytesB);
  const Stages stages{shared, b, full, full + kStages};
  int rank = 0;
  if constexpr (kCluster > 1) asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      init_barrier(stages.full + s, 1);
      init_barrier(stages.empty + s, 2 * kCluster);
    }
    publish_barriers();
  }
  sync_programs<kCluster>();
  const Tiles tiles(m, n);
  if (threadIdx.x < kGroupThreads) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) produce(stages, &map_a, &map_b, tiles, rank, k / kTileK);
    __syncwarp();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    consume(stages, tiles, rank, k / kTileK, c, m, n);
  }
  sync_programs<kCluster>();  // who ends first leaves barriers at which the others still arrive
}

int ceil_div(int x, int y) { return (x + y - 1) / y; }

}  // namespace

// Row-major, 16-byte aligned; k a multiple of 64, n of 8. Returns a cudaError_t, or -1 for sizes
// that TMA does not take.
extern "C" int ENTRY(const void* a, const void* b, void* c, int m, int n, int k, void* stream) {
  CUtensorMap map_a, map_b;
  if (k % kTileK || n % 8 || !describe(&map_a, a, m, k, kShareA ? kTileM / kCluster : kTileM) ||
      !describe(&map_b, b, n, k, kShareA ? kTileN : kTileN / kCluster)) {
    return -1;
  }
  const int rows = ceil_div(m, kTileM), columns = ceil_div(n, kTileN);
  const int programs =
      (kShareA ? rows * ceil_div(columns, kCluster) : ceil_div(rows, kCluster) * columns) *
      kCluster;
  int device = 0, processors = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  cudaFuncSetAttribute(matmul, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {kCluster, 1, 1};
  cudaLaunchConfig_t config{};
  const int most = processors / kCluster * kCluster;
  config.gridDim = dim3(programs < most ? programs : most);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kSharedBytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &cluster;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, matmul, map_a, map_b, static_cast<__nv_bfloat16*>(c), m, n, k);
}
