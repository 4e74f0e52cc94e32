"""What a step may and must take from revisions, role by role, pod by pod: the last word on a step.

Pairs are counted whole. Budgets count pods of one role, and the two differ wherever a revision's
roles are out of step: half a pair that does not count may be the ready pod that the floor needs,
or the pod that fills the surge limit. Knows counts only, and no goal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from baton_operator.planning.pairs import Counts, Revision, growing, served_pairs, total, usable


class MinAvailable(NamedTuple):
    """What a step must leave of what serves: ready pods of each role, pairs that revisions serve by
    themselves, and a pair of the revision that gateways send to ("" when none is kept so).
    """

    pods: Counts
    pairs: int
    answering: str


def keep_available(
    wanted: Mapping[str, Counts], order: Sequence[Revision], minimum: MinAvailable, target: Counts
) -> dict[str, Counts]:
    """Return `wanted` with as many ready pods given back as `minimum` lacks, in this order.

    `order` has every revision that holds pods. Never more is given back than is ready now: pods
    that broke by themselves are not the step's doing.
    """
    result = dict(wanted)
    for revision in order:
        if revision.name == minimum.answering:
            pair = growing(target, min(1, _pairs(revision, target)))
            result[revision.name] = Counts(*map(max, result[revision.name], pair))
    result = _with_pairs(result, order, minimum.pairs, target)
    ready = total(map(usable, order))
    kept = total(usable(r).capped(result[r.name]) for r in order)
    missing = ready.capped(minimum.pods).less(kept)
    for revision in order:
        back = usable(revision).less(result[revision.name]).capped(missing)
        result[revision.name] = result[revision.name].plus(back)
        missing = missing.less(back)
    return result


def _with_pairs(
    wanted: dict[str, Counts], order: Sequence[Revision], least: int, target: Counts
) -> dict[str, Counts]:
    """Return `wanted` with pods given back until `least` pairs are served, or those served now."""
    result = dict(wanted)
    kept = {r.name: served_pairs(usable(r).capped(result[r.name]), target) for r in order}
    due = min(least, sum(_pairs(r, target) for r in order))
    missing = due - min(due, sum(kept.values()))
    for revision in order:
        back = min(missing, _pairs(revision, target) - kept[revision.name])
        serving = growing(target, kept[revision.name] + back)
        result[revision.name] = Counts(*map(max, result[revision.name], serving))
        missing -= back
    return result


def _pairs(revision: Revision, target: Counts) -> int:
    return served_pairs(usable(revision), target)


def make_room(
    wanted: Mapping[str, Counts],
    olds: Sequence[Revision],
    lacking: Counts,
    spare: Counts,
    target: Counts,
    *,
    takes_pairs: bool = True,
) -> dict[str, Counts]:
    """Return `wanted` less the pods that are `lacking` in room, the last revision's first.

    Pods that are not ready leave first, then those that have no partner in their revision, and then
    those that serve; of ready ones no more than `spare`.
    """
    result = dict(wanted)
    for old in reversed(olds):
        take = result[old.name].less(usable(old)).capped(lacking)
        result[old.name] = result[old.name].less(take)
        lacking = lacking.less(take)
    for is_paired in (False, True) if takes_pairs else (False,):
        for old in reversed(olds):
            left = Counts() if is_paired else growing(target, _pairs(old, target))
            take = result[old.name].less(left).capped(lacking).capped(spare)
            result[old.name] = result[old.name].less(take)
            lacking, spare = lacking.less(take), spare.less(take)
    return result


def over_limit(held: Iterable[Counts], limit: Counts) -> Counts:
    """Return by how many pods of each role what is held exceeds the limit."""
    return total(held).less(limit)
