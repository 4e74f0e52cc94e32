// The top k of rows of 103,424 bf16 logits out of CUB's batched top-k, which takes segments that
// fit a block: 16 segments of each row first, then what those left. Its result is unordered, and
// which of equal logits it keeps is unspecified.
#include <cuda_bf16.h>

#include <cub/device/device_batched_topk.cuh>
#include <cuda/iterator>

namespace {

constexpr int kSegments = 16, kSegmentSize = 6464;
constexpr int kTopK = 20;

template <class T>
struct Strided {
  T* base;
  int stride;
  __host__ __device__ T* operator()(int i) const { return base + static_cast<int64_t>(i) * stride; }
};

struct Ids {
  __host__ __device__ auto operator()(int segment) const {
    return cuda::make_counting_iterator(segment % kSegments * kSegmentSize);
  }
};

template <class F>
auto Each(F f) {
  return cuda::make_transform_iterator(cuda::make_counting_iterator(0), f);
}

template <int kSize, class Keys, class Values>
cudaError_t Stage(void* scratch, size_t& bytes, Keys keys, Values values, __nv_bfloat16* keys_out,
                  int* values_out, int segments, cudaStream_t stream) {
  const auto loose = cuda::execution::require(cuda::execution::determinism::not_guaranteed,
                                              cuda::execution::tie_break::unspecified,
                                              cuda::execution::output_ordering::unsorted);
  const auto env = cuda::std::execution::env{cuda::stream_ref{stream}, loose};
  return cub::DeviceBatchedTopK::MaxPairs(
      scratch, bytes, keys, Each(Strided<__nv_bfloat16>{keys_out, kTopK}), values,
      Each(Strided<int>{values_out, kTopK}), cuda::args::constant<kSize>{},
      cuda::args::constant<kTopK>{}, segments, env);
}

}  // namespace

// Without scratch, sets `bytes`. `part_*` hold rows * 16 * 20 entries, `*_out` rows * 20.
extern "C" int cub_topk(void* scratch, size_t* bytes, const __nv_bfloat16* logits, int rows,
                        __nv_bfloat16* part_keys, int* part_ids, __nv_bfloat16* keys_out,
                        int* ids_out, cudaStream_t stream) {
  const Strided<const __nv_bfloat16> whole{logits, kSegmentSize};
  const Strided<const __nv_bfloat16> left_keys{part_keys, kSegments * kTopK};
  const Strided<const int> left_ids{part_ids, kSegments * kTopK};
  size_t first = *bytes, second = *bytes;
  cudaError_t error = Stage<kSegmentSize>(scratch, first, Each(whole), Each(Ids{}), part_keys,
                                          part_ids, rows * kSegments, stream);
  if (error != cudaSuccess) return error;
  error = Stage<kSegments * kTopK>(scratch, second, Each(left_keys), Each(left_ids), keys_out,
                                   ids_out, rows, stream);
  if (!scratch) *bytes = first > second ? first : second;
  return error;
}
