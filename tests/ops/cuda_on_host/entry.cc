// The launches of ops/csrc/cuda under C names; what they take is laid out by
// baton_testing/host_cuda.py, eight bytes a member. Returns null or what went wrong.
#include "orders.h"
#include "rewritten/launch.h"
#include "rewritten/sampling.h"
#include "shims/fibers.h"

using namespace baton_ops::cuda;

extern "C" {

void host_settings(uint64_t seed, int capability, int shared_bytes, const char* file, int line) {
  host_cuda::settings.seed = seed;
  host_cuda::settings.capability = capability;
  host_cuda::settings.shared_bytes = shared_bytes;
  host_cuda::settings.skipped_line = line;
  snprintf(host_cuda::settings.skipped_file, sizeof(host_cuda::settings.skipped_file), "%s", file);
}

Error host_process(const ProcessInput* in, float* processed, uint8_t* broken) {
  return Process(*in, processed, broken, nullptr);
}

Error host_argmax(const RowsOfLogits* in, int32_t* token, uint8_t* broken) {
  return Argmax(*in, token, broken, nullptr);
}

Error host_probabilities(const RowsOfLogits* in, const RowParamsInput* params, float* probs,
                         uint8_t* broken) {
  return Probabilities(*in, *params, probs, broken, nullptr);
}

Error host_uniforms(const UniformsInput* in, double* out) { return Uniforms(*in, out, nullptr); }

Error host_count_tokens(const AcceptedInput* in, const CountsOutput* out) {
  return CountTokens(*in, *out, nullptr);
}

Error host_scatter_tokens(const AcceptedInput* in, const FlatTokens* out) {
  return ScatterTokens(*in, *out, nullptr);
}

Error host_seed_drafts(const int32_t* n_accepted, int64_t batch, const SeedsOutput* out) {
  return SeedDrafts(n_accepted, batch, *out, nullptr);
}

Error host_advance(const AdvanceInput* in, const AdvanceOutput* out) {
  return Advance(*in, *out, nullptr);
}

Error host_look_up(const LookUpInput* in, const LookUpOutput* out) {
  return LookUp(*in, *out, nullptr);
}

Error host_verify_greedy(const int32_t* target, const DraftInput* drafts, const VerifyOutput* out) {
  return VerifyGreedy(target, *drafts, *out, nullptr);
}

Error host_verify_sampled(const ProbsInput* in, const DraftInput* drafts, const VerifyOutput* out) {
  return VerifySampled(*in, *drafts, *out, nullptr);
}

Error host_plan(const StepInput* in, const StepOutput* out) { return Plan(*in, *out, nullptr); }
}
