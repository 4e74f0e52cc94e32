"""How far the start of an engine has come: weights in bytes, and that what follows is at work.

Owns the words for log and probes, and how long a start may stand still. Written by the thread that
loads, read by any: what is known is one object that never changes.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

log = logging.getLogger(__name__)

TOLD_SECONDS = 5.0
"""How often the log is told."""

STILL_SECONDS = 3600.0
"""How long nothing may have moved before the start counts as hung. What follows the weights moves
once: a pool is sized and graphs are made, and with other ranks those are waited for."""

_GB = 1e9


@dataclass(frozen=True, slots=True)
class Loading:
    """What is known at one moment.

    Attributes:
        n_bytes: of the checkpoint, that this process reads: its rank's part. 0: not known yet.
        n_read: of them, those that have been passed on.
        seconds: since they were begun with, until now or until the last was there.
        is_loaded: whether that was so.
    """

    n_bytes: int = 0
    n_read: int = 0
    seconds: float = 0.0
    is_loaded: bool = False

    @property
    def rate(self) -> float:
        """Bytes a second; 0 while no time has passed."""
        return self.n_read / self.seconds if self.seconds > 0 else 0.0

    def told(self) -> str:
        """Return it in words."""
        if self.is_loaded:
            return f"weights are loaded, {self.n_bytes / _GB:.1f} GB: the engine is prepared"
        if not self.n_bytes:
            return "loading weights: the checkpoint is opened"
        share = 100 * self.n_read // self.n_bytes
        return (
            f"loading weights: {self.n_read / _GB:.1f} of {self.n_bytes / _GB:.1f} GB ({share} %), "
            f"{self.rate / _GB:.1f} GB/s"
        )


class LoadProgress:
    """See the module.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known = Loading()
        self._began_at = self._told_at = self._moved_at = clock()

    def begin(self, n_bytes: int) -> None:
        """So many bytes are to be read."""
        self._began_at = self._told_at = self._moved_at = self._clock()
        self._known = Loading(n_bytes)

    def add(self, n_bytes: int) -> None:
        """So many more have been passed on."""
        now = self._moved_at = self._clock()
        known = self._known
        self._known = dataclasses.replace(
            known, n_read=known.n_read + n_bytes, seconds=now - self._began_at
        )
        if now - self._told_at >= TOLD_SECONDS:
            self._told_at = now
            log.info(self._known.told(), extra=self._facts())

    def finish(self) -> None:
        """All weights are where they belong."""
        now = self._moved_at = self._clock()
        n_bytes = self._known.n_bytes
        self._known = Loading(n_bytes, n_bytes, now - self._began_at, is_loaded=True)
        log.info("weights are loaded", extra=self._facts())

    def now(self) -> Loading:
        """Return what is known."""
        known = self._known
        if known.is_loaded or not known.n_bytes:
            return known
        return dataclasses.replace(known, seconds=self._clock() - self._began_at)

    def is_overdue(self) -> bool:
        """Whether nothing has moved for longer than it may."""
        return self._clock() - self._moved_at > STILL_SECONDS

    def seconds_still(self) -> float:
        """Return how long nothing has moved."""
        return self._clock() - self._moved_at

    def _facts(self) -> dict[str, object]:
        known = self._known
        return {
            "bytes_read": known.n_read,
            "bytes": known.n_bytes,
            "seconds": round(known.seconds, 3),
            "bytes_per_second": round(known.rate),
        }
