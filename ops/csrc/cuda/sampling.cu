#include <cuda_runtime.h>

#include <algorithm>

#include "baton_ops/argmax.cuh"
#include "baton_ops/bookkeeping.cuh"
#include "baton_ops/lookup.cuh"
#include "baton_ops/probabilities.cuh"
#include "baton_ops/process.cuh"
#include "early_launch.h"
#include "row_launch.h"
#include "sampling.h"

namespace baton_ops::cuda {
namespace {

constexpr size_t kMostKeptBytes = 176 << 10;
static_assert(kMostKeptBytes / 4 <= kProbabilitiesThreads * kMostOfThread);
constexpr int64_t kMostGridRows = 65535;

bool BeginsAtVectors(const void* data, int64_t row_bytes) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && row_bytes % 16 == 0;
}

Grid GridOf(int64_t items) {
  return {dim3(static_cast<unsigned>(DivideUp<int64_t>(items, kBookkeepingThreads))),
          kBookkeepingThreads};
}

AcceptedTokens TokensOf(const AcceptedInput& in) {
  return {static_cast<int32_t>(in.batch), static_cast<int32_t>(in.columns), in.n_accepted,
          in.token};
}

ProcessParams ParamsOf(const ProcessInput& in, float* processed, uint8_t* broken) {
  ProcessParams p{};
  p.raw = in.logits;
  p.logits = processed;
  p.broken = broken;
  p.copies_vectors =
      BeginsAtVectors(in.logits, in.vocab * 4) && BeginsAtVectors(processed, in.vocab * 4);
  p.vocab = static_cast<uint32_t>(in.vocab);
  p.batch = static_cast<int32_t>(in.batch);
  p.max_drafts = static_cast<int32_t>(in.max_drafts);
  p.slots = static_cast<int32_t>(in.slots);
  p.by_vectors = BeginsAtVectors(in.seen, in.vocab);
  p.cu_rows = in.cu_rows;
  p.slot = in.slot;
  p.counts = in.counts;
  p.seen = in.seen;
  p.draft = in.draft;
  p.repetition = in.repetition;
  p.frequency = in.frequency;
  p.presence = in.presence;
  p.bias_starts = in.bias_starts;
  p.bias_ids = in.bias_ids;
  p.bias = in.bias;
  p.biases = static_cast<int32_t>(in.biases);
  p.mask_starts = in.mask_starts;
  p.masked = in.masked;
  p.masks = static_cast<int32_t>(in.masks);
  return p;
}

ProbabilitiesParams ParamsOf(const RowsOfLogits& in, const RowParamsInput& params, float* probs,
                             uint8_t* broken) {
  ProbabilitiesParams p{};
  p.logits = in.logits;
  p.vocab = static_cast<uint32_t>(in.vocab);
  p.batch = static_cast<int32_t>(params.batch);
  p.by_vectors = BeginsAtVectors(in.logits, in.vocab * 4) && BeginsAtVectors(probs, 0);
  p.temperature = params.temperature;
  p.top_p = params.top_p;
  p.min_p = params.min_p;
  p.top_k = params.top_k;
  p.cu_rows = params.cu_rows;
  p.probs = probs;
  p.broken = broken;
  return p;
}

}  // namespace

Error Process(const ProcessInput& input, float* processed, uint8_t* broken, Stream stream) {
  if (input.rows == 0 || input.vocab == 0 || input.batch == 0) return nullptr;
  const auto columns = static_cast<unsigned>(DivideUp<int64_t>(input.vocab, kProcessIds));
  const auto rows = static_cast<unsigned>(std::min(input.rows, kMostGridRows));
  return LaunchEarly(ProcessKernel, Grid{dim3(columns, rows), kProcessThreads}, stream,
                     ParamsOf(input, processed, broken), input.rows);
}

Error Argmax(const RowsOfLogits& input, int32_t* token, uint8_t* broken, Stream stream) {
  if (input.rows == 0) return nullptr;
  const ArgmaxParams p{input.logits, static_cast<uint32_t>(input.vocab),
                       BeginsAtVectors(input.logits, input.vocab * 4), token, broken};
  const unsigned blocks = BlocksOfRow(input.vocab);
  const auto kernel = blocks > 1 ? ArgmaxKernel<kRowBlocks> : ArgmaxKernel<1>;
  return LaunchRows(kernel, ClusterGrid{input.rows, blocks, kArgmaxThreads}, p, stream);
}

Error Probabilities(const RowsOfLogits& input, const RowParamsInput& params, float* probs,
                    uint8_t* broken, Stream stream) {
  if (input.rows == 0 || params.batch == 0) return nullptr;
  const ProbabilitiesParams p = ParamsOf(input, params, probs, broken);
  const unsigned blocks = BlocksOfRow(input.vocab);
  const size_t kept = 4 * size_t{IntervalSize(p.vocab, blocks)};
  const size_t needed = kept + ColumnBytes(kProbabilitiesThreads);
  const bool fits = (blocks > 1 ? kept <= kMostKeptBytes : input.vocab <= kVocabOfOneBlock) &&
                    needed + sizeof(ProbabilitiesShared) <= MostSharedBytes();
  const auto shared =
      fits ? ProbabilitiesKernel<kRowBlocks, true> : ProbabilitiesKernel<kRowBlocks, false>;
  const auto alone = fits ? ProbabilitiesKernel<1, true> : ProbabilitiesKernel<1, false>;
  const ClusterGrid grid{input.rows, blocks, kProbabilitiesThreads, fits ? needed : 0};
  return LaunchRows(blocks > 1 ? shared : alone, grid, p, stream);
}

Error Uniforms(const UniformsInput& input, double* out, Stream stream) {
  if (input.rows == 0 || input.batch == 0) return nullptr;
  const UniformsParams p{static_cast<int32_t>(input.batch),
                         static_cast<int32_t>(input.rows),
                         input.seeds,
                         input.positions,
                         input.cu_rows,
                         out};
  return LaunchEarly(UniformsKernel, GridOf(input.rows), stream, p);
}

Error CountTokens(const AcceptedInput& input, const CountsOutput& output, Stream stream) {
  if (input.batch == 0) return nullptr;
  const TokenCounts counts{output.slot, static_cast<int32_t>(output.slots),
                           static_cast<int32_t>(output.vocab), output.counts, output.seen};
  return LaunchEarly(CountTokensKernel, GridOf(input.batch * input.columns), stream,
                     TokensOf(input), counts);
}

Error ScatterTokens(const AcceptedInput& input, const FlatTokens& output, Stream stream) {
  if (input.batch == 0) return nullptr;
  return LaunchEarly(ScatterTokensKernel, GridOf(input.batch * input.columns), stream,
                     TokensOf(input), output.count, output.starts, output.tokens, output.length);
}

Error SeedDrafts(const int32_t* n_accepted, int64_t batch, const SeedsOutput& output,
                 Stream stream) {
  if (batch == 0) return nullptr;
  const DraftSeeds seeds{output.starts,    output.first,    output.rows,
                         output.positions, output.contexts, output.ahead};
  return LaunchEarly(SeedDraftsKernel, GridOf(batch), stream, n_accepted,
                     static_cast<int32_t>(batch), seeds);
}

Error Advance(const AdvanceInput& input, const AdvanceOutput& output, Stream stream) {
  if (input.accepted.batch == 0) return nullptr;
  const NextFed out{
      output.tokens, output.position, output.contexts, output.first,
      output.count,  output.draws,    output.draft,    static_cast<int32_t>(output.columns)};
  const AdvanceParams p{TokensOf(input.accepted),
                        input.starts,
                        input.drafts,
                        static_cast<int32_t>(input.n_drafts),
                        static_cast<int32_t>(input.stride),
                        input.first,
                        input.draws,
                        out};
  return LaunchEarly(AdvanceKernel, GridOf(input.accepted.batch), stream, p);
}

Error LookUp(const LookUpInput& input, const LookUpOutput& output, Stream stream) {
  static_assert(kMostLookedUp == kMostNgram && kMostHistory < int64_t{1} << kPlaceBits);
  if (input.accepted.batch == 0 || output.n_drafts == output.n_before) return nullptr;
  const LookUpParams p{TokensOf(input.accepted),
                       input.starts,
                       input.first,
                       input.slot,
                       output.history,
                       static_cast<int32_t>(input.slots),
                       static_cast<int32_t>(input.length),
                       static_cast<int32_t>(input.shortest),
                       static_cast<int32_t>(input.longest),
                       output.drafts,
                       static_cast<int32_t>(output.n_before),
                       static_cast<int32_t>(output.n_drafts - output.n_before),
                       static_cast<int32_t>(output.stride)};
  const Grid grid{dim3(static_cast<unsigned>(input.accepted.batch)), kLookUpThreads};
  return LaunchEarly(LookUpKernel, grid, stream, p);
}

}  // namespace baton_ops::cuda
