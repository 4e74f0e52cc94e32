// The CUDA ops of mixtures of experts as plain functions, see decoder.h. A pair is a token and one
// of its experts: token t's are t * chosen to t * chosen + chosen - 1, the first wanted most. Pairs
// stand sorted by expert, in each by number, at places.
#ifndef BATON_OPS_CSRC_CUDA_EXPERTS_H_
#define BATON_OPS_CSRC_CUDA_EXPERTS_H_

#include "decoder.h"

namespace baton_ops::cuda {

constexpr int64_t kMostExpertsOfToken = 32, kMostExpertsOfLayer = 512;

struct RouteInput {
  Rows x;  // [tokens, hidden]
  ElementType type;
  int64_t tokens;
  int64_t hidden;
  const float* router;  // [experts, hidden]
  const float* bias;    // [experts], counts for the choice alone; null: none
  int64_t experts;
  int64_t chosen;
  int64_t groups;
  int64_t chosen_groups;
  bool is_sigmoid;  // else softmax
  bool normalises;  // by the sum of the chosen scores, by at least least_sum
  double least_sum;
  double scaling;
};

struct RouteOutput {
  float* products;  // [tokens, experts]
  int32_t* expert;  // [pairs]
  float* weight;    // [pairs]
  int32_t* place;   // [pairs]: where each stands
  int32_t* row;     // [pairs]: by place, its token
  int32_t* starts;  // [experts + 1]: places where each expert's begin
};
Error Route(const RouteInput& input, const RouteOutput& out, Stream stream);

// AddNorm of `norm` to `route.x`, and Route of that, in one launch of a single token where a device
// and its sizes allow it. `norm.rows` is route.tokens.
Error NormRoute(const AddNormInput& norm, const RouteInput& route, const RouteOutput& out,
                Stream stream);

// As Matmul and GateUpSilu of each row with its group's part of the weight. `product.out` is what
// each part has. Where `product.x` has stride 0 it is one row, which each place has; then a group
// has one place at most.
struct GroupedInput {
  MatmulInput product;
  const int32_t* starts;  // [groups + 1]
  int64_t groups;
  // Of a gated product of few rows: what wrote `starts` was complete when the launch before, or one
  // before that, let grids start; so it is read early.
  bool are_known = false;
};
// Of GroupedMatmul `starts` is read early where rows are few: what wrote it lies two launches back
// at least, of which the nearer one waited for it before it let this one start, as
// GroupedGateUpSilu of as many rows does.
Error GroupedMatmul(const GroupedInput& input, const Rows& out, Stream stream);
Error GenericGrouped(const GroupedInput& input, bool is_gated, const Rows& out, Stream stream);
Error GroupedGateUpSilu(const GroupedInput& input, const Rows& out, Stream stream);

// `place` and `weight` are read early: the launch before is GroupedMatmul, and what wrote them was
// complete before that one let this one start.
struct CombineInput {
  Rows made;  // by place
  ElementType type;
  const int32_t* place;  // [pairs]
  const float* weight;   // [pairs]
  Rows beside;           // [tokens, columns]; data null: nothing
  int64_t tokens;
  int64_t chosen;
  int64_t columns;
};
Error Combine(const CombineInput& input, const Rows& out, Stream stream);

// AddNorm of `norm` to `out`, its x being what Combine makes, rounded; `norm.x` is none.
Error CombineNorm(const CombineInput& input, const AddNormInput& norm, const Rows& out,
                  Stream stream);

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_CSRC_CUDA_EXPERTS_H_
