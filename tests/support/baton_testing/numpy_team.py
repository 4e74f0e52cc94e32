"""Several tensor-parallel ranks in one process, over NumPy devices: rank 0's is the caller's.

Owns the followers' threads, each with a device that runs by itself, and the exchange buffers. An
order goes to a follower as its bytes, as over a pipe. Knows no test.
"""

from __future__ import annotations

import itertools
import os
import queue
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import msgspec

from baton_testing.numpy_device import NumpyDevice
from baton_testing.numpy_kernels import NumpyKernels
from baton_worker.engine.api import RankDiedError
from baton_worker.engine.backends.device import orders
from baton_worker.engine.backends.device.collective import (
    Collective,
    ExchangeSizes,
)
from baton_worker.engine.backends.device.engine import LoadedModel, Team
from baton_worker.engine.backends.device.follower import Follower
from baton_worker.engine.backends.device.loading import load_device_weights
from baton_worker.engine.model.checkpoint import open_checkpoint
from baton_worker.engine.model.shape import load_shape
from baton_worker.engine.model.shards import Shard
from baton_worker.handoff.nixl_rank import attend

MOST_TOKENS = 2048
LIMIT_SECONDS = 300.0
"""How long a rank waits for the others, which share a few processors."""

Wrong = Callable[[Any, Any], Any]


class _Member:
    """A follower on a thread of its own."""

    def __init__(self, rank: int, model: LoadedModel) -> None:
        self.rank = rank
        self.model = model
        self.told: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._run, name=f"rank-{rank}", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        follower = self.follower = Follower(self.model, attend)
        while (data := self.told.get()) is not None:
            try:
                answering = follower.obey(orders.decode_order(data))
                if answering is not None:
                    self.answers.put(orders.encode(_given(answering())))
            except Exception as error:  # noqa: BLE001 - rank 0 is told
                self.error = error
                self.answers.put(None)
                return


def _given(answer: orders.Answer) -> orders.Answer:
    """Return an answer as over a pipe, where a descriptor arrives as another one."""
    if isinstance(answer, orders.Opened):
        return msgspec.structs.replace(answer, descriptor=os.dup(answer.descriptor))
    return answer


class ThreadFollowers:
    """See `orders.Followers`."""

    def __init__(self, models: Sequence[LoadedModel], device: NumpyDevice) -> None:
        self._device = device
        self._members = [_Member(rank, model) for rank, model in enumerate(models, 1)]
        self._numbers = itertools.count(1)
        self.n_told = 0

    def new_number(self) -> int:
        """See `Followers.new_number`."""
        return next(self._numbers)

    def tell(self, told: Sequence[orders.Order]) -> None:
        """See `Followers.tell`."""
        self.n_told += 1
        each = list(told) * len(self._members) if len(told) == 1 else list(told)
        for member, order in zip(self._members, each, strict=True):
            if member.error is not None:
                raise RankDiedError(f"rank {member.rank}: {member.error}") from member.error
            member.told.put(orders.encode(order))

    def connect(self, engine: int) -> list[Connection]:
        """See `Followers.connect`."""
        ours = []
        for member in self._members:
            near, far = Pipe()
            with far:
                told = orders.Connect(engine, os.dup(far.fileno()))
            member.told.put(orders.encode(told))
            ours.append(near)
        return ours

    def answers(self) -> list[orders.Answer]:
        """See `Followers.answers`."""
        found = []
        for member in self._members:
            data = member.answers.get(timeout=LIMIT_SECONDS)
            if data is None:
                raise RankDiedError(f"rank {member.rank}: {member.error}") from member.error
            found.append(orders.decode_answer(data))
        return found

    def close(self) -> None:
        """End the threads, and rank 0's device's."""
        for member in self._members:
            member.told.put(None)
        for member in self._members:
            member.thread.join()
            member.model.device.close()  # type: ignore[attr-defined]
        self._device.close()


def team_of(
    folder: Path,
    size: int,
    n_mtp: int | None = None,
    limit_seconds: float = LIMIT_SECONDS,
    most_tokens: int = MOST_TOKENS,
    runs_by_itself: bool = False,
) -> LoadedModel:
    """Return rank 0 of a model over so many ranks, loaded part by part; close its followers.

    Args:
        runs_by_itself: rank 0's device, too, does what it is given without being waited for.
    """
    model_shape, checkpoint = load_shape(folder), open_checkpoint(folder)
    n_mtp = model_shape.n_mtp_layers if n_mtp is None else n_mtp
    devices = [NumpyDevice(runs_by_itself=runs_by_itself or rank > 0) for rank in range(size)]
    kernels = [NumpyKernels(device) for device in devices]
    weights = [
        load_device_weights(device, checkpoint, model_shape, "float32", n_mtp, Shard(rank, size))
        for rank, device in enumerate(devices)
    ]
    sizes = ExchangeSizes.of(model_shape, size, most_tokens, 4)
    shared = [device.shared(sizes.buffer_bytes(kernels[0])) for device in devices]
    models = []
    for rank, device in enumerate(devices):
        buffers = tuple(
            own.tensor if other == rank else device.map(own.descriptor, own.n_bytes)
            for other, own in enumerate(shared)
        )
        collective = Collective(
            device, kernels[rank], Shard(rank, size), sizes, shared[rank], buffers, limit_seconds
        )
        models.append(
            LoadedModel(device, kernels[rank], model_shape, weights[rank], Team(collective))
        )
    for own in shared:
        os.close(own.descriptor)
    assert models[0].team is not None, "it was just made"
    followers = ThreadFollowers(models[1:], devices[0])
    team = models[0].team._replace(followers=followers, copier=lambda rank: NumpyDevice())
    return models[0]._replace(team=team)
