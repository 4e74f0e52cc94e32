// The part of CUDA's runtime that launches kernels, on the host: a launch returns when its last
// cluster has ended. Clusters run one after another, in an order that is drawn, or blocks of a grid
// without clusters side by side.
#ifndef BATON_TESTS_CUDA_ON_HOST_CUDA_RUNTIME_H_
#define BATON_TESTS_CUDA_ON_HOST_CUDA_RUNTIME_H_

#include <map>
#include <set>

#include "cuda.h"
#include "device_language.h"

using cudaStream_t = void*;

enum cudaError_t { cudaSuccess, cudaErrorLaunchFailure };
enum cudaDeviceAttr {
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrComputeCapabilityMinor,
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrMaxSharedMemoryPerBlockOptin,
};
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess };
enum cudaDriverEntryPointFlags { cudaEnableDefault };
enum cudaFuncAttribute {
  cudaFuncAttributeMaxDynamicSharedMemorySize,
  cudaFuncAttributePreferredSharedMemoryCarveout,
  cudaFuncAttributeNonPortableClusterSizeAllowed,
};
enum { cudaSharedmemCarveoutMaxShared = 100 };  // per cent
enum cudaLaunchAttributeID {
  cudaLaunchAttributeProgrammaticStreamSerialization,
  cudaLaunchAttributeClusterDimension,
};

struct dim3 : host_cuda::Index {
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : host_cuda::Index{x, y, z} {}
};

struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int programmaticStreamSerializationAllowed;
    host_cuda::Index clusterDim;
  } val;
};

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

namespace host_cuda {

constexpr size_t kWithoutAsking = 48 << 10;
inline std::map<const void*, size_t> asked;  // dynamic shared memory, by kernel
inline std::set<const void*> asked_for_large_clusters;
inline int active_clusters = 1;  // that the device has room for, as it says when it is asked
inline int launches = 0;         // of kernels, since this was last set

struct Shape {
  Index grid;
  unsigned threads, cluster_blocks;
  size_t dynamic_bytes;
  bool is_early;
};

// Takes launches instead of running them, if set.
inline std::function<void(const std::function<void()>&, const Shape&)> recorder;

// What a device would refuse to launch, or null.
inline const char* Refusal(const Shape& shape, const void* kernel) {
  const auto is_side = [](unsigned blocks) { return blocks > 0 && blocks <= 65535; };
  if (shape.grid.x == 0 || !is_side(shape.grid.y) || !is_side(shape.grid.z)) return "not a grid";
  if (shape.threads == 0 || shape.threads > 1024) return "not a block";
  if (shape.grid.x % shape.cluster_blocks != 0) return "clusters do not divide the grid";
  const unsigned most_blocks = asked_for_large_clusters.count(kernel) ? 16 : 8;
  if (shape.cluster_blocks > most_blocks) return "more blocks of a cluster than were asked for";
  if (settings.capability < 9 && (shape.cluster_blocks > 1 || shape.is_early)) {
    return "this device has neither clusters nor early launches";
  }
  const auto allowed = asked.find(kernel);
  const size_t most = allowed == asked.end() ? kWithoutAsking : allowed->second;
  return shape.dynamic_bytes > most ? "more shared memory than was asked for" : nullptr;
}

inline void CheckEnd(const Shape& shape, const void* kernel) {
  const Block& block = cluster.blocks[0];
  if (block.shared_used > kWithoutAsking && asked.count(kernel) == 0 && failure[0] == 0) {
    snprintf(failure, sizeof(failure), "more shared memory than was asked for");
  }
  if (block.shared_used > static_cast<size_t>(settings.shared_bytes) && failure[0] == 0) {
    snprintf(failure, sizeof(failure), "more shared memory than a block of this device has");
  }
  for (const Fiber& fiber : cluster.fibers) {
    if (shape.is_early && !fiber.waited_for_grids && failure[0] == 0) {
      snprintf(failure, sizeof(failure), "a thread ended without waiting for earlier grids");
    }
  }
}

inline cudaError_t Run(const std::function<void()>& kernel, const void* name, const Shape& shape) {
  failure[0] = 0;
  if (const char* refusal = Refusal(shape, name)) {
    snprintf(failure, sizeof(failure), "%s", refusal);
    return cudaErrorLaunchFailure;
  }
  ++launches;
  if (recorder) {
    recorder(kernel, shape);
    return cudaSuccess;
  }
  cluster.random = settings.seed;
  blockDim = {shape.threads, 1, 1};
  gridDim = shape.grid;
  const unsigned across = shape.grid.x / shape.cluster_blocks, layer = across * shape.grid.y;
  const unsigned all = layer * shape.grid.z;
  const auto first = static_cast<unsigned>(Draw() % all);
  std::vector<Index> together;
  for (unsigned i = 0; i < all && failure[0] == 0; ++i) {
    const unsigned at = (first + i) % all;
    std::vector<Index> blocks;
    for (unsigned b = 0; b < shape.cluster_blocks; ++b) {
      const unsigned x = at % across * shape.cluster_blocks + b;
      blocks.push_back({x, at % layer / across, at / layer});
    }
    if (settings.is_side_by_side && shape.cluster_blocks == 1) {
      together.push_back(blocks[0]);
      continue;
    }
    RunCluster(kernel, blocks, shape.threads, shape.dynamic_bytes);
    CheckEnd(shape, name);
  }
  if (!together.empty()) {
    RunCluster(kernel, together, shape.threads, shape.dynamic_bytes);
    CheckEnd(shape, name);
  }
  return failure[0] == 0 ? cudaSuccess : cudaErrorLaunchFailure;
}

// kernel<<<grid, threads, dynamic, stream>>>(arguments...)
template <class... Parameters>
auto Launcher(void (*kernel)(Parameters...), dim3 grid, unsigned threads, size_t dynamic, void*) {
  return [=](Parameters... arguments) {
    const Shape shape{grid, threads, 1, dynamic, false};
    Run([=] { kernel(arguments...); }, reinterpret_cast<const void*>(kernel), shape);
  };
}

}  // namespace host_cuda

template <class... Parameters>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Parameters... arguments) {
  host_cuda::Shape shape{config->gridDim, config->blockDim.x, 1, config->dynamicSmemBytes, false};
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config->attrs[i];
    if (attribute.id == cudaLaunchAttributeClusterDimension) {
      shape.cluster_blocks = attribute.val.clusterDim.x;
    } else {
      shape.is_early = attribute.val.programmaticStreamSerializationAllowed != 0;
    }
  }
  const auto name = reinterpret_cast<const void*>(kernel);
  return host_cuda::Run([=] { kernel(arguments...); }, name, shape);
}

template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute attribute, int bytes) {
  if (attribute == cudaFuncAttributePreferredSharedMemoryCarveout) return cudaSuccess;
  if (attribute == cudaFuncAttributeNonPortableClusterSizeAllowed) {
    host_cuda::asked_for_large_clusters.insert(reinterpret_cast<const void*>(kernel));
    return cudaSuccess;
  }
  if (bytes > host_cuda::settings.shared_bytes) {
    snprintf(host_cuda::failure, sizeof(host_cuda::failure),
             "more shared memory than a block of this device has");
    return cudaErrorLaunchFailure;
  }
  host_cuda::asked[reinterpret_cast<const void*>(kernel)] = static_cast<size_t>(bytes);
  return cudaSuccess;
}

template <class Kernel>
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, Kernel*, const cudaLaunchConfig_t*) {
  *clusters = host_cuda::active_clusters;
  return cudaSuccess;
}

inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  const bool is_shared = attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin;
  *value = is_shared ? host_cuda::settings.shared_bytes : host_cuda::settings.capability;
  return cudaSuccess;
}
// Of the driver's functions there is the one.
inline cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                                    cudaDriverEntryPointFlags,
                                                    cudaDriverEntryPointQueryResult* found) {
  if (strcmp(name, "cuTensorMapEncodeTiled") != 0) return cudaErrorLaunchFailure;
  *function = reinterpret_cast<void*>(&cuTensorMapEncodeTiled);
  *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
inline cudaError_t cudaGetLastError() {
  return host_cuda::failure[0] == 0 ? cudaSuccess : cudaErrorLaunchFailure;
}
inline const char* cudaGetErrorString(cudaError_t) { return host_cuda::failure; }

#endif  // BATON_TESTS_CUDA_ON_HOST_CUDA_RUNTIME_H_
