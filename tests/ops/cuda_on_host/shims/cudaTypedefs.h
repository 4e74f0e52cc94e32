// The type of the driver's function that describes a matrix.
#ifndef BATON_TESTS_CUDA_ON_HOST_CUDA_TYPEDEFS_H_
#define BATON_TESTS_CUDA_ON_HOST_CUDA_TYPEDEFS_H_

#include "cuda.h"

using PFN_cuTensorMapEncodeTiled_v12000 = decltype(&cuTensorMapEncodeTiled);

#endif  // BATON_TESTS_CUDA_ON_HOST_CUDA_TYPEDEFS_H_
