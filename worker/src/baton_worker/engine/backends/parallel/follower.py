"""A rank other than 0: a process that does what rank 0 says and speaks to nobody else.

Run as `python -m baton_worker.engine.backends.parallel.follower FD`, FD being its end of the pipe.
It ends with exit code 0 when rank 0 closes the pipe, and with an error when a collective fails.
"""

from __future__ import annotations

import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from baton_worker.engine.backends.paddle.framework import require_device
from baton_worker.engine.backends.parallel import orders
from baton_worker.engine.backends.parallel.collective import join
from baton_worker.engine.backends.parallel.shard import ShardSizes, build_shard
from baton_worker.engine.kv.pool import KvPool
from baton_worker.engine.model.shape import load_shape
from baton_worker.engine.model.shards import Shard
from baton_worker.engine.model.weights import load_weights
from baton_worker.engine.step.forward import Array, ForwardModel
from baton_worker.readiness import die_with_parent


class Follower:
    """A rank's model and pool. Between orders it holds the arrays of one step, and no request."""

    def __init__(self, model: ForwardModel, pool: KvPool) -> None:
        self._model = model
        self._pool = pool
        self._plan: Any = None
        self._hidden: Array = None
        self._output: Array = None

    def obey(self, order: orders.Order) -> orders.Exported | None:
        """Carry out one order; return what it is answered with."""
        match order:
            case orders.Forward():
                self._forward(order)
            case orders.ForwardMtp():
                self._forward_mtp(order)
            case orders.Import(blocks, arrays):
                shape = (-1, *self._pool.keys[0].shape[1:])
                parts = [np.frombuffer(data, np.float32).reshape(shape) for data in arrays]
                self._pool.import_blocks(blocks, parts)
            case orders.Export(blocks, n_positions):
                own = self._pool.export_blocks(blocks, n_positions)
                return orders.Exported(tuple(orders.as_bytes(array) for array in own))
            case orders.Start() | orders.Join():
                raise ValueError(f"{type(order).__name__} was sent twice")
        return None

    def _forward(self, order: orders.Forward) -> None:
        self._hidden = self._output = None
        self._plan = self._model.plan(orders.unpack_groups(order.groups))
        self._hidden = self._model.forward(orders.as_indices(order.tokens), self._plan)

    def _forward_mtp(self, order: orders.ForwardMtp) -> None:
        source = self._hidden if order.source is None else self._output
        if order.rows is not None:
            source = self._model.select_rows(source, orders.as_indices(order.rows))
        plan = self._plan
        if order.groups is not None:
            plan = self._model.plan(orders.unpack_groups(order.groups))
        fed = self._model.mtp_input(source, order.source)
        tokens = orders.as_indices(order.tokens)
        self._output = self._model.forward_mtp(tokens, fed, plan, order.layer)


def _load(pipe: Connection) -> Follower:
    start = orders.decode_order(pipe.recv_bytes())
    assert isinstance(start, orders.Start), "rank 0 sends it first"
    path = Path(start.model_path)
    shape = load_shape(path)
    shard_of = Shard(start.rank, start.size)
    weights = load_weights(path, shape, shard_of, start.n_mtp)
    pipe.send_bytes(orders.encode(orders.Loaded(weights.identity)))
    meeting = orders.decode_order(pipe.recv_bytes())
    assert isinstance(meeting, orders.Join), "rank 0 sends it second"
    sizes = ShardSizes(start.block_size, start.n_blocks, start.max_positions, start.n_mtp)
    reduce = join(start.rank, start.size, meeting.port)
    shard = build_shard(shape, weights, sizes, start.size, reduce)
    return Follower(shard.model, shard.pool)


def run(pipe: Connection) -> int:
    """Load, join and serve until the pipe is closed; return the exit code."""
    try:
        follower = _load(pipe)
        while True:
            answer = follower.obey(orders.decode_order(pipe.recv_bytes()))
            if answer is not None:
                pipe.send_bytes(orders.encode(answer))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return 0


def main() -> int:
    """Serve over the pipe whose descriptor is the only argument."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides when to stop
    require_device("cpu")
    return run(Connection(int(sys.argv[1])))


if __name__ == "__main__":
    sys.exit(main())
