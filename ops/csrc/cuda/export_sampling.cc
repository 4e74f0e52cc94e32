// Exports of the sampler's CUDA ops: what is done to logits before a token is chosen, and what a
// step leaves for the next one.
#include <algorithm>

#include "arguments.h"
#include "export_support.h"
#include "sampling.h"

namespace baton_ops {
namespace {

using tvm::ffi::CUDADeviceGuard;

// A contiguous matrix of logits, which must not be empty along V.
cuda::RowsOfLogits ReadLogits(const TensorView& logits) {
  RequireCuda(logits, "logits");
  const Checked checked(logits, "logits");
  checked.HasDtype(kFloat32).HasRank(2).HasSizeAtLeast(1, 1).IsContiguous();
  return {checked.Data<const float>(), logits.size(0), logits.size(1)};
}

const int32_t* Ints(const TensorView& tensor, const char* name, int64_t size, DLDevice on) {
  return Vector<const int32_t>(tensor, name, kInt32, size, on);
}

const float* Floats(const TensorView& tensor, const char* name, int64_t size, DLDevice on) {
  return Vector<const float>(tensor, name, kFloat32, size, on);
}

// The sequences of cu_rows[S + 1].
int64_t BatchOf(const TensorView& cu_rows) {
  Checked(cu_rows, "cu_rows").HasRank(1).HasSizeAtLeast(0, 1);
  return cu_rows.size(0) - 1;
}

// Reads slot, counts, seen, draft.
void ReadPenalised(ArgumentReader* args, DLDevice on, cuda::ProcessInput* in) {
  in->slot = Ints(args->Tensor("slot"), "slot", in->batch, on);
  const TensorView counts = args->Tensor("counts");
  Checked(counts, "counts").HasRank(2);
  in->slots = counts.size(0);
  in->counts = Matrix<const int32_t>(counts, "counts", kInt32, in->slots, in->vocab, on);
  in->seen = Matrix<const uint8_t>(args->Tensor("seen"), "seen", kUInt8, in->slots, in->vocab, on);
  const TensorView draft = args->Tensor("draft");
  Checked(draft, "draft").HasRank(2);
  in->max_drafts = draft.size(1);
  CheckRange("draft.shape", 1, in->max_drafts, 0, cuda::kMostProcessedDrafts);
  in->draft = Matrix<const int32_t>(draft, "draft", kInt32, in->batch, in->max_drafts, on);
}

// Reads repetition, frequency, presence, bias_starts, bias_ids, bias, mask_starts, masked.
void ReadRules(ArgumentReader* args, DLDevice on, cuda::ProcessInput* in) {
  in->repetition = Floats(args->Tensor("repetition"), "repetition", in->batch, on);
  in->frequency = Floats(args->Tensor("frequency"), "frequency", in->batch, on);
  in->presence = Floats(args->Tensor("presence"), "presence", in->batch, on);
  in->bias_starts = Ints(args->Tensor("bias_starts"), "bias_starts", in->batch + 1, on);
  const TensorView bias_ids = args->Tensor("bias_ids");
  in->biases = bias_ids.numel();
  in->bias_ids = Ints(bias_ids, "bias_ids", in->biases, on);
  in->bias = Floats(args->Tensor("bias"), "bias", in->biases, on);
  in->mask_starts = Ints(args->Tensor("mask_starts"), "mask_starts", in->rows + 1, on);
  const TensorView masked = args->Tensor("masked");
  in->masks = masked.numel();
  in->masked = Ints(masked, "masked", in->masks, on);
}

// Reads logits, cu_rows, what ReadPenalised and ReadRules do, and processed, broken.
void RunProcess(ArgumentReader args) {
  const TensorView logits = args.Tensor("logits"), cu_rows = args.Tensor("cu_rows");
  const cuda::RowsOfLogits rows = ReadLogits(logits);
  const DLDevice on = logits.device();
  cuda::ProcessInput in{};
  in.logits = rows.logits;
  in.rows = rows.rows;
  in.vocab = rows.vocab;
  in.batch = BatchOf(cu_rows);
  in.cu_rows = Ints(cu_rows, "cu_rows", in.batch + 1, on);
  ReadPenalised(&args, on, &in);
  ReadRules(&args, on, &in);
  const TensorView processed = args.Tensor("processed"), broken = args.Tensor("broken");
  auto* out = Matrix<float>(processed, "processed", kFloat32, rows.rows, rows.vocab, on);
  auto* flags = Vector<uint8_t>(broken, "broken", kUInt8, rows.rows, on);
  const CUDADeviceGuard guard(on.device_id);
  Raise("process", cuda::Process(in, out, flags, StreamOf(on)));
}

// Reads logits, token, broken.
void RunArgmax(ArgumentReader args) {
  const TensorView logits = args.Tensor("logits"), token = args.Tensor("token");
  const TensorView broken = args.Tensor("broken");
  const cuda::RowsOfLogits rows = ReadLogits(logits);
  const DLDevice on = logits.device();
  auto* tokens = Vector<int32_t>(token, "token", kInt32, rows.rows, on);
  auto* flags = Vector<uint8_t>(broken, "broken", kUInt8, rows.rows, on);
  const CUDADeviceGuard guard(on.device_id);
  Raise("argmax", cuda::Argmax(rows, tokens, flags, StreamOf(on)));
}

// Reads logits, temperature, top_p, min_p, top_k, cu_rows, probs, broken.
void RunProbabilities(ArgumentReader args) {
  const TensorView logits = args.Tensor("logits");
  const cuda::RowsOfLogits rows = ReadLogits(logits);
  const DLDevice on = logits.device();
  const TensorView temperature = args.Tensor("temperature"), top_p = args.Tensor("top_p");
  const TensorView min_p = args.Tensor("min_p"), top_k = args.Tensor("top_k");
  const TensorView cu_rows = args.Tensor("cu_rows");
  cuda::RowParamsInput in{};
  in.batch = BatchOf(cu_rows);
  in.temperature = Floats(temperature, "temperature", in.batch, on);
  in.top_p = Vector<const double>(top_p, "top_p", kFloat64, in.batch, on);
  in.min_p = Floats(min_p, "min_p", in.batch, on);
  in.top_k = Ints(top_k, "top_k", in.batch, on);
  in.cu_rows = Ints(cu_rows, "cu_rows", in.batch + 1, on);
  float* probs = Matrix<float>(args.Tensor("probs"), "probs", kFloat32, rows.rows, rows.vocab, on);
  auto* flags = Vector<uint8_t>(args.Tensor("broken"), "broken", kUInt8, rows.rows, on);
  const CUDADeviceGuard guard(on.device_id);
  Raise("probabilities", cuda::Probabilities(rows, in, probs, flags, StreamOf(on)));
}

// Reads seeds, positions, cu_rows, out.
void RunUniforms(ArgumentReader args) {
  const TensorView seeds = args.Tensor("seeds"), positions = args.Tensor("positions");
  const TensorView cu_rows = args.Tensor("cu_rows"), out = args.Tensor("out");
  RequireCuda(seeds, "seeds");
  const DLDevice on = seeds.device();
  const int64_t batch = BatchOf(cu_rows), rows = out.numel();
  const cuda::UniformsInput in{batch, rows,
                               Vector<const int64_t>(seeds, "seeds", kInt64, batch, on),
                               Vector<const int64_t>(positions, "positions", kInt64, batch, on),
                               Ints(cu_rows, "cu_rows", batch + 1, on)};
  auto* uniforms = Vector<double>(out, "out", kFloat64, rows, on);
  const CUDADeviceGuard guard(on.device_id);
  Raise("uniforms", cuda::Uniforms(in, uniforms, StreamOf(on)));
}

// Reads n_accepted, token.
cuda::AcceptedInput ReadAccepted(ArgumentReader* args, DLDevice* on) {
  const TensorView n_accepted = args->Tensor("n_accepted"), token = args->Tensor("token");
  RequireCuda(n_accepted, "n_accepted");
  *on = n_accepted.device();
  Checked(token, "token").HasRank(2).HasSizeAtLeast(1, 1);
  const int64_t batch = n_accepted.numel(), columns = token.size(1);
  return {batch, columns, Ints(n_accepted, "n_accepted", batch, *on),
          Matrix<const int32_t>(token, "token", kInt32, batch, columns, *on)};
}

// Reads what ReadAccepted does, slot, counts, seen.
void RunCountTokens(ArgumentReader args) {
  DLDevice on{};
  const cuda::AcceptedInput in = ReadAccepted(&args, &on);
  cuda::CountsOutput out{};
  out.slot = Ints(args.Tensor("slot"), "slot", in.batch, on);
  const TensorView counts = args.Tensor("counts"), seen = args.Tensor("seen");
  Checked(counts, "counts").HasRank(2);
  out.slots = counts.size(0);
  out.vocab = counts.size(1);
  out.counts = Matrix<int32_t>(counts, "counts", kInt32, out.slots, out.vocab, on);
  out.seen = Matrix<uint8_t>(seen, "seen", kUInt8, out.slots, out.vocab, on);
  const CUDADeviceGuard guard(on.device_id);
  Raise("count_tokens", cuda::CountTokens(in, out, StreamOf(on)));
}

// Reads what ReadAccepted does, count, starts, tokens.
void RunScatterTokens(ArgumentReader args) {
  DLDevice on{};
  const cuda::AcceptedInput in = ReadAccepted(&args, &on);
  cuda::FlatTokens out{};
  out.count = Ints(args.Tensor("count"), "count", in.batch, on);
  out.starts = Ints(args.Tensor("starts"), "starts", in.batch, on);
  const TensorView tokens = args.Tensor("tokens");
  out.length = tokens.numel();
  out.tokens = Vector<int32_t>(tokens, "tokens", kInt32, out.length, on);
  const CUDADeviceGuard guard(on.device_id);
  Raise("scatter_tokens", cuda::ScatterTokens(in, out, StreamOf(on)));
}

// Reads n_accepted, starts, first, rows, positions, contexts?, ahead.
void RunSeedDrafts(ArgumentReader args) {
  const TensorView n_accepted = args.Tensor("n_accepted");
  RequireCuda(n_accepted, "n_accepted");
  const DLDevice on = n_accepted.device();
  const int64_t batch = n_accepted.numel();
  const int32_t* accepted = Ints(n_accepted, "n_accepted", batch, on);
  cuda::SeedsOutput out{};
  out.starts = Ints(args.Tensor("starts"), "starts", batch, on);
  out.first = Ints(args.Tensor("first"), "first", batch, on);
  out.rows = Vector<int32_t>(args.Tensor("rows"), "rows", kInt32, batch, on);
  out.positions = Vector<int32_t>(args.Tensor("positions"), "positions", kInt32, batch, on);
  const auto contexts = args.OptionalTensor("contexts");
  out.contexts = OptionalVector<int32_t>(contexts, "contexts", kInt32, batch, on);
  out.ahead = static_cast<int32_t>(args.Int("ahead"));
  const CUDADeviceGuard guard(on.device_id);
  Raise("seed_drafts", cuda::SeedDrafts(accepted, batch, out, StreamOf(on)));
}

// Reads the tensors of a NextStep.
cuda::AdvanceOutput ReadNextStep(ArgumentReader* args, int64_t batch, int64_t fed, DLDevice on) {
  cuda::AdvanceOutput out{};
  out.tokens = Vector<int32_t>(args->Tensor("tokens"), "tokens", kInt32, fed, on);
  out.position = Vector<int32_t>(args->Tensor("position"), "position", kInt32, fed, on);
  out.contexts = Vector<int32_t>(args->Tensor("contexts"), "contexts", kInt32, batch, on);
  out.first = Vector<int32_t>(args->Tensor("next_first"), "next_first", kInt32, batch, on);
  out.count = Vector<int32_t>(args->Tensor("draft_count"), "draft_count", kInt32, batch, on);
  out.draws = Vector<int64_t>(args->Tensor("next_draws"), "next_draws", kInt64, batch, on);
  const TensorView draft = args->Tensor("draft");
  Checked(draft, "draft").HasRank(2).HasSizeAtLeast(1, std::max<int64_t>(fed / batch - 1, 1));
  out.columns = draft.size(1);
  out.draft = Matrix<int32_t>(draft, "draft", kInt32, batch, out.columns, on);
  return out;
}

// Reads what ReadAccepted does, starts, drafts, first, draws, what ReadNextStep does.
void RunAdvance(ArgumentReader args) {
  DLDevice on{};
  cuda::AdvanceInput in{};
  in.accepted = ReadAccepted(&args, &on);
  const int64_t batch = in.accepted.batch;
  in.starts = Ints(args.Tensor("starts"), "starts", batch, on);
  const TensorView drafts = args.Tensor("drafts");
  Checked(drafts, "drafts").HasRank(2).HasSizeAtLeast(1, batch);
  in.n_drafts = drafts.size(0);
  in.stride = drafts.size(1);
  in.drafts = Matrix<const int32_t>(drafts, "drafts", kInt32, in.n_drafts, in.stride, on);
  in.first = Ints(args.Tensor("first"), "first", batch, on);
  in.draws = Vector<const int64_t>(args.Tensor("draws"), "draws", kInt64, batch, on);
  if (batch == 0) return;
  const cuda::AdvanceOutput out = ReadNextStep(&args, batch, batch * (1 + in.n_drafts), on);
  const CUDADeviceGuard guard(on.device_id);
  Raise("advance", cuda::Advance(in, out, StreamOf(on)));
}

// Reads what ReadAccepted does, starts, first, slot, history, drafts, n_before, shortest, longest.
void RunLookUp(ArgumentReader args) {
  DLDevice on{};
  cuda::LookUpInput in{};
  in.accepted = ReadAccepted(&args, &on);
  const int64_t batch = in.accepted.batch;
  in.starts = Ints(args.Tensor("starts"), "starts", batch, on);
  in.first = Ints(args.Tensor("first"), "first", batch, on);
  in.slot = Ints(args.Tensor("slot"), "slot", batch, on);
  const TensorView history = args.Tensor("history"), drafts = args.Tensor("drafts");
  Checked(history, "history").HasRank(2);
  in.slots = history.size(0);
  in.length = history.size(1);
  CheckRange("history.shape", 1, in.length, 0, cuda::kMostHistory);
  Checked(drafts, "drafts").HasRank(2).HasSizeAtLeast(1, batch);
  cuda::LookUpOutput out{};
  out.history = Matrix<int32_t>(history, "history", kInt32, in.slots, in.length, on);
  out.n_drafts = drafts.size(0);
  out.stride = drafts.size(1);
  out.drafts = Matrix<int32_t>(drafts, "drafts", kInt32, out.n_drafts, out.stride, on);
  out.n_before = args.Int("n_before");
  in.shortest = args.Int("shortest");
  in.longest = args.Int("longest");
  CheckRange("n_before", 0, out.n_before, 0, out.n_drafts);
  CheckRange("longest", 0, in.longest, 1, cuda::kMostNgram);
  CheckRange("shortest", 0, in.shortest, 1, in.longest);
  const CUDADeviceGuard guard(on.device_id);
  Raise("look_up", cuda::LookUp(in, out, StreamOf(on)));
}

}  // namespace
}  // namespace baton_ops

BATON_EXPORT_CUDA(cuda_process, 16, RunProcess)
BATON_EXPORT_CUDA(cuda_argmax, 3, RunArgmax)
BATON_EXPORT_CUDA(cuda_probabilities, 8, RunProbabilities)
BATON_EXPORT_CUDA(cuda_uniforms, 4, RunUniforms)
BATON_EXPORT_CUDA(cuda_count_tokens, 5, RunCountTokens)
BATON_EXPORT_CUDA(cuda_scatter_tokens, 5, RunScatterTokens)
BATON_EXPORT_CUDA(cuda_seed_drafts, 7, RunSeedDrafts)
BATON_EXPORT_CUDA(cuda_advance, 13, RunAdvance)
BATON_EXPORT_CUDA(cuda_look_up, 10, RunLookUp)
