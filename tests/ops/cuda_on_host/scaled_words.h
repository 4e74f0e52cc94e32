// A product of FP8 out of words, as baton_testing/host_scaled.py lays them out.
#include "rewritten/hopper_scaled.h"
#include "words.h"

namespace baton_ops::cuda {

struct ScaledCall {
  ScaledMatmulInput in{};
  Rows out{};
  ElementType type;
  explicit ScaledCall(const int64_t* words) {
    in.x.values = At<uint8_t>(words);
    in.x.scales = At<float>(words);
    in.weight.values = At<uint8_t>(words);
    in.weight.scales = At<float>(words);
    in.scale_shift = static_cast<int>(*words++);
    in.rows = *words++;
    in.in = *words++;
    in.out = *words++;
    in.group = *words++;
    in.is_gated = *words++ != 0;
    in.row = At<int32_t>(words);
    in.starts = At<int32_t>(words);
    in.experts = *words++;
    out.data = At<void>(words);
    out.stride = *words++;
    type = TypeOf(*words++);
  }
};

}  // namespace baton_ops::cuda
