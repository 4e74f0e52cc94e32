// Products of each head's vectors with its own part of one matrix: queries folded into what they
// are compared with, what was attended unfolded into values. In the order of generic_matmul.cuh.
#ifndef BATON_OPS_LATENT_PRODUCTS_CUH_
#define BATON_OPS_LATENT_PRODUCTS_CUH_

#include "baton_ops/generic_matmul.cuh"

namespace baton_ops::cuda {

// Elements from one head's to the next.
struct HeadSteps {
  int64_t x;
  int64_t weight;
  int64_t out;
};

// Grid: (tiles' columns, tiles' rows, heads). kTurned: the weight is [in, out].
template <class E, class Tile, bool kTurned>
__global__ void __launch_bounds__(kMatmulThreads)
    HeadProductKernel(MatmulParams<E, E> p, HeadSteps steps) {
  WaitForEarlierGrids();
  LetNextGridStart();
  p.x += blockIdx.z * steps.x;
  p.weight += blockIdx.z * steps.weight;
  p.out += blockIdx.z * steps.out;
  ComputeTile<E, E, Tile, false, kTurned>(p, blockIdx.y * static_cast<int64_t>(Tile::kRows),
                                          blockIdx.x * static_cast<int64_t>(Tile::kColumns));
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_LATENT_PRODUCTS_CUH_
