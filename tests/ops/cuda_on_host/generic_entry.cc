// The generic products under C names; arguments are laid out by baton_testing/host_generic.py,
// eight bytes each. Returns null or what went wrong.
#include "rewritten/experts.h"
#include "words.h"

using namespace baton_ops::cuda;

namespace {

MatmulInput ReadProduct(const int64_t*& words) {
  MatmulInput in{};
  in.x.data = At<void>(words);
  in.x.stride = *words++;
  in.weight = At<const void>(words);
  in.type = TypeOf(*words++);
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
