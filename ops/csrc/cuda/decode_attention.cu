#include <algorithm>

#include "baton_ops/decode_attention.cuh"
#include "hopper_attention.h"
#include "hopper_launch.h"
#include "paged_keys.h"

namespace baton_ops::cuda {
namespace {

constexpr int64_t kMostBlocks = 132;  // of a launch; scratch is made for so many
constexpr int64_t kBroughtBytes = int64_t{kMostRowsTimesHeads} * sizeof(int);
constexpr int64_t kPlaceBytes = (kHeadDim + 4 + 1) * sizeof(float);

int64_t SplitsOf(int64_t positions) {
  return std::max<int64_t>(1, DivideUp<int64_t>(positions, kSplitKeys));
}

// Bytes of scratch for contexts of up to so many splits.
int64_t ScratchFor(int64_t splits, int64_t used_rows) {
  return kBroughtBytes + kMostBlocks * splits * used_rows * kPlaceBytes;
}

int64_t HeadsAKv(const AttendInput& in) { return in.heads / in.pool.heads; }

// Into how many parts the heads that share keys are cut, so that each fits; 0: none does.
int64_t PartsOf(const AttendInput& in) {
  const int64_t queries = in.tokens / in.sequences, heads = HeadsAKv(in);
  for (int64_t parts = 1; parts <= heads; ++parts) {
    if (heads % parts == 0 && queries * (heads / parts) <= kMostDecodeRows) return parts;
  }
  return 0;
}

int64_t UsedRows(const AttendInput& in) {
  return in.tokens / in.sequences * (HeadsAKv(in) / PartsOf(in));
}

// What is left lies behind the counts, whose place no call changes.
DecodeLeft LeftIn(const Workspace& scratch, int64_t splits, int64_t used_rows) {
  auto* bytes = static_cast<char*>(scratch.data);
  auto* made = reinterpret_cast<float*>(bytes + kBroughtBytes);
  const int64_t places = kMostBlocks * splits * used_rows;
  DecodeLeft left{};
  left.made = made;
  left.sums = made + places * kHeadDim;
  left.tops = left.sums + places * 4;
  left.brought = reinterpret_cast<int*>(bytes);
  left.slots = static_cast<int>(splits);
  return left;
}

}  // namespace

bool DecodeTakes(const AttendInput& in, const Workspace& scratch) {
  const int64_t parts = PartsOf(in), splits = SplitsOf(in.width * in.pool.block_size);
  const int64_t lists = in.sequences * in.pool.heads * parts;
  return parts > 0 && in.sequences <= kMaxContexts && lists <= kMostRowsTimesHeads &&
         lists * splits * kMostBlocks < kMostSplitsTimesBlocks &&
         static_cast<int64_t>(scratch.bytes) >= ScratchFor(splits, UsedRows(in));
}

size_t DecodeScratchBytes(const AttentionSizes& sizes) {
  const int64_t shared = sizes.kv_heads > 0 ? sizes.heads / sizes.kv_heads : 0;
  const int64_t used = std::min<int64_t>(kMostDecodeRows, sizes.tokens * shared);
  return ScratchFor(SplitsOf(sizes.positions), used);
}

Error DecodeAttention(const HopperAttention& call, Stream stream) {
  const AttendInput& in = call.input;
  CUtensorMap map;
  // Tiles are read by halves of 128-byte rows: whole 256 bytes would be read twice.
  if (const Error error = DescribePool(in.pool, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, &map)) {
    return error;
  }
  const DecodeShape shape{static_cast<int>(in.sequences),
                          static_cast<int>(in.tokens / in.sequences),
                          static_cast<int>(HeadsAKv(in) / PartsOf(in)), in.scale * kLog2OfE};
  const DecodeLeft left =
      LeftIn(call.scratch, SplitsOf(in.width * in.pool.block_size), UsedRows(in));
  // No more than there are splits, if contexts are as long as tables are wide: what blocks without
  // work would take is free for the kernels around this one.
  const int64_t most_splits =
      in.sequences * in.pool.heads * PartsOf(in) * SplitsOf(in.width * in.pool.block_size);
  const int blocks =
      static_cast<int>(std::min({kMostBlocks, static_cast<int64_t>(call.processors), most_splits}));
  const HopperGrid grid{blocks, kDecodeThreads, sizeof(DecodeShared)};
  const auto launch = [&](auto is_few) {
    return LaunchOnHopper<DecodeAttentionKernel<__nv_bfloat16, is_few.value>>(
        grid, stream, map, static_cast<const __nv_bfloat16*>(in.query),
        static_cast<__nv_bfloat16*>(call.out), KeysOf(in, PartsOf(in)), left, shape);
  };
  return UsedRows(in) <= kFewDecodeRows ? launch(std::true_type()) : launch(std::false_type());
}

}  // namespace baton_ops::cuda
