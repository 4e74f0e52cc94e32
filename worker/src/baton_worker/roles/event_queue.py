"""What happens to a worker from outside, queued for its engine thread.

Link and KV transport call `put` from their own threads, signal handlers on the engine thread itself
between any two instructions of it. That thread takes everything at once and sleeps on the same
condition when it has nothing to step. Bounded by what gateways may send: each event belongs to a
request that the gateway's own admission has counted.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

from baton_worker.handoff.api import HandoffEvent
from baton_worker.link.api import WorkerLinkEvent


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The process shall end: requests still here get an explicit error first."""

    reason: str


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """No new requests; those here go on to their end. Not `is_wanted`: they may come again."""

    is_wanted: bool = True


@dataclass(frozen=True, slots=True)
class DraftCountRequested:
    """Set K, drafts per step, to a value that the engine allows."""

    num_speculative_tokens: int


WorkerEvent = WorkerLinkEvent | HandoffEvent | StopRequested | DrainRequested | DraftCountRequested


class EventQueue:
    """A thread-safe event queue with one consumer."""

    def __init__(self) -> None:
        self._events: deque[WorkerEvent] = deque()
        self._wake = threading.Condition()

    def put(self, event: WorkerEvent) -> None:
        """Add an event and wake the consumer."""
        with self._wake:
            self._events.append(event)
            self._wake.notify()

    def __len__(self) -> int:
        return len(self._events)

    def take(self, timeout_seconds: float) -> list[WorkerEvent]:
        """Return all queued events; wait for one up to `timeout_seconds` (0: do not wait)."""
        with self._wake:
            if not self._events and timeout_seconds > 0:
                self._wake.wait(timeout_seconds)
            # One at a time: a signal's handler gets past the lock, and may put one more meanwhile.
            return [self._events.popleft() for _ in range(len(self._events))]
