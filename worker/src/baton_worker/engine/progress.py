"""What the engine's thread is at, since when, and how long that may last: how a hang is told.

Owns the measure. A step is like others that feed about as many tokens, and may last ten times as
long as the slowest of those did lately; one that is like none before it, for it compiles, warms up
or is the first long chunk, has a bound of its own. What is not a step has the lower bound. Written
by the engine's thread, read by any: what is under way is one object that never changes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from baton_worker.identity import RequestKey

SERVING = "serving"
OUTPUT = "output"

_FACTOR = 10.0
_FORGETTING = 0.98
"""Of the slowest time, what one more of its kind leaves: a host that stood still once is forgotten
after some hundred steps.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Activity:
    """One thing that the engine's thread is at; `keys`: of the requests in a step."""

    kind: str
    limit_seconds: float
    began_at: float
    keys: tuple[RequestKey, ...] = ()


def step_kind(n_tokens: int) -> str:
    """Return which steps one of so many tokens is like: those up to the same power of two."""
    return f"step of less than {1 << n_tokens.bit_length()} tokens"


def launch_kind(n_tokens: int) -> str:
    """Return which launches that of a step of so many tokens is like."""
    return f"launch of a {step_kind(n_tokens)}"


class Progress:
    """See the module.

    Args:
        stuck_seconds: what anything may last.
        first_step_seconds: what a step may last that is like none before it.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        stuck_seconds: float = 10.0,
        first_step_seconds: float = 120.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stuck_seconds = stuck_seconds
        self._first_step_seconds = max(first_step_seconds, stuck_seconds)
        self._clock = clock
        self._slowest: dict[str, float] = {}
        self._current: Activity | None = None

    @property
    def current(self) -> Activity | None:
        """What is under way; None while there is nothing to do."""
        return self._current

    def serving(self) -> None:
        """Commands are served and the next step is planned."""
        self._enter(SERVING)

    def stepping(self, n_tokens: int, keys: tuple[RequestKey, ...]) -> None:
        """A step of so many tokens is waited for."""
        self._enter(step_kind(n_tokens), self._first_step_seconds, keys)

    @contextlib.contextmanager
    def launching(self, n_tokens: int, keys: tuple[RequestKey, ...]) -> Iterator[None]:
        """A device is given a step of so many tokens: what compiles or is captured does so here,
        and here prompts are scored. Not a step's own time, for others are waited for much longer.
        """
        self._enter(launch_kind(n_tokens), self._first_step_seconds, keys)
        yield
        self.serving()

    def gave_up(self) -> None:
        """Nothing is launched after all, which tells nothing of how long a launch may last."""
        self._current = None

    def output(self) -> None:
        """A step's output is made and published."""
        self._enter(OUTPUT)

    def rest(self) -> None:
        """There is nothing to do."""
        self._finish(self._clock())
        self._current = None

    def seconds(self) -> float:
        """Return how long what is under way has lasted."""
        current = self._current
        return 0.0 if current is None else self._clock() - current.began_at

    def is_overdue(self) -> bool:
        """Whether what is under way has lasted longer than it may."""
        current = self._current
        return current is not None and self._clock() - current.began_at > current.limit_seconds

    def _enter(
        self, kind: str, first_seconds: float = 0.0, keys: tuple[RequestKey, ...] = ()
    ) -> None:
        now = self._clock()
        self._finish(now)
        slowest = self._slowest.get(kind)
        known = first_seconds if slowest is None else _FACTOR * slowest
        self._current = Activity(kind, max(self._stuck_seconds, known), now, keys)

    def _finish(self, now: float) -> None:
        done = self._current
        if done is not None:
            before = self._slowest.get(done.kind, 0.0)
            self._slowest[done.kind] = max(now - done.began_at, before * _FORGETTING)
