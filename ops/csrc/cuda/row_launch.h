// How kernels are launched whose rows are shared by several blocks, see row_group.cuh. For .cu
// files only.
#ifndef BATON_OPS_CSRC_CUDA_ROW_LAUNCH_H_
#define BATON_OPS_CSRC_CUDA_ROW_LAUNCH_H_

#include <cuda_runtime.h>

#include "early_launch.h"
#include "launch.h"

namespace baton_ops::cuda {

constexpr int kRowBlocks = 8;               // of a cluster, where there are clusters
constexpr unsigned kPortableBlocks = 8;     // more of a cluster must be asked for
constexpr int64_t kVocabOfOneBlock = 4096;  // up to so many logits, more blocks do not pay

// How many blocks share a row: by vocabulary and device alone, so that sums keep their order.
inline unsigned BlocksOfRow(int64_t vocab) {
  return vocab > kVocabOfOneBlock && Capability() >= 9 ? kRowBlocks : 1;
}

struct ClusterGrid {
  int64_t rows;
  unsigned blocks;  // of each row
  unsigned threads;
  size_t shared_bytes = 0;
};

// A launch of clusters; not to be copied, for it points to its own attributes.
struct ClusterLaunch {
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config{};
  ClusterLaunch(const ClusterGrid& grid, Stream stream) {
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim = {grid.blocks, 1, 1};
    config.gridDim = dim3(static_cast<unsigned>(grid.rows) * grid.blocks);
    config.blockDim = dim3(grid.threads);
    config.dynamicSmemBytes = grid.shared_bytes;
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = attributes;
    config.numAttrs = Capability() < 9 ? 0 : grid.blocks > 1 ? 2 : 1;
  }
  ClusterLaunch(const ClusterLaunch&) = delete;
  ClusterLaunch& operator=(const ClusterLaunch&) = delete;
};

// Asks for what a kernel does not have by itself.
template <class Params>
Error AllowCluster(void (*kernel)(Params), const ClusterGrid& grid) {
  constexpr size_t kWithoutAsking = 24 << 10;  // what static shared memory leaves of 48 KiB
  if (grid.shared_bytes > kWithoutAsking) {
    const cudaError_t status = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(grid.shared_bytes));
    if (status != cudaSuccess) return ErrorOf(status);
  }
  if (grid.blocks <= kPortableBlocks) return nullptr;
  return ErrorOf(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
}

// Whether the device, or the part of it that this process has, takes such a cluster. That it is
// refused is an answer, and no error that whoever looks next may be told of.
template <class Params>
bool TakesCluster(void (*kernel)(Params), const ClusterGrid& grid) {
  if (Capability() < 9) return false;
  if (AllowCluster(kernel, grid)) {
    (void)cudaGetLastError();
    return false;
  }
  ClusterLaunch launch(grid, nullptr);
  launch.config.attrs = launch.attributes + 1;  // what it is asked about alone
  launch.config.numAttrs = 1;
  int clusters = 0;
  if (cudaOccupancyMaxActiveClusters(&clusters, kernel, &launch.config) != cudaSuccess) {
    (void)cudaGetLastError();
    return false;
  }
  return clusters > 0;
}

// Every block of `kernel` must call WaitForEarlierGrids, as for LaunchEarly.
template <class Params>
Error LaunchRows(void (*kernel)(Params), const ClusterGrid& grid, const Params& params,
                 Stream stream) {
  if (const Error error = AllowCluster(kernel, grid)) return error;
  const ClusterLaunch launch(grid, stream);
  return ErrorOf(cudaLaunchKernelEx(&launch.config, kernel, params));
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_CSRC_CUDA_ROW_LAUNCH_H_
