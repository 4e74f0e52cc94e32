"""Pulls that come when a test lets them, or not at all: what a network does to KV."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from baton_worker.engine.kv.sharing import (
    GivenAwayError,
    KvSharing,
    PeerPool,
    PullLostError,
    UnfitKvError,
)


class LatePull:
    """A `Pull` that comes when the test lets it: only then does anything write to its blocks."""

    def __init__(self, copy: Callable[[], None], check: Callable[[], None]) -> None:
        self._copy, self._check = copy, check
        self._has_come = False
        self.lost = ""
        self.failure: Exception | None = None

    def come(self) -> None:
        try:
            self._copy()
        except UnfitKvError as error:
            self.failure = error
        self._has_come = True

    def has_come(self) -> bool:
        return self._has_come

    def is_lost(self) -> bool:
        return bool(self.lost)

    def wait(self, most_seconds: float = math.inf) -> None:
        assert most_seconds < 1, "an engine that waits for long is one that hangs"

    def check(self) -> None:
        if self.lost:
            raise PullLostError(self.lost)
        assert self._has_come, "nobody may look at what has not come"
        if self.failure is not None:
            raise self.failure
        self._check()


class LatePeer:
    """A `Peer` over a mapped pool, whose pulls are `LatePull`s."""

    def __init__(self, pool: PeerPool) -> None:
        self._pool, self.shape = pool, pool.shape
        self.pulls: list[LatePull] = []

    def goes_beside(self, own: KvSharing) -> bool:
        return True

    def is_lent(self, slot: int, serial: int) -> bool:
        return True

    def pull(
        self,
        own: KvSharing,
        blocks: Sequence[int],
        theirs: Sequence[int],
        lease: tuple[int, int] | None,
        spans: Any = None,
    ) -> LatePull:
        into, out_of = list(blocks), list(theirs)

        def copy() -> None:
            if into:
                own.begin_pull(into, self._pool, out_of, spans).wait()

        def check() -> None:
            if lease is not None and not self._pool.is_lent(*lease):
                raise GivenAwayError("prefill gave its blocks away before they were here")

        self.pulls.append(LatePull(copy, check))
        return self.pulls[-1]

    def all_come(self) -> None:
        for pull in self.pulls:
            if not pull.has_come():
                pull.come()
