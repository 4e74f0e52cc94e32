"""When the tokens of many requests came, and how many a second while all of them ran.

Pure. Owns the definition of a steady phase, which an engine alone and a gateway's clients share.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Times = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


class Phase(NamedTuple):
    """A steady phase: from when the last request had its n-th token until it had so many more."""

    begin: float
    end: float
    tokens: int
    mean_begin: float
    """Tokens that a request had at the begin, in the mean: a measure of its context."""

    @property
    def seconds(self) -> float:
        """Of it."""
        return self.end - self.begin

    @property
    def tokens_per_s(self) -> float:
        """Of all requests."""
        return self.tokens / self.seconds


class Arrivals(NamedTuple):
    """Tokens in order of time: when, of which request, how many."""

    time: Times
    request: Counts
    count: Counts

    @classmethod
    def of(cls, time: Any, request: Any, count: Any) -> Arrivals:
        """Return arrivals that came in any order."""
        order = np.argsort(time, kind="stable")
        return cls(np.asarray(time)[order], np.asarray(request)[order], np.asarray(count)[order])

    def totals(self, n_requests: int) -> Counts:
        """Return how many tokens each request got."""
        return np.bincount(self.request, self.count, n_requests).astype(np.int64)

    def steady(self, n_requests: int, skip: int, length: int) -> Phase:
        """Return the phase from `skip` tokens of the last request on, `length` of its tokens long.

        Raises:
            ValueError: a request ended before the phase did, so that fewer ran.
        """
        begins, ends, lasts = [], [], []
        for request in range(n_requests):
            of_it = self.request == request
            had, time = np.cumsum(self.count[of_it]), self.time[of_it]
            if not len(had) or had[-1] < skip + length:
                raise ValueError(f"request {request} has fewer than {skip + length} tokens")
            begins.append(time[np.searchsorted(had, skip)])
            ends.append(time[np.searchsorted(had, skip + length)])
            lasts.append(time[-1])
        begin, end = max(begins), max(ends)
        if min(lasts) < end:
            raise ValueError(
                f"a request ended {end - min(lasts):.3f} s before the phase did: ask for more "
                "tokens a request than skipped and measured ones"
            )
        before = int(self.count[self.time <= begin].sum())
        until = int(self.count[self.time <= end].sum())
        return Phase(begin, end, until - before, before / n_requests)
