#include <algorithm>
#include <limits>

#include "baton_ops/latent_merge.cuh"
#include "baton_ops/latent_wgmma.cuh"
#include "hopper_device.h"
#include "hopper_launch.h"
#include "latent_hopper.h"
#include "paged_keys.h"

namespace baton_ops::cuda {
namespace {

constexpr int64_t kMostBlocks = 132;   // of a launch; scratch is made for so many
constexpr int64_t kMostPlaces = 1024;  // of splits that are left
constexpr int64_t kMergeBlocks = 4 * kMostBlocks;
constexpr int64_t kListBytes = LatentLeft::kFloats * sizeof(float);
constexpr int64_t kPlaceBytes = kListBytes + 128 * sizeof(float4);
constexpr int64_t kVectorBytes = 16, kLargestPage = 128;

struct LatentSpace {
  int64_t lists, splits;  // of those that may be cut; of each list at most

  // One split a list needs no memory.
  int64_t Bytes(int64_t places) const {
    return splits > 1 ? RecordBytes() + kMostBlocks * kListBytes + places * kPlaceBytes : 0;
  }
  int64_t MostPlaces() const { return std::min(kMostPlaces, lists * splits); }
  int64_t RecordBytes() const {
    return DivideUp<int64_t>(lists * sizeof(int2), kVectorBytes) * kVectorBytes;
  }
};

// Positions are those of whole blocks.
LatentSpace SpaceFor(int64_t heads, int64_t tokens, int64_t positions) {
  const int64_t tiles = DivideUp<int64_t>(heads, kLatentHeads);
  const int64_t blocks = DivideUp<int64_t>(positions, kLargestPage);
  return {std::min<int64_t>(tokens, kMostCutTokens) * tiles,
          DivideUp<int64_t>(blocks * kLargestPage, kLatentSplit)};
}

// As many places as there is memory for.
LatentLeft LeftIn(const Workspace& scratch, const LatentSpace& space) {
  LatentLeft left{};
  if (space.splits < 2) return left;
  auto* bytes = static_cast<char*>(scratch.data);
  const int64_t more = static_cast<int64_t>(scratch.bytes) - space.Bytes(0);
  left.places = static_cast<int>(std::min(space.MostPlaces(), more / kPlaceBytes));
  left.records = reinterpret_cast<int2*>(bytes);
  left.totals = reinterpret_cast<float4*>(bytes + space.RecordBytes());
  left.made = left.totals + kMostBlocks * kListBytes / kVectorBytes;
  left.rows = left.made + left.places * kListBytes / kVectorBytes;
  return left;
}

LatentKeys LatentKeysOf(const AttendInput& in) {
  LatentKeys keys{};
  keys.tables = in.tables;
  keys.contexts = in.contexts;
  keys.width = static_cast<int>(in.width);
  keys.page = static_cast<int>(in.pool.block_size);
  keys.block_rows = static_cast<int>(in.pool.layers * in.pool.block_size);
  keys.layer_row = static_cast<int>(in.layer * in.pool.block_size);
  keys.tokens = static_cast<int>(in.tokens);
  keys.q_len = static_cast<int>(in.tokens / in.sequences);
  keys.head_tiles = static_cast<int>(DivideUp<int64_t>(in.heads, kLatentHeads));
  return keys;
}

Error DescribeBoth(const AttendInput& in, CUtensorMap* query, CUtensorMap* pool) {
  const int64_t most = std::min<int64_t>(in.heads, kLatentHeads);
  if (const Error error =
          Describe({in.query, in.tokens * in.heads, kLatentRow, kLatentRow}, static_cast<int>(most),
                   CU_TENSOR_MAP_L2_PROMOTION_L2_128B, query)) {
    return error;
  }
  const int64_t rows = in.pool.blocks * in.pool.layers * in.pool.block_size;
  const int64_t box = std::min<int64_t>(in.pool.block_size, kLatentTile);
  return Describe({in.pool.data, rows, kLatentRow, kLatentRow}, static_cast<int>(box),
                  CU_TENSOR_MAP_L2_PROMOTION_L2_128B, pool);
}

}  // namespace

bool HopperTakesRows(const AttendInput& in) {
  const int64_t page = in.pool.block_size;
  if (!CurrentHopper().is_there) return false;
  return page == 16 || page == 32 || page == 64 || page == kLargestPage;
}

size_t LatentScratchBytes(const AttentionSizes& sizes) {
  const LatentSpace space = SpaceFor(sizes.heads, sizes.tokens, sizes.positions);
  return static_cast<size_t>(space.Bytes(space.MostPlaces()));
}

Error AttendOnHopper(const AttendInput& in, void* to, const Workspace& scratch, Stream stream) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() / 2;
  if (!IsOnVector(scratch.data)) return "scratch must begin at a multiple of 16 bytes";
  if (in.pool.blocks * in.pool.layers * in.pool.block_size > kMost) return "kv is too large";
  if (std::max(in.tokens * in.heads, in.width * in.pool.block_size) > kMost) {
    return "query or tables are too large";
  }
  const LatentSpace space = SpaceFor(in.heads, in.tokens, in.width * in.pool.block_size);
  if (static_cast<int64_t>(scratch.bytes) < space.Bytes(0)) {
    return "scratch is too small: decoder.attention_scratch_bytes tells what is needed";
  }
  CUtensorMap query, pool;
  if (const Error error = DescribeBoth(in, &query, &pool)) return error;
  const LatentKeys keys = LatentKeysOf(in);
  const LatentLeft left = LeftIn(scratch, space);
  const int blocks = static_cast<int>(std::min<int64_t>(kMostBlocks, CurrentHopper().processors));
  const HopperGrid grid{blocks, kLatentBlockThreads, sizeof(LatentShared)};
  auto* out = static_cast<__nv_bfloat16*>(to);
  const int heads = static_cast<int>(in.heads);
  if (const Error error = LaunchOnHopper<LatentAttentionKernel<__nv_bfloat16>>(
          grid, stream, query, pool, keys, left, out, heads, in.scale * kLog2OfE)) {
    return error;
  }
  if (left.places == 0 || in.tokens > kMostCutTokens) return nullptr;
  const int64_t work = in.tokens * keys.head_tiles * kMergeSlices;
  const Grid merge{static_cast<unsigned>(std::min(kMergeBlocks, work)), kMergeThreads};
  return LaunchEarly(LatentMergeKernel<__nv_bfloat16>, merge, stream, keys, left, out, heads);
}

}  // namespace baton_ops::cuda
