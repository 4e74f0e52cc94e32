"""When a worker may call itself ready: its gateways can give it work.

A rollout takes the next old worker away as soon as a new one is ready. A gateway that does not know
the new one by then would have nobody: so a worker is first ready when every gateway that it knows
of is linked. One that cannot be reached holds this up for a bounded time only, and one that comes
later never makes a ready worker unready.

A ready worker outlives its last gateway for a while: the next one is on its way, and what it needs
then are these workers. Were they unready at once, the end of one gateway would let every budget for
disruptions give them all away. Pure but for its own memory; the clock is given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

PATIENCE_SECONDS = 15.0
ABSENCE_SECONDS = 120.0
"""How long no gateway may be linked: as long as an evicted one's successor may take to start."""


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
    _linked_at: float = field(default=0.0, init=False)

    def is_ready(self) -> bool:
        """Return whether work can come, or will when a gateway that left has been replaced."""
        linked, now = self.linked(), self.clock()
        if linked == 0:
            return self._was_complete and now - self._linked_at < ABSENCE_SECONDS
        self._linked_at = now
        if self._since is None:
            self._since = now
        waited = now - self._since
        self._was_complete |= linked >= self.known() or waited >= PATIENCE_SECONDS
        return self._was_complete
