"""Drafting without a model: what followed the last time this text occurred (prompt lookup).

Owns an index over one request's tokens and the rule that picks a continuation: the longest n-gram
at the end that occurred before, at its latest occurrence. Text that repeats itself (code, quotes,
lists) is predicted well and anything else not at all, in which case nothing is proposed. Knows no
model and no verification; a wrong proposal costs a row of the next forward pass and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_FEW_TOKENS = 8
"""So many are indexed one by one: of one token that takes a third of the time."""


@dataclass(frozen=True, slots=True)
class NgramSizes:
    """Lengths of the n-grams looked up, in tokens, both included."""

    shortest: int
    longest: int

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest:
            raise ValueError(f"n-grams of {self.shortest}..{self.longest} tokens: not a range")


class NgramIndex:
    """Where each n-gram of a growing sequence last occurred with a token behind it."""

    __slots__ = ("_n_indexed", "_next", "_sizes")

    def __init__(self, sizes: NgramSizes) -> None:
        self._sizes = sizes
        self._next: dict[tuple[int, ...], int] = {}
        self._n_indexed = 0

    def propose(self, tokens: Sequence[int], drafts: Sequence[int], count: int) -> tuple[int, ...]:
        """Return `count` tokens to follow `tokens` and then `drafts`, or none if nothing matches.

        A match near the end is copied on into its own copy, so that a loop is continued.

        Args:
            tokens: the sequence so far; it starts with what earlier calls were given.
            drafts: tokens proposed behind it by someone else; not indexed.
            count: how many are wanted.
        """
        if count <= 0:
            return ()
        self._extend(tokens)
        at = self._match([*tokens[-self._sizes.longest :], *drafts])
        if at is None:
            return ()
        tail = list(drafts)
        for position in range(at, at + count):
            ahead = position - len(tokens)
            tail.append(tokens[position] if ahead < 0 else tail[ahead])
        return tuple(tail[len(drafts) :])

    def _match(self, ending: Sequence[int]) -> int | None:
        for size in range(min(self._sizes.longest, len(ending)), self._sizes.shortest - 1, -1):
            at = self._next.get(tuple(ending[-size:]))
            if at is not None:
                return at
        return None

    def _extend(self, tokens: Sequence[int]) -> None:
        """Index the n-grams that end before the last token: those have a token behind them."""
        stop = len(tokens) - 1
        if stop - self._n_indexed > _FEW_TOKENS:
            self._extend_by_many(tokens, stop)
        else:
            for end in range(self._n_indexed + 1, stop + 1):
                ending = tuple(tokens[max(end - self._sizes.longest, 0) : end])
                for size in range(self._sizes.shortest, len(ending) + 1):
                    self._next[ending[-size:]] = end
        self._n_indexed = max(stop, 0)

    def _extend_by_many(self, tokens: Sequence[int], stop: int) -> None:
        """Index those of a prompt, a size at a time."""
        for size in range(self._sizes.shortest, self._sizes.longest + 1):
            first = max(self._n_indexed + 1 - size, 0)
            n_new = stop - size + 1 - first
            if n_new > 0:
                columns = [tokens[first + i : first + i + n_new] for i in range(size)]
                ends = range(first + size, first + size + n_new)
                self._next.update(zip(zip(*columns, strict=True), ends, strict=True))
