// The launches of multi-head latent attention under C names; arguments are laid out by
// baton_testing/host_latent.py, eight bytes each. Returns null or what went wrong.
#include "rewritten/latent.h"
#include "rewritten/latent_hopper.h"
#include "words.h"

using namespace baton_ops::cuda;

namespace {

Rows ReadRows(const int64_t*& words) {
  Rows rows{};
  rows.data = At<void>(words);
  rows.stride = *words++;
  return rows;
}

HeadProductInput ReadProduct(const int64_t*& words) {
  HeadProductInput in{};
  in.x = ReadRows(words);
  in.kv_up = At<const void>(words);
  in.type = TypeOf(*words++);
  in.tokens = *words++;
  in.sizes = {words[0], words[1], words[2], words[3], words[4]};
  words += 5;
  return in;
}

PlacedTokens ReadPlaces(const int64_t*& words) {
  PlacedTokens in{};
  in.tokens = *words++;
  in.cos = At<const float>(words);
  in.sin = At<const float>(words);
  in.positions = *words++;
  in.interleaved = *words++ != 0;
  in.sequence = At<const int32_t>(words);
  in.position = At<const int32_t>(words);
  in.tables = At<const int32_t>(words);
  in.sequences = *words++;
  in.width = *words++;
  return in;
}

KvPool ReadPool(const int64_t*& words) {
  KvPool pool{};
  pool.data = At<void>(words);
  pool.blocks = *words++;
  pool.layers = *words++;
  pool.heads = 1;
  pool.block_size = *words++;
  pool.head_dim = *words++;
  return pool;
}

}  // namespace

extern "C" {

// Reads the product, out.
Error host_fold(const int64_t* words) {
  const HeadProductInput in = ReadProduct(words);
  return FoldQueries(in, At<void>(words), nullptr);
}

// Reads the product, out.
Error host_unfold(const int64_t* words) {
  const HeadProductInput in = ReadProduct(words);
  return UnfoldValues(in, ReadRows(words), nullptr);
}

// Reads queries, their type, places, heads, kv_rank, rope_size, nope_size, query.
Error host_rotate(const int64_t* words) {
  RotateQueriesInput in{};
  in.queries = ReadRows(words);
  in.type = TypeOf(*words++);
  in.places = ReadPlaces(words);
  in.sizes = {words[0], words[1], words[2], words[3], 0};
  words += 4;
  return RotateQueries(in, At<void>(words), nullptr);
}

// Reads row, its type, norm, kv_rank, rope_size, places, pool, layer.
Error host_store(const int64_t* words, float eps) {
  StoreRowsInput in{};
  in.eps = eps;
  in.row = ReadRows(words);
  in.type = TypeOf(*words++);
  in.norm = At<const void>(words);
  in.kv_rank = *words++;
  in.rope_size = *words++;
  in.places = ReadPlaces(words);
  in.pool = ReadPool(words);
  in.layer = *words;
  return StoreRows(in, nullptr);
}

// Reads query, its type, sequences, tokens, heads, pool, layer, tables, width, contexts, value_dim,
// out.
Error host_attend_rows(const int64_t* words, float scale) {
  AttendInput in{};
  in.scale = scale;
  in.query = At<const void>(words);
  in.type = TypeOf(*words++);
  in.sequences = *words++;
  in.tokens = *words++;
  in.heads = *words++;
  in.pool = ReadPool(words);
  in.layer = *words++;
  in.tables = At<const int32_t>(words);
  in.width = *words++;
  in.contexts = At<const int32_t>(words);
  const int64_t value_dim = *words++;
  return RowAttention(in, value_dim, At<void>(words), {}, nullptr);
}
}

// No device is one of Hopper's here: see latent_hopper_entry.cc.
namespace baton_ops::cuda {
bool HopperTakesRows(const AttendInput&) { return false; }
Error AttendOnHopper(const AttendInput&, void*, const Workspace&, Stream) { return "not here"; }
}  // namespace baton_ops::cuda
