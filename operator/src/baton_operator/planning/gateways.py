"""Which revision the gateways are of, and what a rollout may count before they have come along.

Gateways hold a revision's tokenizer and chat template, and turn away workers that have others. They
are one Deployment, so they are of one revision at a time: of the new one from the moment that it
serves half of the pairs. Until they have moved, the old side keeps the other half: the revision
that the gateways leave and the one that they come to both serve while they do, and gateways that
do not get ready hold the rollout as workers would, until its deadline. A gateway that leaves serves
its connections to the end, by workers of its own revision: they stay until it is gone. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from baton_operator.planning.pairs import Counts, Revision, growing, pairs_of, served_pairs, usable


class Gateways(NamedTuple):
    """The gateways as they are: the revision they are made from, "" when nobody knows, and whether
    every pod is that is to stay.

    `others_leave_in` is in how many seconds the last of the pods must be gone that are of something
    else, and leave; 0 without one.
    """

    revision: str
    is_rolled: bool
    others_leave_in: float = 0.0

    @property
    def are_one(self) -> bool:
        """Whether every pod that serves anybody is of the revision."""
        return self.is_rolled and not self.others_leave_in


def gateway_revision(present: str, goal: str, revisions: Sequence[Revision], target: Counts) -> str:
    """Return the revision that the gateways shall be of; `present` is the one they are of.

    Once moved they stay while the revision serves, so that a pod that comes and goes at the half
    moves nobody. One that serves nothing is left for the one that serves best.
    """
    served = {r.name: served_pairs(usable(r), target) for r in revisions if r.is_live}
    n = pairs_of(target)
    if not served.keys() - {goal} or (n and 2 * served.get(goal, 0) >= n):
        return goal
    if served.get(present) or (present in served and not any(served.values())):
        return present
    return max(served, key=lambda name: (served[name], name != goal, name))


def countable_pairs(
    gateways: Gateways | None, goal: str, revisions: Sequence[Revision], target: Counts
) -> int | None:
    """Return how many of the goal's pairs a rollout may rest on; None for all of them.

    It is less than half while another revision lives and the gateways are not the goal's. None are
    gateways that do not exist, which nobody waits for: then nothing is served anyway.
    """
    has_moved = gateways is None or (gateways.revision == goal and gateways.are_one)
    is_alone = not any(r.is_live for r in revisions if r.name != goal)
    return None if has_moved or is_alone else max(0, pairs_of(target) - 1) // 2


def counted(
    gateways: Gateways | None, goal: str, revisions: Sequence[Revision], target: Counts
) -> tuple[Revision, ...]:
    """Return the revisions, the goal's with no more ready pods than its countable pairs have."""
    pairs = countable_pairs(gateways, goal, revisions, target)
    if pairs is None:
        return tuple(revisions)
    most = growing(target, pairs)
    return tuple(r._replace(ready=r.ready.capped(most)) if r.name == goal else r for r in revisions)
