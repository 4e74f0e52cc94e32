"""A rank other than 0 over a NumPy device, as a process: what `ranked.follower` is over a GPU.

Run as `python -m baton_testing.numpy_rank FD`.
"""

from __future__ import annotations

import sys

from baton_testing.numpy_device import NumpyDevice
from baton_testing.numpy_kernels import NumpyKernels
from baton_worker.config import ProcessConfig
from baton_worker.engine.backends.device.seam import Device, Kernels
from baton_worker.engine.backends.ranked.follower import follow

TOTAL = 256 << 20
COMMAND = (sys.executable, "-m", "baton_testing.numpy_rank")


def opened(config: ProcessConfig, rank: int) -> tuple[Device, Kernels]:
    """Return a rank's device; rank 0's is done when somebody waits for it."""
    device = NumpyDevice(TOTAL, runs_by_itself=rank > 0)
    return device, NumpyKernels(device)


if __name__ == "__main__":
    sys.exit(follow(opened))
