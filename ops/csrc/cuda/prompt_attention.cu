#include <algorithm>

#include "baton_ops/prompt_attention.cuh"
#include "hopper_attention.h"
#include "hopper_launch.h"
#include "paged_keys.h"

namespace baton_ops::cuda {

Error PromptAttention(const HopperAttention& call, Stream stream) {
  const AttendInput& in = call.input;
  const int64_t columns = in.heads * kHeadDim, queries = in.tokens / in.sequences;
  CUtensorMap map_q, map_kv;
  if (const Error error = Describe({in.query, in.tokens, columns, columns}, kPiece,
                                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B, &map_q)) {
    return error;
  }
  if (const Error error = DescribePool(in.pool, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, &map_kv)) {
    return error;
  }
  const PromptShape shape{static_cast<int>(in.sequences), static_cast<int>(queries),
                          static_cast<int>(in.heads), static_cast<int>(in.heads / in.pool.heads),
                          in.scale * kLog2OfE};
  const int64_t works = DivideUp<int64_t>(queries, kPiece) * in.sequences * in.heads;
  const int blocks = static_cast<int>(std::min<int64_t>(works, call.processors));
  const HopperGrid grid{blocks, kPromptThreads, sizeof(PromptShared)};
  return LaunchOnHopper<PromptAttentionKernel<__nv_bfloat16>>(
      grid, stream, map_q, map_kv, static_cast<__nv_bfloat16*>(call.out), KeysOf(in, 1), shape);
}

}  // namespace baton_ops::cuda
