// Programmatic dependent launch: a kernel's blocks may become resident while the kernel before it
// still drains, and wait there. From sm_90 on; before, kernels of a stream follow each other
// anyway.
#ifndef BATON_OPS_GRID_ORDER_CUH_
#define BATON_OPS_GRID_ORDER_CUH_

namespace baton_ops::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define BATON_HAS_GRID_ORDER 0
#else
#define BATON_HAS_GRID_ORDER 1
#endif

// Returns once the kernels before this one are complete and what they wrote is visible.
__device__ __forceinline__ void WaitForEarlierGrids() {
#if BATON_HAS_GRID_ORDER
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel's blocks take what room is left once every block of this kernel has called
// it or ended. They may rely on what was complete when the first of those calls was made, and on
// the blocks of this kernel being resident. A kernel that is waited for must itself have waited for
// the one before it, before it ends.
__device__ __forceinline__ void LetNextGridStart() {
#if BATON_HAS_GRID_ORDER
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_GRID_ORDER_CUH_
