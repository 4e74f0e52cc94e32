"""The engine alone in a process of its own: the served model and limits, and nothing around it.

Owns the loop that steps it and notes what came when. Knows no HTTP and no other process.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from baton_testing.arrivals import Arrivals
from baton_worker.config import ProcessConfig
from baton_worker.engine.build import build_engine
from baton_worker.identity import make_handle
from baton_worker.messages import Submit

START_SECONDS = 120.0
ROUND_SECONDS = 120.0


class Served(NamedTuple):
    """What a round brought; `cpu` holds (time, CPU seconds of the process so far)."""

    arrivals: Arrivals
    cpu: Sequence[tuple[float, float]]


def _serve(config: ProcessConfig, pipe: Connection) -> None:
    engine = build_engine(config)
    pipe.send("ready")
    rounds = 0
    with contextlib.suppress(EOFError):  # the other end of the pipe is closed
        while requests := pipe.recv():
            rounds += 1
            pipe.send(_round(engine, rounds, requests))
    engine.close()


def _round(engine: Any, incarnation: int, requests: Sequence[dict[str, Any]]) -> Served:
    """Submit all, step until all have ended."""
    handles = {}
    for number, fields in enumerate(requests):
        handle = make_handle(incarnation, number + 1)
        handles[handle] = number
        engine.submit(Submit(handle, 0, **fields))
    steps: list[tuple[float, Any]] = []
    cpu: list[tuple[float, float]] = []
    until = time.monotonic() + ROUND_SECONDS
    while engine.has_work():
        columns = engine.step().columns
        now = time.monotonic()
        steps.append((now, columns))
        cpu.append((now, time.process_time()))
        if now > until:
            raise TimeoutError(f"a round takes more than {ROUND_SECONDS:g} s")
    times = [np.full(len(columns.handle), now) for now, columns in steps]
    ids = [handles[h] for _, columns in steps for h in columns.handle.tolist()]
    counts = [columns.n_tokens for _, columns in steps]
    arrivals = Arrivals.of(np.concatenate(times), ids, np.concatenate(counts).astype(int))
    return Served(arrivals, cpu)


class EngineAlone:
    """The process; a context, which ends it."""

    def __init__(self, config: ProcessConfig) -> None:
        """Begin to start it; `wait` waits until it can serve."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(config, theirs))
        self._process.start()
        theirs.close()

    def __enter__(self) -> EngineAlone:
        """Nothing more."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join(20)
        self._process.kill()

    def wait(self) -> None:
        """Wait until it has loaded the model."""
        self._said("the model on the device", START_SECONDS)

    def run(self, requests: Sequence[dict[str, Any]]) -> Served:
        """Serve these requests, all there from the first step on; each is fields of `Submit`."""
        self._pipe.send(list(requests))
        served: Served = self._said("the requests' ends", ROUND_SECONDS + 10)
        return served

    def _said(self, wanted: str, seconds: float) -> Any:
        if not self._pipe.poll(seconds):
            raise TimeoutError(f"{wanted}: the engine said nothing for {seconds:g} s")
        return self._pipe.recv()
