"""When a worker may call itself ready: its gateways can give it work.

A rollout takes the next old worker away as soon as a new one is ready. A gateway that does not know
the new one by then would have nobody: so a worker is first ready when every gateway that it knows
of is linked. One that cannot be reached holds this up for a bounded time only, and one that comes
later never makes a ready worker unready. Pure but for its own memory; the clock is given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

PATIENCE_SECONDS = 15.0


@dataclass(slots=True)
class LinkedReadiness:
    """Judges the counts of gateways that are known and linked.

    Attributes:
        known: gateways that this worker shall be linked with.
        linked: those that have welcomed it and are alive.
        clock: seconds, steady.
    """

    known: Callable[[], int]
    linked: Callable[[], int]
    clock: Callable[[], float]
    _since: float | None = field(default=None, init=False)
    _was_complete: bool = field(default=False, init=False)

    def is_ready(self) -> bool:
        """Return whether work can come; True once is True while any gateway is linked."""
        linked = self.linked()
        if linked == 0:
            return False
        if self._since is None:
            self._since = self.clock()
        waited = self.clock() - self._since
        self._was_complete |= linked >= self.known() or waited >= PATIENCE_SECONDS
        return self._was_complete
