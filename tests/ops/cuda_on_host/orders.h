// Who comes when, as every library of kernels is told: see `Order` in host_orders.py.
#include "shims/fibers.h"

extern "C" {

void host_order(int first, int count, int block, int once_told, int copies_late, int apart,
                int side_by_side) {
  host_cuda::settings.starved = {first, count, block, once_told != 0};
  host_cuda::settings.are_copies_late = copies_late != 0;
  host_cuda::settings.are_warps_apart = apart != 0;
  host_cuda::settings.is_side_by_side = side_by_side != 0;
}

// Has every thread pass a barrier by.
void host_skip(const char* file, int line) {
  host_cuda::settings.skipped_line = line;
  snprintf(host_cuda::settings.skipped_file, sizeof(host_cuda::settings.skipped_file), "%s", file);
}
}
