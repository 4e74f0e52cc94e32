"""A rank other than 0 at its device: it repeats what rank 0's runner and pool do to theirs.

Owns its engines' memory by their numbers. It holds no request, chooses no shape and downloads
nothing of a step; the same tokens come out of the same logits. Knows no pipe.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import NamedTuple

import numpy as np

from baton_worker.engine.backends.device import orders
from baton_worker.engine.backends.device.engine import LoadedModel, local_model, local_pool
from baton_worker.engine.backends.device.pool import DevicePool
from baton_worker.engine.backends.device.program import N_LANES
from baton_worker.engine.backends.device.seam import Event
from baton_worker.engine.backends.device.steps import Steps
from baton_worker.engine.kv.memory import Region

Answering = Callable[[], orders.Answer]
"""Waits for an answer."""
Attend = Callable[[Connection, Region], None]
"""Does what is said over a connection about a rank's part of a pool, until it is closed."""


class _Engine(NamedTuple):
    pool: DevicePool
    steps: Steps
    taken: list[Event | None]
    """By lane, the point at which its memory may be written again."""


class Follower:
    """Obeys.

    Args:
        model: this rank's part, with its collective.
        attend: see `orders.Connect`; called on a thread of its own.
    """

    def __init__(self, model: LoadedModel, attend: Attend) -> None:
        self._model = model
        self._attend = attend
        self._engines: dict[int, _Engine] = {}

    def obey(self, order: orders.Order) -> Answering | None:
        """Launch what an order asks for; return how to wait for the answer, if it has one.

        Raises:
            DeviceError: the device refuses.
        """
        match order:
            case orders.Open():
                return self._open(order)
            case orders.Connect():
                sharing = self._engines[order.engine].pool.sharing
                assert sharing is not None, "a pool that others read"
                given = (Connection(order.descriptor), sharing.region)
                threading.Thread(
                    target=self._attend_beside, args=given, name="kv-rank-0", daemon=True
                ).start()
            case orders.Meet():
                assert self._model.team is not None, "a rank among others"
                self._model.team.collective.meet()
            case orders.Shut():
                del self._engines[order.engine]
            case orders.Step():
                self._step(self._engines[order.engine], order)
            case orders.Penalise():
                counts = np.frombuffer(order.counts, np.int32)
                seen = np.frombuffer(order.seen, np.uint8)
                self._engines[order.engine].steps.counts.fill(order.slot, counts, seen)
            case orders.Remember():
                histories = self._engines[order.engine].steps.histories
                assert histories is not None, "lookup is a source on all ranks"
                histories.fill(order.slot, order.tokens)
            case orders.Score():
                steps = self._engines[order.engine].steps
                final = steps.space.tokens(order.n_tokens).final
                steps.prompts.logits(final, range(order.start, order.stop))
            case orders.Import():
                self._import(self._engines[order.engine].pool, order)
            case orders.Export():
                return self._export(self._engines[order.engine].pool, order)
            case orders.Measure():
                return self._measured
        return None

    def _attend_beside(self, connection: Connection, region: Region) -> None:
        """Attend beside the steps: to find a way to a device's memory may take UCX long."""
        self._model.device.record()  # the device is this thread's from here on
        self._attend(connection, region)

    def _open(self, order: orders.Open) -> Answering | None:
        pool = local_pool(self._model, order.options)
        steps = Steps(local_model(self._model, pool), order.options)
        self._engines[order.engine] = _Engine(pool, steps, [None] * N_LANES)
        if pool.sharing is None or not pool.sharing.descriptors:
            return None
        (descriptor,), n_bytes = pool.sharing.descriptors, pool.sharing.n_bytes
        return lambda: orders.Opened(n_bytes, descriptor)

    def _step(self, engine: _Engine, order: orders.Step) -> None:
        program = engine.steps.programs.of(order.shape)
        taken = engine.taken[order.lane]
        if taken is not None:
            taken.wait()
        program.told_inputs(order.lane)[:] = np.frombuffer(order.inputs, np.uint8)
        launch = program.start(order.lane, order.is_ahead)
        engine.taken[order.lane] = launch.began

    def _import(self, pool: DevicePool, order: orders.Import) -> None:
        (form,) = pool.shape.arrays(1)
        array = np.frombuffer(order.data, form.dtype).reshape(-1, *form.shape[1:])
        pool.import_blocks(order.blocks, [array])

    def _export(self, pool: DevicePool, order: orders.Export) -> Answering:
        arrived = pool.begin_export(order.blocks, order.n_positions)

        def answer() -> orders.Answer:
            (array,) = arrived()
            return orders.Exported(array.tobytes())

        return answer

    def _measured(self) -> orders.Answer:
        self._model.device.synchronise()
        return orders.Measured(self._model.device.memory())
