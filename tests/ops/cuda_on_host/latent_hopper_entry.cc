// Hopper's attention to compressed rows under C names; arguments are laid out by
// baton_testing/host_latent.py, eight bytes each. Returns null or what went wrong.
#include "rewritten/latent_hopper.h"
#include "shims/hopper.h"
#include "words.h"

using namespace baton_ops::cuda;

extern "C" {

void host_plant(int fault) { host_cuda::planted = fault; }

// Reads heads, tokens, positions.
int64_t host_scratch_bytes(const int64_t* words) {
  return static_cast<int64_t>(LatentScratchBytes({words[0], 1, 576, 1, words[1], words[2]}));
}

// Reads query, sequences, tokens, heads, pool, layer, tables, width, contexts, out, scratch and its
// bytes.
Error host_attend_rows(const int64_t* words, float scale) {
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
  in.pool.heads = 1;
  in.pool.block_size = *words++;
  in.pool.head_dim = *words++;
  in.layer = *words++;
  in.tables = At<const int32_t>(words);
  in.width = *words++;
  in.contexts = At<const int32_t>(words);
  void* out = At<void>(words);
  const Workspace scratch{At<void>(words), static_cast<size_t>(words[0])};
  const auto query = static_cast<const char*>(in.query);
  const auto pool = static_cast<const char*>(in.pool.data);
  const int64_t rows = in.pool.blocks * in.pool.layers * in.pool.block_size;
  host_cuda::written_before = query;
  host_cuda::readable = {{query, query + in.tokens * in.heads * in.pool.head_dim * 2},
                         {pool, pool + rows * in.pool.head_dim * 2}};
  host_cuda::Late late;
  late.Hide(query, in.tokens * in.heads * in.pool.head_dim * 2);
  late.Hide(pool, rows * in.pool.head_dim * 2);
  return AttendOnHopper(in, out, scratch, nullptr);
}
}
