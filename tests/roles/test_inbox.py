"""The engine thread's queue loses nothing, whoever adds to it and whenever."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from baton_worker.roles.event_queue import DrainRequested, EventQueue, StopRequested, WorkerEvent

FIRST, FROM_A_SIGNAL = DrainRequested(), StopRequested("SIGTERM")


class Interrupted:
    """Calls a handler on this thread before the n-th instruction of a function, as a signal may."""

    def __init__(self, name: str, at: int, handler: Callable[[], None]) -> None:
        self._name = name
        self._left = at
        self._handler = handler
        self.has_happened = False

    def __enter__(self) -> Interrupted:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_name != self._name or self.has_happened:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self._left -= 1
            if self._left < 0:
                self.has_happened = True
                sys.settrace(None)
                frame.f_trace = None
                self._handler()
                return None
        return self._trace


def take_all(inbox: EventQueue) -> list[WorkerEvent]:
    taken: list[WorkerEvent] = []
    while len(inbox):
        taken += inbox.take(0.0)
    return taken


def test_a_signal_at_any_instruction_of_a_take_loses_no_event() -> None:
    """Its handler runs on the thread that takes, with the lock held or not."""
    for at in range(10_000):
        inbox = EventQueue()
        inbox.put(FIRST)
        with Interrupted("take", at, lambda inbox=inbox: inbox.put(FROM_A_SIGNAL)) as signal:
            taken = inbox.take(0.0)
        if not signal.has_happened:
            break
        assert [*taken, *take_all(inbox)] == [FIRST, FROM_A_SIGNAL], f"at instruction {at}"
    else:
        pytest.fail("a take has no end")
    assert at > 10, "instructions were counted"
