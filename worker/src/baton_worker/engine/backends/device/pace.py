"""Whether lookup's drafts are worth their rows: what steps take that verify them, and others.

A step with drafts of lookup computes as many rows for each sequence as lookup may propose, found or
not. Owns what both kinds took, as the device says, and the comparison of tokens a second. How
drafts are made never changes what is emitted, so times may decide. Knows no request and no clock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import fmean, median

_N_LAST = 5
"""Of so many steps of a kind the median counts: one behind a rest of the engine tells nothing."""
_MOST_IN_A_ROW = 256
"""Behind so many decisions that were the same the other kind is tried: its times may be old."""


def _last() -> deque[float]:
    return deque(maxlen=_N_LAST)


@dataclass(slots=True)
class _Known:
    """What is known of steps of so many sequences: seconds of the last of either kind, from the end
    of the one before to its own, tokens that each sequence emitted in those without lookup's
    drafts, and how often in a row it said the same.
    """

    with_seconds: deque[float] = field(default_factory=_last)
    without_seconds: deque[float] = field(default_factory=_last)
    without_tokens: deque[float] = field(default_factory=_last)
    said: bool = False
    n_said: int = 0

    def are_worth_rows(self, gain_tokens: float) -> bool:
        """See `Pace.are_worth_rows`."""
        says = self._are_worth_rows(gain_tokens)
        self.n_said = self.n_said + 1 if says == self.said else 1
        self.said = says
        if self.n_said <= _MOST_IN_A_ROW:
            return says
        self.n_said = 0
        self._doubt(self.without_seconds if says else self.with_seconds)
        return not says

    def _are_worth_rows(self, gain_tokens: float) -> bool:
        if not self.with_seconds:
            return True
        if not self.without_seconds:
            return False
        each, without = fmean(self.without_tokens), median(self.without_seconds)
        return (each + gain_tokens) * without > each * median(self.with_seconds)

    def _doubt(self, seconds: deque[float]) -> None:
        """Keep one, so that the newest that comes counts for as much."""
        while len(seconds) > 1:
            seconds.popleft()


class Pace:
    """See the module."""

    def __init__(self) -> None:
        """Nothing is known of any number of sequences."""
        self._known: dict[int, _Known] = {}

    def note(self, sequences: int, feeds_found: bool, seconds: float, tokens_each: float) -> None:
        """Note a step that only decoded, launched behind another one without a rest.

        Args:
            sequences: that its shape has room for.
            feeds_found: it verified lookup's drafts.
            seconds: from the end of the step before to its own.
            tokens_each: emitted by each sequence, on average.
        """
        known = self._of(sequences)
        if feeds_found:
            known.with_seconds.append(seconds)
            return
        known.without_seconds.append(seconds)
        known.without_tokens.append(tokens_each)

    def are_worth_rows(self, sequences: int, gain_tokens: float) -> bool:
        """Whether a step that verifies lookup's drafts emits more a second than one that does not.

        A kind of which nothing is known is tried.

        Args:
            sequences: that the shape has room for.
            gain_tokens: what each sequence may emit more by them, on average.
        """
        return gain_tokens > 0.0 and self._of(sequences).are_worth_rows(gain_tokens)

    def _of(self, sequences: int) -> _Known:
        return self._known.setdefault(sequences, _Known())
