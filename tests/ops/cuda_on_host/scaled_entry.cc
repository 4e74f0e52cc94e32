// The launches of the ops of FP8 under C names; arguments are laid out by
// baton_testing/host_scaled.py, eight bytes each. Returns null or what went wrong.
#include "rewritten/scaled.h"
#include "shims/fibers.h"

using namespace baton_ops::cuda;

namespace {

template <class T>
T* At(const int64_t*& words) {
  return reinterpret_cast<T*>(*words++);
}

ElementType TypeOf(int64_t is_bf16) {
  return is_bf16 ? ElementType::kBFloat16 : ElementType::kFloat32;
}

}  // namespace

extern "C" {

void host_settings(uint64_t seed, int capability) {
  host_cuda::settings.seed = seed;
  host_cuda::settings.capability = capability;
}

Error host_quantise(const int64_t* words) {
  QuantiseInput in{};
  in.x.data = At<void>(words);
  in.x.stride = *words++;
  in.type = TypeOf(*words++);
  in.rows = *words++;
  in.columns = *words++;
  in.group = *words++;
  ScaledRows out{};
  out.values = At<uint8_t>(words);
  out.scales = At<float>(words);
  return QuantiseRows(in, out, nullptr);
}

Error host_scaled_matmul(const int64_t* words) {
  ScaledMatmulInput in{};
  in.x.values = At<uint8_t>(words);
  in.x.scales = At<float>(words);
  in.weight.values = At<uint8_t>(words);
  in.weight.scales = At<float>(words);
  in.rows = *words++;
  in.in = *words++;
  in.out = *words++;
  in.group = *words++;
  Rows out{};
  out.data = At<void>(words);
  out.stride = *words++;
  return ScaledMatmul(in, out, TypeOf(*words++), nullptr);
}
}
