"""Stop strings: ends text where one begins, even when it spans several tokens.

Pure. Text that may still grow into a stop string is held back, so a client never sees a part of
one. The answer does not depend on how the text was cut into pieces. Knows nothing of tokens: who
feeds it counts them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class StopScan(NamedTuple):
    """`text` is safe to show; `stopped` tells that a stop string begins right after it."""

    text: str
    stopped: bool


class StopMatcher:
    """Ends a growing text at the first stop string that is completed."""

    __slots__ = ("_held", "_skips", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self._skips = False

    def feed(self, text: str, *, may_end: bool = True) -> StopScan:
        """Add `text`; return what is safe to show now.

        Of several stop strings the one that ends first counts, then the one that begins first: what
        feeding character by character would find. After `stopped` nothing more may be fed.

        Args:
            may_end: whether a stop string that ends in `text` counts; one that begins in it and
                ends later does all the same.
        """
        if not self._stops:
            return StopScan(text, False)
        window = self._held + text
        if may_end:
            if self._skips:  # what ends in the text held back did not count when it came
                n_held = len(self._held)
                firsts = [(max(0, n_held - len(stop) + 1), stop) for stop in self._stops]
                found = [(window.find(stop, first), stop) for first, stop in firsts]
                matches = [(at + len(stop), at) for at, stop in found if at >= 0]
            else:
                matches = [
                    (at + len(stop), at) for stop in self._stops if (at := window.find(stop)) >= 0
                ]
            if matches:
                self._held = ""
                return StopScan(window[: min(matches)[1]], True)
        else:
            self._skips = True
        safe = min(_first_partial(window, stop) for stop in self._stops)
        self._held = window[safe:]
        return StopScan(window[:safe], False)

    def flush(self) -> str:
        """Return the text held back: the sequence ended, so it cannot become a stop any more."""
        held, self._held = self._held, ""
        return held


def _first_partial(window: str, stop: str) -> int:
    """Return where the longest end of `window` that begins `stop` starts, or its length."""
    at = window.find(stop[0], max(0, len(window) - len(stop) + 1))
    while at >= 0:
        if stop.startswith(window[at:]):
            return at
        at = window.find(stop[0], at + 1)
    return len(window)
