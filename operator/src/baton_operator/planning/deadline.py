"""How long a rollout has waited for pods: the only time that its deadline counts. Pure.

A clock of the wall cannot tell waiting from a pause, from an operator that was away, or from a jump
of its own. So time is charged in pieces, from one look to the next, and a piece is never longer
than an operator at work leaves between two looks: who comes back after a day charges one piece.
"""

from __future__ import annotations

from typing import NamedTuple

PIECES = 20
"""A deadline's pieces: as many status writes may it cost."""


class Waited(NamedTuple):
    """Whole seconds charged so far, and since when (unix seconds) more run; 0 when none do."""

    seconds: int = 0
    since: int = 0


class Verdict(NamedTuple):
    """`left_seconds` until the deadline, at or below 0 when it is missed; and when to look again,
    None while no time is charged.
    """

    waited: Waited
    left_seconds: int
    look_in_seconds: int | None


def piece_seconds(deadline_seconds: int) -> int:
    """Return the longest time that one look charges."""
    return max(1, deadline_seconds // PIECES)


def charged(waited: Waited, deadline_seconds: int, now: float, *, is_waiting: bool) -> Verdict:
    """Return what has been waited by `now`.

    The running piece stays as it is until it is full, so that a look in between changes nothing
    that would have to be written down. A clock that went back starts the piece again.
    """
    piece = piece_seconds(deadline_seconds)
    time = int(now)
    passed = min(max(0, time - waited.since), piece) if waited.since else 0
    left = deadline_seconds - waited.seconds - passed
    if not is_waiting:
        return Verdict(Waited(waited.seconds + passed), left, None)
    if passed == piece or not 0 < waited.since <= time:
        waited, passed = Waited(waited.seconds + passed, time), 0
    return Verdict(waited, left, min(piece - passed, max(left, 0)))
