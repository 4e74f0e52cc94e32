"""A rank other than 0 of a worker over GPUs, as a program: `python -m baton_worker.roles.rank FD`.

FD is its end of the pipe to rank 0. The edge of such a process: what obeys rank 0's orders (the
engine) and what lets others read its part of the KV pool (the KV channel) meet here alone.
"""

from __future__ import annotations

import sys

from baton_worker.config import ProcessConfig
from baton_worker.engine.backends.device.seam import Device, Kernels
from baton_worker.engine.backends.gpu import open_device
from baton_worker.engine.backends.kernels import OpsKernels
from baton_worker.engine.backends.ranked.follower import follow
from baton_worker.handoff.nixl_rank import attend


def _opened(config: ProcessConfig, rank: int) -> tuple[Device, Kernels]:
    device = open_device(config.engine.framework, rank)
    return device, OpsKernels(device)


if __name__ == "__main__":
    sys.exit(follow(_opened, attend))
