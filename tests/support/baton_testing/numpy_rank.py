"""A rank other than 0 over a NumPy device, as a process: what `roles.rank` is over a GPU.

Owns the command that starts one, wherever the caller has this package from.
"""

from __future__ import annotations

import sys
from pathlib import Path

from baton_testing.numpy_device import NumpyDevice
from baton_testing.numpy_kernels import NumpyKernels
from baton_worker.config import ProcessConfig
from baton_worker.engine.backends.device.seam import Device, Kernels
from baton_worker.engine.backends.ranked.follower import follow
from baton_worker.handoff.nixl_rank import attend

TOTAL = 256 << 20
_SUPPORT = str(Path(__file__).resolve().parent.parent)
_PROGRAM = "import sys; sys.path.insert(0, {!r}); from baton_testing.numpy_rank import main; main()"
COMMAND = (sys.executable, "-c", _PROGRAM.format(_SUPPORT))


def opened(config: ProcessConfig, rank: int) -> tuple[Device, Kernels]:
    """Return a rank's device; rank 0's is done when somebody waits for it."""
    device = NumpyDevice(TOTAL, runs_by_itself=rank > 0)
    return device, NumpyKernels(device)


def main() -> None:
    """Be a rank over the pipe whose descriptor is the only argument."""
    sys.exit(follow(opened, attend))
