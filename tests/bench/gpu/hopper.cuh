// What kernels for Hopper GPUs share here: barriers, loads, descriptors of wgmma, the store of a
// tile.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

__device__ __forceinline__ uint32_t address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void expect_bytes(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(barrier)),
               "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void wait(uint64_t* barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}\n" ::"r"(address(barrier)),
      "r"(parity)
      : "memory");
}

__device__ __forceinline__ void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(barrier)) : "memory");
}

// Arrives at the same barrier of another program of the cluster.
__device__ __forceinline__ void arrive_at(uint64_t* barrier, int program) {
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}\n" ::"r"(address(barrier)),
      "r"(program)
      : "memory");
}

__device__ __forceinline__ void init_barrier(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(barrier)), "r"(arrivals));
}

// Lets the copy engine and other programs see barriers that this thread made.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async;" ::: "memory");
}

// Says that a description is needed soon.
__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Loads a box of a matrix of 64 columns into shared memory.
__device__ __forceinline__ void load_box(void* to, const CUtensorMap* map, int column, int row,
                                         uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3}], [%4];" ::"r"(address(to)),
      "l"(map), "r"(column), "r"(row), "r"(address(barrier))
      : "memory");
}

// The same of what is read once: it need not stay in the L2 cache.
__device__ __forceinline__ void load_box_once(void* to, const CUtensorMap* map, int column, int row,
                                              uint64_t* barrier) {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(address(to)),
      "l"(map), "r"(column), "r"(row), "r"(address(barrier)), "l"(policy)
      : "memory");
}

// The same into the same place of each of the first `programs` programs of the cluster.
__device__ __forceinline__ void load_box_for(int programs, void* to, const CUtensorMap* map,
                                             int column, int row, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(address(to)),
      "l"(map), "r"(column), "r"(row), "r"(address(barrier)),
      "h"(static_cast<uint16_t>((1 << programs) - 1))
      : "memory");
}

// All threads of the cluster's programs meet.
template <int programs>
__device__ __forceinline__ void sync_programs() {
  if constexpr (programs > 1) {
    asm volatile(
        "barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;\n" ::
            : "memory");
  } else {
    __syncthreads();
  }
}

// Lets a kernel that was launched to overlap this one start as soon as there is room for it.
__device__ __forceinline__ void let_next_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Waits until the kernel before this one has ended and what it wrote can be seen.
__device__ __forceinline__ void await_previous() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Describes rows of 128 bytes, swizzled by 128 bytes, groups of 8 rows 1,024 bytes apart. Where the
// operand is transposed, `next_bytes` lie between blocks of 64 columns.
__device__ __forceinline__ uint64_t descriptor(const void* p, int next_bytes = 16) {
  return static_cast<uint64_t>((address(p) & 0x3FFFF) >> 4) |
         static_cast<uint64_t>(next_bytes >> 4) << 16 | uint64_t{1024 >> 4} << 32 |
         uint64_t{1} << 62;
}

// Keeps the compiler from moving reads or writes of these over a wgmma that is under way.
template <int n>
__device__ __forceinline__ void hold(float (&values)[n]) {
#pragma unroll
  for (float& value : values) asm volatile("" : "+f"(value)::"memory");
}

template <int n>
__device__ __forceinline__ void hold(uint32_t (&values)[n]) {
#pragma unroll
  for (uint32_t& value : values) asm volatile("" : "+r"(value)::"memory");
}

__device__ __forceinline__ void fence_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most n groups of products are under way.
template <int n>
__device__ __forceinline__ void await_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(n) : "memory");
}

// Gives lane q of four what all of them had as words[q], so that it can store 16 bytes at once.
__device__ __forceinline__ void transpose_quad(uint32_t (&words)[4], int q) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool upper = q & bit;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int low = bit == 1 ? 2 * i : i, high = low + bit;
      const uint32_t got = __shfl_xor_sync(~0u, upper ? words[low] : words[high], bit);
      (upper ? words[low] : words[high]) = got;
    }
  }
}

__device__ __forceinline__ uint32_t packed(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

// Stores a warpgroup's sums as bf16: of c's rows `row` and `row` + 8, from a column on, by lane q
// of a quad. Rows have n elements, a multiple of 8.
template <int width>
__device__ __forceinline__ void store_tile(const float (&sums)[width / 2], __nv_bfloat16* c,
                                           int row, int first_column, int m, int n, int q) {
  constexpr int kBlocks = width / 8, kWhole = kBlocks / 4 * 4;
#pragma unroll
  for (int j = 0; j < kWhole; j += 4) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = (j + i) * 4 + half * 2;
        words[i] = packed(sums[at], sums[at + 1]);
      }
      transpose_quad(words, q);
      const int r = row + half * 8, column = first_column + (j + q) * 8;
      if (r < m && column < n) {
        *reinterpret_cast<uint4*>(c + static_cast<size_t>(r) * n + column) =
            make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }
#pragma unroll
  for (int j = kWhole; j < kBlocks; ++j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row + half * 8, column = first_column + j * 8;
      if (r < m && column < n) {
        *reinterpret_cast<uint32_t*>(c + static_cast<size_t>(r) * n + column + q * 2) =
            packed(sums[j * 4 + half * 2], sums[j * 4 + half * 2 + 1]);
      }
    }
  }
}

// A matrix of bf16, row-major, 16-byte aligned, of which boxes of 64 columns are loaded. Promotion:
// how much of memory the L2 cache reads at once.
inline bool describe(CUtensorMap* map, const void* matrix, uint64_t rows, uint64_t columns,
                     uint32_t box_rows,
                     CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B) {
  const cuuint64_t sizes[2] = {columns, rows};
  const cuuint64_t strides[1] = {columns * 2};
  const cuuint32_t box[2] = {64, box_rows}, ones[2] = {1, 1};
  return cuTensorMapEncodeTiled(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(matrix),
                                sizes, strides, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                CU_TENSOR_MAP_SWIZZLE_128B, promotion,
                                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// How a kernel is launched; `overlaps` lets it start while the one before it ends.
struct Launch {
  int programs, threads, shared_bytes, cluster;
  bool overlaps;
};

template <class... Parameters, class... Arguments>
int launch(void (*kernel)(Parameters...), const Launch& how, void* stream, Arguments... arguments) {
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, how.shared_bytes);
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(how.programs);
  config.blockDim = dim3(how.threads);
  config.dynamicSmemBytes = how.shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  if (how.cluster > 1) {
    cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {static_cast<unsigned>(how.cluster), 1, 1};
  }
  if (how.overlaps) {
    cudaLaunchAttribute& overlap = attributes[config.numAttrs++];
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
  }
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

inline int processors_of_device() {
  int device = 0, processors = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  return processors;
}
