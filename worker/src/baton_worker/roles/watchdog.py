"""A worker whose engine hangs says so, and ends: its link alone would keep it looking alive.

Heartbeats, probes and places are other threads' work and go on while a step never comes back. Half
way to the bound the worker takes no new requests (gateways think it drains) and is not ready;
progress takes that back. At the bound the process ends as if it were killed, for nothing else gets
a thread out of a step: its requests go on elsewhere, and count as those that it died under.
"""

from __future__ import annotations

import enum
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from baton_worker.engine.progress import Activity, Progress
from baton_worker.faults import EXIT_FAULT
from baton_worker.identity import RequestKey
from baton_worker.listening import ListeningClock
from baton_worker.logs import say_within

log = logging.getLogger(__name__)

PERIOD_SECONDS = 0.25
_MOST_SEEN_SECONDS = 4 * PERIOD_SECONDS
_MOST_NAMED = 64
SAY_SECONDS = 1.0
"""How long a line of the log is waited for. What holds the engine's thread may hold the log too, as
standard error does that nobody reads: that must not keep this thread from ending the process.
"""


class EngineHealth(enum.Enum):
    """How the engine's thread does."""

    FINE = enum.auto()
    SUSPECT = enum.auto()
    STUCK = enum.auto()


class Watch:
    """Judges what it sees of the engine's progress; pure, the caller gives the time.

    Only time that it saw pass counts, a second at most from one look to the next: a process that
    stood still, or a machine that has no time for it, hangs no step.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._listening: ListeningClock | None = None
        self._seen: Activity | None = None
        self._since = 0.0

    @property
    def phase(self) -> Activity | None:
        """What was under way at the last look."""
        return self._seen

    @property
    def waited_seconds(self) -> float:
        """How long, as far as that was seen."""
        return self._listening.seconds - self._since if self._listening else 0.0

    def look(self, now: float) -> EngineHealth:
        """Return how it does."""
        if self._listening is None:
            self._listening = ListeningClock(now, most_seconds=_MOST_SEEN_SECONDS)
        self._listening.look(now)
        current = self._progress.current
        if current is None or current is not self._seen:
            self._seen, self._since = current, self._listening.seconds
            return EngineHealth.FINE
        if self.waited_seconds >= current.limit_seconds:
            return EngineHealth.STUCK
        is_late = self.waited_seconds >= current.limit_seconds / 2
        return EngineHealth.SUSPECT if is_late else EngineHealth.FINE


class Watchdog:
    """A thread that looks four times a second.

    Args:
        live: the worker's open requests, named where no step tells its own.
        on_suspect: told when no progress becomes likely (True), and when it was made after all.
        on_stuck: ends the process.
    """

    def __init__(
        self,
        progress: Progress,
        live: Callable[[], Sequence[RequestKey]],
        on_suspect: Callable[[bool], None],
        on_stuck: Callable[[], None] = lambda: os._exit(EXIT_FAULT),
    ) -> None:
        self._watch = Watch(progress)
        self._live = live
        self._on_suspect = on_suspect
        self._on_stuck = on_stuck
        self._is_suspect = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    @property
    def is_suspect(self) -> bool:
        """Whether the engine may hang."""
        return self._is_suspect

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()

    def look(self, now: float) -> None:
        """Look once, and do what follows."""
        verdict = self._watch.look(now)
        if (verdict is not EngineHealth.FINE) != self._is_suspect:
            self._is_suspect = not self._is_suspect
            self._on_suspect(self._is_suspect)
            self._tell()
        if verdict is EngineHealth.STUCK:
            facts = self._facts()
            _say(partial(log.critical, "the engine is stuck; ending the process", extra=facts))
            self._on_stuck()

    def _run(self) -> None:
        while not self._closing.wait(PERIOD_SECONDS):
            self.look(time.monotonic())

    def _tell(self) -> None:
        if self._is_suspect:
            _say(partial(log.warning, "the engine makes no progress", extra=self._facts()))
        else:
            _say(partial(log.info, "the engine makes progress again"))

    def _facts(self) -> dict[str, object]:
        phase = self._watch.phase
        assert phase is not None, "nothing is waited for"
        keys = phase.keys or tuple(self._live())
        return {
            "at": phase.kind,
            "seconds": round(self._watch.waited_seconds, 3),
            "limit_seconds": round(phase.limit_seconds, 3),
            "n_requests": len(keys),
            "requests": " ".join(f"{key.handle}/{key.attempt}" for key in keys[:_MOST_NAMED]),
        }


def _say(line: Callable[[], None]) -> None:
    say_within(line, SAY_SECONDS)
