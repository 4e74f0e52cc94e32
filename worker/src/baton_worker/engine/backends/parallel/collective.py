"""The collective between the ranks of a worker: gloo over the loopback address.

Owns how a process enters a group and the one operation that the model needs. Everything that Paddle
takes from the environment for it is set here.
"""

from __future__ import annotations

import os

from baton_worker.engine.backends.paddle.decoder import Reduce
from baton_worker.engine.backends.paddle.framework import Tensor, paddle

HOST = "127.0.0.1"
_JOIN_SECONDS = 60


def join(rank: int, size: int, port: int) -> Reduce:
    """Enter the group that rank 0 opens at `port`, wait for all, and return its sum.

    The sum is taken in place and is the same on every rank, bit for bit.

    Raises:
        RuntimeError: not all came within a minute.
    """
    os.environ["PADDLE_TRAINER_ID"] = str(rank)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    core = paddle.base.core
    store = core.TCPStore(HOST, port, rank == 0, size, _JOIN_SECONDS)
    group = core.ProcessGroupGloo.create(store, rank, size, port)  # the last: a unique name
    total = core.ReduceOp.SUM

    def reduce(tensor: Tensor) -> Tensor:
        group.all_reduce(tensor, total, True)
        return tensor

    return reduce
