"""What lookup proposes for one request, and how often it has been right.

Owns the request's index and that record, which is kept of drafts that no step verified, too: the
tokens that came instead say what would have become of them. Knows no step and no device.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton_worker.engine.ngram import NgramIndex, NgramSizes

_AT_FIRST = 0.5
"""Taken for the share of first drafts that are right, of a request of which none is known."""
_WEIGHT = 0.125
"""Of the newest one in the share."""


class Lookup:
    """See the module."""

    __slots__ = ("_first", "_index", "_share_right")

    def __init__(self, sizes: NgramSizes) -> None:
        self._index = NgramIndex(sizes)
        self._first: tuple[int, int] | None = None
        self._share_right = _AT_FIRST

    def propose(self, tokens: Sequence[int], drafts: Sequence[int], count: int) -> tuple[int, ...]:
        """See `NgramIndex.propose`; notes what has become of the proposal before."""
        self._judge(tokens)
        found = self._index.propose(tokens, drafts, count)
        self._first = (len(tokens) + len(drafts), found[0]) if found else None
        return found

    def gain_tokens(self, count: int) -> float:
        """Return how many drafts may be right of `count` that are found behind the next token.

        For that token the newest proposal stands, which found as many: it must be right first, or
        there will be nothing to find. Each draft counts only if those before it are right, and is
        taken to be as often as a first one.
        """
        gain, right = 0.0, self._share_right
        for _ in range(count):
            right *= self._share_right
            gain += right
        return gain

    def _judge(self, tokens: Sequence[int]) -> None:
        """Take the first draft for wrong, too, where one before it was."""
        if self._first is None:
            return
        at, token = self._first
        is_right = at < len(tokens) and tokens[at] == token
        self._share_right += _WEIGHT * (is_right - self._share_right)
