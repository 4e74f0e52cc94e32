"""A thread on which reads by NIXL take turns: none waits for another.

Owns the thread, and how long it waits between two looks at what is under way. Knows no read.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator

_PAUSE_SECONDS = 0.0001
"""Between two looks at what is under way, at first; it grows to the longest while nothing ends."""
_LONGEST_PAUSE_SECONDS = 0.0005
_IDLE_SECONDS = 1.0

Order = Callable[[], Iterator[None]]
"""What is done on the thread, a piece at a time: each `None` lets others have their turn."""


class Turns:
    """See the module."""

    def __init__(self, name: str) -> None:
        self._orders = deque[Order]()
        self._active: list[Iterator[None]] = []
        self._wakeup = threading.Condition()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def close(self) -> None:
        """Stop; what is under way goes on by itself, and is nobody's business any more."""
        with self._wakeup:
            self._is_closing = True
            self._wakeup.notify()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)

    def order(self, order: Order) -> None:
        """Have something done on the thread, begun in the order asked. May be called on any."""
        with self._wakeup:
            self._orders.append(order)
            self._wakeup.notify()

    def _run(self) -> None:
        pause = _PAUSE_SECONDS
        while True:
            with self._wakeup:
                if not self._orders and not self._is_closing:
                    self._wakeup.wait(pause if self._active else _IDLE_SECONDS)
                if self._is_closing:
                    return
                begun = len(self._orders)
                for _ in range(begun):
                    self._active.append(self._orders.popleft()())
            n_before = len(self._active)
            self._active = [work for work in self._active if _goes_on(work)]
            is_moving = begun or len(self._active) < n_before
            pause = _PAUSE_SECONDS if is_moving else min(2 * pause, _LONGEST_PAUSE_SECONDS)


def _goes_on(work: Iterator[None]) -> bool:
    try:
        next(work)
    except StopIteration:
        return False
    return True
