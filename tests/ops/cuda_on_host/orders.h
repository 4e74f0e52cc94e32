// Who comes when, as every library of kernels is told it; see `Order` of baton_testing/host_orders.py.
#include "shims/fibers.h"

extern "C" {

void host_order(int first, int count, int block, int once_told, int copies_late, int apart,
                int side_by_side) {
  host_cuda::settings.starved = {first, count, block, once_told != 0};
  host_cuda::settings.are_copies_late = copies_late != 0;
  host_cuda::settings.are_warps_apart = apart != 0;
  host_cuda::settings.is_side_by_side = side_by_side != 0;
}
}
