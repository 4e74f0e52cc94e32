// The generic products under C names; arguments are laid out by baton_testing/host_generic.py,
// eight bytes each. Returns null or what went wrong.
#include "rewritten/experts.h"
#include "shims/fibers.h"

using namespace baton_ops::cuda;

namespace {

template <class T>
T* At(const int64_t*& words) {
  return reinterpret_cast<T*>(*words++);
}

MatmulInput ReadProduct(const int64_t*& words) {
  MatmulInput in{};
  in.x.data = At<void>(words);
  in.x.stride = *words++;
  in.weight = At<const void>(words);
  in.type = *words++ ? ElementType::kBFloat16 : ElementType::kFloat32;
  in.rows = *words++;
  in.in = *words++;
  in.out = *words++;
  return in;
}

Rows ReadRows(const int64_t*& words) {
  Rows out{};
  out.data = At<void>(words);
  out.stride = *words++;
  return out;
}

}  // namespace

extern "C" {

void host_settings(uint64_t seed, int capability) {
  host_cuda::settings.seed = seed;
  host_cuda::settings.capability = capability;
}

// Reads the product, out, is_gated.
Error host_product(const int64_t* words) {
  const MatmulInput in = ReadProduct(words);
  const Rows out = ReadRows(words);
  return *words ? GenericGateUpSilu(in, out, nullptr) : GenericMatmul(in, out, in.type, nullptr);
}

// Reads the product, whose `out` is that of a group, out, is_gated, starts, groups.
Error host_grouped_product(const int64_t* words) {
  GroupedInput in{};
  in.product = ReadProduct(words);
  const Rows out = ReadRows(words);
  const bool is_gated = *words++ != 0;
  in.starts = At<const int32_t>(words);
  in.groups = *words;
  return GenericGrouped(in, is_gated, out, nullptr);
}
}
