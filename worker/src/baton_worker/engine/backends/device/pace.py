"""Whether drafts are worth a wait: what steps take that went ahead, and that waited.

A step that verifies drafts of lookup is laid out when the one before has landed, and the device
stands still meanwhile; one that goes ahead has none of them. Owns what both kinds took, as the
device says, and the comparison of tokens a second. How drafts are made never changes what is
emitted, so times may decide. Knows no request and no clock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import fmean, median

_N_LAST = 5
"""Of so many steps of a kind the median counts: one behind a rest of the engine tells nothing."""
_MOST_IN_A_ROW = 256
"""Behind so many decisions that were the same the other kind is tried: its times may be old."""
_LEAST_TO_TRY_TOKENS = 0.1
"""What each sequence must gain for a wait to be tried of which nothing is known: one behind which
nothing is found is told of by nobody.
"""


def _last() -> deque[float]:
    return deque(maxlen=_N_LAST)


@dataclass(slots=True)
class _Known:
    """What is known of steps of so many sequences: seconds of the last of either kind, from the end
    of the one before to its own, tokens that each sequence emitted in those that went ahead, and
    how often in a row it said the same.
    """

    waited_seconds: deque[float] = field(default_factory=_last)
    ahead_seconds: deque[float] = field(default_factory=_last)
    ahead_tokens: deque[float] = field(default_factory=_last)
    said: bool = False
    n_said: int = 0

    def is_worth_a_wait(self, gain_tokens: float) -> bool:
        """See `Pace.is_worth_a_wait`."""
        says = self._is_worth_a_wait(gain_tokens)
        self.n_said = self.n_said + 1 if says == self.said else 1
        self.said = says
        if self.n_said <= _MOST_IN_A_ROW:
            return says
        self.n_said = 0
        self._doubt(self.ahead_seconds if says else self.waited_seconds)
        return not says

    def _is_worth_a_wait(self, gain_tokens: float) -> bool:
        if not self.waited_seconds:
            return gain_tokens >= _LEAST_TO_TRY_TOKENS
        if not self.ahead_seconds:
            return False
        each, ahead = fmean(self.ahead_tokens), median(self.ahead_seconds)
        return (each + gain_tokens) * ahead > each * median(self.waited_seconds)

    def _doubt(self, seconds: deque[float]) -> None:
        """Keep one, so that the newest that comes counts for as much."""
        while len(seconds) > 1:
            seconds.popleft()


class Pace:
    """See the module."""

    def __init__(self) -> None:
        """Nothing is known of any number of sequences."""
        self._known: dict[int, _Known] = {}

    def note(self, sequences: int, is_ahead: bool, seconds: float, tokens_each: float) -> None:
        """Note a step that only decoded, behind another one without a rest.

        Args:
            sequences: that its shape has room for.
            is_ahead: it went ahead of the one before; else it waited, and verified what was found.
            seconds: from the end of the step before to its own.
            tokens_each: emitted by each sequence, on average.
        """
        known = self._of(sequences)
        if not is_ahead:
            known.waited_seconds.append(seconds)
            return
        known.ahead_seconds.append(seconds)
        known.ahead_tokens.append(tokens_each)

    def is_worth_a_wait(self, sequences: int, gain_tokens: float) -> bool:
        """Whether a step that waits emits more a second than one that goes ahead.

        A kind of which nothing is known is tried, a wait for a tenth of a token at least.

        Args:
            sequences: that the shape has room for.
            gain_tokens: what each sequence may emit more if its drafts are fed, on average.
        """
        return gain_tokens > 0.0 and self._of(sequences).is_worth_a_wait(gain_tokens)

    def _of(self, sequences: int) -> _Known:
        return self._known.setdefault(sequences, _Known())
