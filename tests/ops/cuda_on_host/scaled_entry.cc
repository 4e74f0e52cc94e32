// The launches of the ops of FP8 under C names; arguments are laid out by
// baton_testing/host_scaled.py, eight bytes each. Returns null or what went wrong.
#include "rewritten/hopper_scaled.h"
#include "scaled_words.h"

using namespace baton_ops::cuda;

extern "C" {

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
  const int64_t groups = (in.columns + in.group - 1) / in.group;
  host_cuda::Untouched untouched;  // products before may still read what lies there
  untouched.Add(out.values, in.rows * in.columns);
  untouched.Add(out.scales, in.rows * groups * int64_t{sizeof(float)});
  return QuantiseRows(in, out, nullptr);
}

Error host_scaled_matmul(const int64_t* words) {
  const ScaledCall call(words);
  if (const Error error = CheckScaledGroup(call.in.group, call.in.in)) return error;
  return ScaledOnAnyGpu(call.in, call.out, call.type, nullptr);
}
}
