"""What a step may and must take from revisions beyond whole ticks: role by role, pod by pod.

Ticks count pairs. Budgets count pods of one role, and the two differ wherever a revision's roles
are out of step: half a pair that a tick does not count may be the ready pod that the floor needs,
or the pod that fills the surge limit. Knows counts only, and no goal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from baton_operator.pairs import Counts, Revision, total, usable


def spared(
    wanted: Mapping[str, Counts], order: Sequence[Revision], floor: Counts
) -> dict[str, Counts]:
    """Return `wanted` with as many ready pods given back as the floor lacks, in this order.

    `order` has every revision that holds pods. Never more is given back than is ready now: pods
    that broke by themselves are not the step's doing.
    """
    ready = total(map(usable, order))
    kept = total(usable(r).capped(wanted[r.name]) for r in order)
    missing = ready.capped(floor).less(kept)
    result = dict(wanted)
    for revision in order:
        back = usable(revision).less(wanted[revision.name]).capped(missing)
        result[revision.name] = wanted[revision.name].plus(back)
        missing = missing.less(back)
    return result


def cleared(
    wanted: Mapping[str, Counts], olds: Sequence[Revision], lacking: Counts, spare: Counts
) -> dict[str, Counts]:
    """Return `wanted` less the pods that are `lacking` in room, the last revision's first.

    Pods that are not ready leave before those that are, and of these no more than `spare`.
    """
    result = dict(wanted)
    for old in reversed(olds):
        take = result[old.name].less(usable(old)).capped(lacking)
        result[old.name] = result[old.name].less(take)
        lacking = lacking.less(take)
    for old in reversed(olds):
        take = result[old.name].capped(lacking).capped(spare)
        result[old.name] = result[old.name].less(take)
        lacking, spare = lacking.less(take), spare.less(take)
    return result


def excess(held: Iterable[Counts], limit: Counts) -> Counts:
    """Return by how many pods of each role what is held exceeds the limit."""
    return total(held).less(limit)
