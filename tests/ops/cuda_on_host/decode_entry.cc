// Hopper's attention of decode, and of prompts, under C names; arguments are laid out by
// baton_testing/host_decode.py, eight bytes each. Returns null or what went wrong.
#include "rewritten/hopper_attention.h"
#include "shims/hopper.h"
#include "words.h"

using namespace baton_ops::cuda;

extern "C" {

void host_plant(int fault) { host_cuda::planted = fault; }

// Reads heads, kv_heads, sequences, tokens, positions.
int64_t host_scratch_bytes(const int64_t* words) {
  return static_cast<int64_t>(
      DecodeScratchBytes({words[0], words[1], 128, words[2], words[3], words[4]}));
}

// The keys and values of queries: the grid before writes them.
static void HideLast(const AttendInput& in, host_cuda::Late& late) {
  const KvPool& pool = in.pool;
  const int64_t queries = in.tokens / in.sequences, of_row = pool.head_dim * 2;
  for (int64_t sequence = 0; sequence < in.sequences; ++sequence) {
    const int64_t end = in.contexts[sequence];
    for (int64_t at = std::max<int64_t>(end - queries, 0); at < end; ++at) {
      const int64_t block = in.tables[sequence * in.width + at / pool.block_size];
      for (int64_t plane = 0; plane < 2 * pool.heads; ++plane) {
        const int64_t first = (block * pool.layers + in.layer) * 2 * pool.heads + plane;
        const int64_t row = first * pool.block_size + at % pool.block_size;
        late.Hide(static_cast<const char*>(pool.data) + row * of_row, of_row);
      }
    }
  }
}

// Reads query, sequences, tokens, heads, pool, blocks, layers, kv_heads, block_size, layer, tables,
// width, contexts, out, scratch and its bytes.
Error host_attend(const int64_t* words, float scale, int is_prompt) {
  AttendInput in{};
  in.type = ElementType::kBFloat16;
  in.scale = scale;
  in.query = At<const void>(words);
  in.sequences = *words++;
  in.tokens = *words++;
  in.heads = *words++;
  in.pool.data = At<void>(words);
  in.pool.blocks = *words++;
  in.pool.layers = *words++;
  in.pool.heads = *words++;
  in.pool.block_size = *words++;
  in.pool.head_dim = 128;
  in.layer = *words++;
  in.tables = At<const int32_t>(words);
  in.width = *words++;
  in.contexts = At<const int32_t>(words);
  void* out = At<void>(words);
  const Workspace scratch{At<void>(words), static_cast<size_t>(words[0])};
  const auto pool = static_cast<const char*>(in.pool.data);
  const int64_t rows = in.pool.blocks * in.pool.layers * 2 * in.pool.heads * in.pool.block_size;
  host_cuda::written_before = nullptr;  // of the pool what steps before wrote is read early
  const auto query = static_cast<const char*>(in.query);
  host_cuda::readable = {{pool, pool + rows * in.pool.head_dim * 2},
                         {query, query + in.tokens * in.heads * in.pool.head_dim * 2}};
  host_cuda::Late late;
  late.Hide(in.query, in.tokens * in.heads * in.pool.head_dim * 2);
  HideLast(in, late);
  const HopperAttention call{in, out, scratch, host_cuda::settings.capability};
  if (is_prompt) return PromptAttention(call, nullptr);
  return DecodeTakes(in, scratch) ? DecodeAttention(call, nullptr)
                                  : "decode's kernel does not take it";
}
}
