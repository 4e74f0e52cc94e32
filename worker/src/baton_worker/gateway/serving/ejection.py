"""Keeps requests from a worker that fails one after the other: by count, with back-off.

Pure; the caller gives the time. A worker that refuses at once is always the least loaded, and would
draw every request. After `EJECT_AFTER` failures in a row it is ejected; when the back-off is over
one request at a time tries it again, and what becomes of that restores it, or doubles the back-off.
What was begun before the failures tells nothing of how the worker is now, and does not count; nor
does what went well no further than where others failed: a worker may begin well and always fail.
A failure under a request that other workers fail as well is the request's, and is taken back; of
those that come in a row only so many, for two workers may be broken at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

EJECT_AFTER = 5
BACKOFF_SECONDS = 1.0
MAX_BACKOFF_SECONDS = 60.0
MAX_EXCUSED = 16


@dataclass(slots=True)
class Circuit:
    """One worker's failures. `reason` is the last one, in words.

    Attributes:
        failures: in a row.
        is_ejected: it has failed too often, and no attempt begun since has gone well.
        excused: failures in a row that were taken back.
    """

    failures: int = 0
    is_ejected: bool = False
    reason: str = ""
    excused: int = 0
    _since: float = -math.inf
    _until: float = -math.inf
    _backoff: float = BACKOFF_SECONDS
    _due: float = math.inf
    _n_rows: float = 0

    def admits(self, now: float) -> bool:
        """Whether it may be given a request: it is trusted, or due to be tried."""
        return not self.is_ejected or now >= self._until

    def given(self, now: float) -> None:
        """A request goes there; of an ejected worker's the next may follow after the back-off."""
        if self.is_ejected:
            if now >= self._until:
                self._due = self._until
            self._until = max(self._until, now + self._backoff)

    def not_given(self) -> None:
        """The request did not go there after all: the trial is as due as it was before."""
        self._until = min(self._until, self._due)

    def failed(
        self, begun: float, now: float, reason: str, *, is_full: bool = False, n_rows: int = 0
    ) -> bool:
        """Note an attempt that failed; True if the worker is ejected by it.

        Args:
            begun: when the attempt began.
            now: the same clock.
            reason: for people.
            is_full: the worker has no room: the back-off does not grow.
            n_rows: what the worker told of the attempt before it failed.
        """
        if self.is_ejected and begun < self._since:
            return False
        if not self.failures:
            self._since = begun
        self.failures += 1
        self.reason = reason
        self._n_rows = max(self._n_rows, n_rows)
        if self.is_ejected:
            if not is_full:
                self._backoff = min(2 * self._backoff, MAX_BACKOFF_SECONDS)
        elif self.failures < EJECT_AFTER:
            return False
        newly, self.is_ejected = not self.is_ejected, True
        self._since, self._until, self._due = now, now + self._backoff, math.inf
        return newly

    def worked(self, begun: float, n_rows: float = math.inf) -> bool:
        """Note an attempt that goes well; True if the worker is restored by that.

        Args:
            begun: when the attempt began.
            n_rows: what the worker told of it so far; infinite when it has done all of its part.
        """
        if begun < self._since or n_rows <= self._n_rows:
            return False
        self.failures = self.excused = 0
        self._n_rows = 0
        return self._restore()

    def excuse(self) -> bool:
        """Take a failure back that was its request's fault; True if the worker is restored by that.

        Nothing happens for `MAX_EXCUSED` of them in a row without anything that goes well.
        """
        if not self.failures or self.excused >= MAX_EXCUSED:
            return False
        self.excused += 1
        self.failures -= 1
        if self.failures and not (self.is_ejected and self.failures < EJECT_AFTER):
            return False
        return self._restore()

    def _restore(self) -> bool:
        restored, self.is_ejected = self.is_ejected, False
        if not self.failures:
            self.reason, self._since = "", -math.inf
        self._until, self._due = -math.inf, math.inf
        self._backoff = BACKOFF_SECONDS
        return restored
