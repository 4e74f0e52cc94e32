"""Clocks that only a test moves."""

from __future__ import annotations


class LoopClock:
    """The clock of an event loop and its timers; `calls` holds [when, callback, is wanted]."""

    def __init__(self, now=0.0):
        self.now, self.calls = now, []

    def time(self):
        return self.now

    def call_at(self, when, callback):
        call = [when, callback, True]
        self.calls.append(call)

        class Timer:
            def cancel(self):
                call[2] = False

        return Timer()

    @property
    def due(self):
        """When what was asked for and has not gone off is due."""
        return [when for when, _, _ in self.calls]

    def advance(self, seconds):
        self.now += seconds
        due = [c for c in self.calls if c[2] and c[0] <= self.now]
        self.calls = [c for c in self.calls if c not in due]
        for call in due:
            call[1]()


class Tired(Exception):
    """Enough of a loop was seen."""


class Pauses:
    """A clock that only pauses move; it ends the loop after `most` of them."""

    def __init__(self, most):
        self.now, self.most, self.taken = 0.0, most, []

    def clock(self):
        return self.now

    async def sleep(self, seconds):
        self.taken.append(seconds)
        self.now += seconds
        if len(self.taken) == self.most:
            raise Tired
