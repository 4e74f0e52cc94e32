// How entries read the words that their Python side lays out, eight bytes each, and the settings
// that every library of kernels has.
#include "orders.h"
#include "shims/fibers.h"

namespace baton_ops::cuda {

// The address that is next among the words.
template <class T>
T* At(const int64_t*& words) {
  return reinterpret_cast<T*>(*words++);
}

inline ElementType TypeOf(int64_t is_bf16) {
  return is_bf16 ? ElementType::kBFloat16 : ElementType::kFloat32;
}

}  // namespace baton_ops::cuda

extern "C" {

void host_settings(uint64_t seed, int capability) {
  host_cuda::settings.seed = seed;
  host_cuda::settings.capability = capability;
}
}
