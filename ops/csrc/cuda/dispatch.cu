// Which kernels compute the decoder's matmul and attention: so far the generic ones alone.
#include "decoder.h"

namespace baton_ops::cuda {

Error Matmul(const MatmulInput& input, const Rows& out, ElementType out_type, Stream stream) {
  return GenericMatmul(input, out, out_type, stream);
}

Error Attention(const AttendInput& input, void* out, const Workspace&, Stream stream) {
  return GenericAttention(input, out, stream);
}

size_t AttentionScratchBytes(const AttentionSizes&) { return 0; }

}  // namespace baton_ops::cuda
