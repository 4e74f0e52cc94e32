// The sampler's CUDA ops as plain functions, see launch.h. A row's results depend on that row
// alone; rows behind the last request's are left alone.
#ifndef BATON_OPS_CSRC_CUDA_SAMPLING_H_
#define BATON_OPS_CSRC_CUDA_SAMPLING_H_

#include <cstdint>

#include "launch.h"

namespace baton_ops::cuda {

// Drafts that a request may have where its logits are processed.
constexpr int64_t kMostProcessedDrafts = 64;

struct ProcessInput {
  const float* logits;  // [rows, vocab]
  int64_t rows;
  int64_t vocab;
  int64_t batch;
  int64_t max_drafts;
  int64_t slots;
  const int32_t* cu_rows;  // [batch + 1]
  const int32_t* slot;     // [batch], outside 0..slots-1: no penalties
  const int32_t* counts;   // [slots, vocab]
  const uint8_t* seen;     // [slots, vocab]
  const int32_t* draft;    // [batch, max_drafts]
  const float* repetition;
  const float* frequency;
  const float* presence;
  const int32_t* bias_starts;  // [batch + 1]
  const int32_t* bias_ids;     // [biases]
  const float* bias;
  int64_t biases;
  const int32_t* mask_starts;  // [rows + 1]
  const int32_t* masked;       // [masks]
  int64_t masks;
};

// `processed` [rows, vocab] may be the logits' memory.
Error Process(const ProcessInput& input, float* processed, uint8_t* broken, Stream stream);

struct RowsOfLogits {
  const float* logits;  // [rows, vocab], contiguous
  int64_t rows;
  int64_t vocab;
};

Error Argmax(const RowsOfLogits& input, int32_t* token, uint8_t* broken, Stream stream);

struct RowParamsInput {
  int64_t batch;
  const float* temperature;
  const double* top_p;
  const float* min_p;
  const int32_t* top_k;
  const int32_t* cu_rows;  // [batch + 1]
};

// `probs` may be the logits' memory.
Error Probabilities(const RowsOfLogits& input, const RowParamsInput& params, float* probs,
                    uint8_t* broken, Stream stream);

struct UniformsInput {
  int64_t batch;
  int64_t rows;
  const int64_t* seeds;
  const int64_t* positions;
  const int32_t* cu_rows;  // [batch + 1]
};

Error Uniforms(const UniformsInput& input, double* out, Stream stream);

struct AcceptedInput {
  int64_t batch;
  int64_t columns;            // of token
  const int32_t* n_accepted;  // [batch]
  const int32_t* token;       // [batch, columns]
};

struct CountsOutput {
  const int32_t* slot;  // [batch]
  int64_t slots;
  int64_t vocab;
  int32_t* counts;  // [slots, vocab]
  uint8_t* seen;    // [slots, vocab]
};

Error CountTokens(const AcceptedInput& input, const CountsOutput& output, Stream stream);

struct FlatTokens {
  const int32_t* count;   // [batch]
  const int32_t* starts;  // [batch]
  int32_t* tokens;        // [length]
  int64_t length;
};

Error ScatterTokens(const AcceptedInput& input, const FlatTokens& output, Stream stream);

struct SeedsOutput {
  const int32_t* starts;  // [batch]
  const int32_t* first;
  int32_t* rows;
  int32_t* positions;
  int32_t* contexts;  // or null
  int32_t ahead;      // added to positions
};

Error SeedDrafts(const int32_t* n_accepted, int64_t batch, const SeedsOutput& output,
                 Stream stream);

struct AdvanceInput {
  AcceptedInput accepted;
  const int32_t* starts;  // [batch]
  const int32_t* drafts;  // [n_drafts, stride], -1 from where a sequence has none
  int64_t n_drafts;
  int64_t stride;
  const int32_t* first;  // [batch]
  const int64_t* draws;  // [batch]
};

struct AdvanceOutput {
  int32_t* tokens;    // [batch * (1 + n_drafts)]
  int32_t* position;  // as tokens
  int32_t* contexts;  // [batch], and those below
  int32_t* first;
  int32_t* count;
  int64_t* draws;
  int32_t* draft;  // [batch, columns], at least n_drafts columns
  int64_t columns;
};

Error Advance(const AdvanceInput& input, const AdvanceOutput& output, Stream stream);

// Tokens of an n-gram that is looked up, and of a history, at most.
constexpr int64_t kMostNgram = 16;
constexpr int64_t kMostHistory = (int64_t{1} << 27) - 1;

struct LookUpInput {
  AcceptedInput accepted;
  const int32_t* starts;  // [batch]
  const int32_t* first;   // [batch]
  const int32_t* slot;    // [batch], outside 0..slots-1: nothing is found
  int64_t slots;
  int64_t length;
  int64_t shortest;
  int64_t longest;
};

struct LookUpOutput {
  int32_t* history;  // [slots, length]
  int32_t* drafts;   // [n_drafts, stride], of which the first n_before are there
  int64_t n_drafts;
  int64_t n_before;
  int64_t stride;
};

Error LookUp(const LookUpInput& input, const LookUpOutput& output, Stream stream);

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_CSRC_CUDA_SAMPLING_H_
