"""How often lookup's proposals for one request have been right.

Owns that record, which is kept of drafts that no step verified, too: the tokens that came instead
say what would have become of them. Knows no step and no device.
"""

from __future__ import annotations

from collections.abc import Sequence

_AT_FIRST = 0.5
"""Taken for the share of first drafts that are right, of a request of which none is known."""
_WEIGHT = 0.125
"""Of the newest one in the share."""


class Lookup:
    """See the module."""

    __slots__ = ("_first", "_n_found", "_share_right")

    def __init__(self) -> None:
        """Nothing has been proposed."""
        self._first: tuple[int, int] | None = None
        self._n_found = 0
        self._share_right = _AT_FIRST

    def note(self, tokens: Sequence[int], n_before: int, found: Sequence[int]) -> None:
        """Note what has become of the proposal before, and the newest one.

        Args:
            tokens: of the request.
            n_before: drafts that others have made, behind which this one stands.
            found: may be empty.
        """
        self._judge(tokens)
        self._first = (len(tokens) + n_before, found[0]) if found else None
        self._n_found = len(found)

    def gain_tokens(self) -> float:
        """Return how many drafts may be right of those that are found behind the next token.

        For that token the newest proposal stands, which found as many: it must be right first, or
        there will be nothing to find. Each draft counts only if those before it are right, and is
        taken to be as often as a first one.
        """
        gain, right = 0.0, self._share_right
        for _ in range(self._n_found):
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
