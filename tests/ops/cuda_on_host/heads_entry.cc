// The launch that norms, rotates and stores heads under a C name; its arguments are laid out by
// baton_testing/host_heads.py, eight bytes each. Returns null or what went wrong.
#include "rewritten/decoder.h"
#include "shims/fibers.h"

using namespace baton_ops::cuda;

namespace {

template <class T>
T* At(const int64_t*& words) {
  return reinterpret_cast<T*>(*words++);
}

}  // namespace

extern "C" {

void host_settings(uint64_t seed, int capability) {
  host_cuda::settings.seed = seed;
  host_cuda::settings.capability = capability;
}

Error host_rope_store(const int64_t* words, float eps, void* query) {
  RopeStoreInput in{};
  in.eps = eps;
  in.qkv.data = At<void>(words);
  in.qkv.stride = *words++;
  in.tokens = *words++;
  in.heads = *words++;
  in.type = *words++ ? ElementType::kBFloat16 : ElementType::kFloat32;
  in.bias = At<const void>(words);
  in.query_norm = At<const void>(words);
  in.key_norm = At<const void>(words);
  in.cos = At<const float>(words);
  in.sin = At<const float>(words);
  in.positions = *words++;
  in.interleaved = *words++ != 0;
  in.sequence = At<const int32_t>(words);
  in.position = At<const int32_t>(words);
  in.tables = At<const int32_t>(words);
  in.sequences = *words++;
  in.width = *words++;
  in.pool.data = At<void>(words);
  in.pool.blocks = *words++;
  in.pool.layers = *words++;
  in.pool.heads = *words++;
  in.pool.block_size = *words++;
  in.pool.head_dim = *words++;
  in.layer = *words++;
  return RopeStore(in, query, nullptr);
}
}
