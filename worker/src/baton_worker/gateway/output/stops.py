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

    __slots__ = ("_held", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def feed(self, text: str) -> StopScan:
        """Add `text`; return what is safe to show now.

        Of several stop strings the one that ends first counts, then the one that begins first: what
        feeding character by character would find. After `stopped` nothing more may be fed.
        """
        if not self._stops:
            return StopScan(text, False)
        window = self._held + text
        matches = [(at + len(stop), at) for stop in self._stops if (at := window.find(stop)) >= 0]
        if matches:
            self._held = ""
            return StopScan(window[: min(matches)[1]], True)
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
