"""When the line may look for room, with those ahead who are looked at in parts, one in a turn.

Pure: told of each part and of room, asked whose turn it is. The rules:

1. Room belongs to those ahead until each of them was looked at since it came. A pass looks at each
   once, and room that comes during one is for the whole next one.
2. Where room comes in every pass there is no such moment. So behind two passes the line is owed a
   look, whatever came: in the third, right behind a part of it and in the same turn, between which
   nothing comes. It is another part each time: what comes just before the line looks is in turn
   for each of those ahead.
"""

from __future__ import annotations

_PASSES_BEFORE_OWED = 2


class Precedence:
    """See the module."""

    def __init__(self) -> None:
        self._is_news = False  # room came that the pass under way, or the next, may be too late for
        self._n_parts = 0  # of the pass under way; 0: none is
        self._n_passes = 0  # that ended since the line had its look
        self._owed_behind = 1  # the part behind which the line has the look that it is owed

    @property
    def is_theirs(self) -> bool:
        """Whether those ahead have to be looked at."""
        return self._is_news or self._n_parts > 0

    def room(self) -> None:
        """Room came."""
        self._is_news = True

    def forget(self) -> None:
        """Nobody is ahead."""
        self._is_news = False
        self._n_parts = self._n_passes = 0

    def begin_part(self) -> None:
        """A part of those ahead is about to be looked at."""
        if not self._n_parts:
            self._is_news = False
        self._n_parts += 1

    def end_part(self, *, is_last: bool) -> bool:
        """A part was looked at, and with the last one the pass is over; whether the line may look
        now.
        """
        n_parts = self._n_parts
        if is_last:
            self._n_parts = 0
            self._n_passes += 1
        if is_last and not self._is_news:
            self._n_passes = 0
            return True
        return self._is_owed(n_parts, is_last=is_last)

    def _is_owed(self, n_parts: int, *, is_last: bool) -> bool:
        is_there = n_parts == self._owed_behind or (is_last and n_parts < self._owed_behind)
        if self._n_passes < _PASSES_BEFORE_OWED or not is_there:
            return False
        self._n_passes = 0
        self._owed_behind = 1 if is_last else n_parts + 1
        return True
