// How kernels are launched whose rows are shared by several blocks, see row_group.cuh. For .cu
// files only.
#ifndef BATON_OPS_CSRC_CUDA_ROW_LAUNCH_H_
#define BATON_OPS_CSRC_CUDA_ROW_LAUNCH_H_

#include <cuda_runtime.h>

#include "early_launch.h"
#include "launch.h"

namespace baton_ops::cuda {

constexpr int kRowBlocks = 8;               // of a cluster, where there are clusters
constexpr int64_t kVocabOfOneBlock = 4096;  // up to so many logits, more blocks do not pay

// How many blocks share a row: by vocabulary and device alone, so that sums keep their order.
inline unsigned BlocksOfRow(int64_t vocab) {
  return vocab > kVocabOfOneBlock && Capability() >= 9 ? kRowBlocks : 1;
}

struct RowGrid {
  int64_t rows;
  unsigned blocks;  // of each row
  unsigned threads;
  size_t shared_bytes = 0;
};

// Every block of `kernel` must call WaitForEarlierGrids, as for LaunchEarly.
template <class Params>
Error LaunchRows(void (*kernel)(Params), const RowGrid& grid, const Params& params, Stream stream) {
  constexpr size_t kWithoutAsking = 24 << 10;  // what static shared memory leaves of 48 KiB
  if (grid.shared_bytes > kWithoutAsking) {
    const cudaError_t status = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(grid.shared_bytes));
    if (status != cudaSuccess) return ErrorOf(status);
  }
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {grid.blocks, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(grid.rows) * grid.blocks);
  config.blockDim = dim3(grid.threads);
  config.dynamicSmemBytes = grid.shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  config.numAttrs = Capability() < 9 ? 0 : grid.blocks > 1 ? 2 : 1;
  return ErrorOf(cudaLaunchKernelEx(&config, kernel, params));
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_CSRC_CUDA_ROW_LAUNCH_H_
