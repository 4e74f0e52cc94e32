"""A rank other than 0: a process that does at its GPU what rank 0 says and speaks to nobody else.

It ends with exit code 0 when rank 0 closes the pipe, and with an error when its device refuses. The
program is `roles.rank`.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection

import msgspec

from baton_worker.config import ConfigError, ProcessConfig
from baton_worker.engine.api import DeviceError
from baton_worker.engine.backends.device import orders
from baton_worker.engine.backends.device.engine import Team
from baton_worker.engine.backends.device.follower import Answering, Attend, Follower
from baton_worker.engine.backends.device.seam import Device, Kernels
from baton_worker.engine.backends.device.start import Prepared, prepare
from baton_worker.engine.backends.ranked import meeting
from baton_worker.engine.model.checkpoint import CheckpointError
from baton_worker.engine.model.shape import ModelShapeError
from baton_worker.engine.model.shards import Shard
from baton_worker.faults import end_on_thread_fault
from baton_worker.readiness import die_with_parent

log = logging.getLogger(__name__)

Prepare = Callable[[ProcessConfig, Shard], Prepared]
"""Loads a rank's part."""


def run(pipe: Connection, prepare_part: Prepare, attend: Attend) -> int:
    """Load, meet the others and obey until the pipe is closed; return the exit code."""
    try:
        follower = _met(pipe, prepare_part, attend)
        return 1 if follower is None else _serve(pipe, follower)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return 0


def _met(pipe: Connection, prepare_part: Prepare, attend: Attend) -> Follower | None:
    start = meeting.decode_told(pipe.recv_bytes())
    assert isinstance(start, meeting.Start), "rank 0 sends it first"
    shard = Shard(start.rank, start.size)
    try:
        prepared = prepare_part(start.config, shard)
        own = meeting.make_buffer(prepared, shard.size)
        loaded = meeting.Loaded(prepared.model.weights.identity, own.n_bytes)
        pipe.send_bytes(meeting.encode(loaded))
        meeting.give(pipe, own.descriptor)
        meet = meeting.decode_told(pipe.recv_bytes())
        assert isinstance(meet, meeting.Meet), "rank 0 sends it second"
        others = [
            (meeting.take(pipe), n_bytes)
            for rank, n_bytes in enumerate(meet.n_bytes)
            if rank != shard.rank
        ]
        collective = meeting.collective_of(prepared, shard, own, others)
    except (DeviceError, CheckpointError, ModelShapeError, ConfigError) as error:
        log.critical("rank %d cannot serve: %s", shard.rank, error)
        pipe.send_bytes(meeting.encode(meeting.Refused(str(error))))
        _wait_until_closed(pipe)
        return None
    pipe.send_bytes(meeting.encode(meeting.Met()))
    return Follower(prepared.model._replace(team=Team(collective)), attend)


def _wait_until_closed(pipe: Connection) -> None:
    """Stay until rank 0, which may load for minutes yet, has heard why: an end before would be a
    death, which ends it without a reason and with a code that asks for another try.
    """
    with contextlib.suppress(EOFError, OSError):
        while True:
            pipe.recv_bytes()


class _Answers:
    """Sends answers on a thread of its own: who waits until one is taken launches nothing, and rank
    0 takes it only behind a step that needs this rank's launches.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._queue: queue.SimpleQueue[orders.Answer | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="answers", daemon=True)
        self._thread.start()

    def send(self, answer: orders.Answer) -> None:
        """Send behind those before it."""
        self._queue.put(answer)

    def close(self) -> None:
        """Return when all has been sent."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # rank 0 is gone: whoever reads orders finds out too
            while (answer := self._queue.get()) is not None:
                self._pipe.send_bytes(orders.encode(answer))
                if isinstance(answer, orders.Opened):
                    meeting.give(self._pipe, answer.descriptor)


def _serve(pipe: Connection, follower: Follower) -> int:
    """Obey; what is answered is waited for when there is nothing to launch."""
    waiting: deque[Answering] = deque()
    answers = _Answers(pipe)
    while True:
        order: orders.Order | None = None
        try:
            while waiting and not pipe.poll(0):
                answers.send(waiting.popleft()())
            order = _next_order(pipe)
            answering = follower.obey(order)
        except DeviceError as error:
            log.critical("cannot obey %s: %s", type(order).__name__ if order else "order", error)
            answers.send(orders.Failed(str(error)))
            answers.close()
            return 1
        if answering is not None:
            waiting.append(answering)


def _next_order(pipe: Connection) -> orders.Order:
    order = orders.decode_order(pipe.recv_bytes())
    if isinstance(order, orders.Connect):
        return msgspec.structs.replace(order, descriptor=meeting.take(pipe))
    return order


def follow(opened: Callable[[ProcessConfig, int], tuple[Device, Kernels]], attend: Attend) -> int:
    """Be a rank over the pipe whose descriptor is the only argument.

    Args:
        opened: returns the device of a rank.
        attend: see `orders.Connect`.
    """
    die_with_parent()
    end_on_thread_fault()  # who attends to the pool is on a thread, and nobody waits for it here
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides when to stop

    def prepare_part(config: ProcessConfig, shard: Shard) -> Prepared:
        return prepare(config, *opened(config, shard.rank), time.monotonic, shard)

    return run(Connection(int(sys.argv[1])), prepare_part, attend)
