"""The next step of a rollout: a pure function from observed counts to wanted counts.

A step is proposed and then bounded. What holds of every step, whatever proposed it:

    surge    what grows fits beside all pods that exist or are on their way (`_grow`, `_refilled`,
             `_hold`: each asks for room beside `held`, and what is held is never counted as gone)
    floor    of each role as many ready pods stay as the budget needs; of pairs that revisions
             serve by themselves all but rounding (`_making_room`); where nothing may be
             unavailable, a pair of the revision that gateways send to. Held over all ready pods,
             and over those alone that the rollout may rest on while gateways are still to come
             (`_bounded`)
    pause    no revision gives a pod to another: only a target that differs from what is asked for
             changes anything (`_hold`)
    reached  from any counts a goal whose pods become ready is reached. Limit minus floor is a pair
             or more: when all that the growing side asked for is ready and nothing else may move,
             its next pair pushes pods out of its way, those that serve nobody first (`make_room`)

The proposal: prefill and decode move together in pairs and within budgets, as `pairs` defines them.
The old side keeps N - U - pairs(ready new) pairs, whether or not its own pods are ready: a broken
old pod cannot block the new, and a broken new one never removes an old one. The old side's minimum
of one pod a role keeps a revision whole while any of it serves. It is waived when nothing may
surge: then a single replica must leave before its successor can come.

Every step is derived from counts alone, so that the same function reverses a rollout: the caller
swaps the goal. A third revision starts beside an interrupted rollout. Where it has no room and
nothing may be unavailable, strays first give way to the keeper, the revision that gateways send to:
that one must get its pods ready for this, and the third waits for them. Cost: O(revisions * N).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from typing import NamedTuple

from baton_operator.planning.pairs import (
    Budget,
    Counts,
    Revision,
    available_floor,
    growing,
    pairs_of,
    served_floor,
    served_pairs,
    shrinking,
    surge_limit,
    total,
    usable,
)
from baton_operator.planning.step_limits import MinAvailable, keep_available, make_room, over_limit


class Phase(StrEnum):
    """Where a rollout stands."""

    COMPLETE = "Complete"
    PROGRESSING = "Progressing"
    PARTITIONED = "Partitioned"
    PAUSED = "Paused"
    SUSPENDED = "Suspended"


class Step(NamedTuple):
    """The next wanted counts by revision; `pairs_new` is what the goal serves now, of `pairs`."""

    wanted: dict[str, Counts]
    phase: Phase
    pairs_new: int
    pairs: int


@dataclass(frozen=True, slots=True)
class Rollout:
    """One planning problem.

    Attributes:
        target: wanted pods over all revisions, after scaling.
        goal: the revision that shall serve; present in `revisions`, possibly with no pods.
        stable: the revision that keeps what a partition or a pause leaves to the old side.
        partition_pairs: pairs that stay on the old side; without effect on the way back to the
            stable revision.
        is_paused: hold the split where it is.
        answering: the revision that gateways send to; "" when nobody knows.
        countable_pairs: the most pairs of the goal that may be rested on, before gateways send to
            it; None for all.
    """

    target: Counts
    goal: str
    stable: str
    revisions: tuple[Revision, ...]
    budget: Budget
    partition_pairs: int = 0
    is_paused: bool = False
    answering: str = ""
    countable_pairs: int | None = None


def next_step(rollout: Rollout) -> Step:
    """Return the counts to want next; equal to the present ones when nothing may move."""
    if rollout.target.is_zero:
        return _suspended(rollout)
    goal = _named(rollout.revisions, rollout.goal)
    olds = _old_side(goal, rollout)
    n = pairs_of(rollout.target)
    ready = _counted_pairs(goal, rollout)
    if not olds:
        phase = Phase.COMPLETE if ready == n else Phase.PROGRESSING
        return Step({goal.name: rollout.target}, phase, ready, n)
    keeper = _keeper(olds, rollout)
    strays = [old for old in olds if old.name != keeper.name]
    if rollout.is_paused:
        return Step(_hold(goal, [keeper, *strays], rollout), Phase.PAUSED, ready, n)
    if strays and not goal.is_live and _must_wait(goal, keeper, rollout):
        given = _without_idle(goal, [keeper, *strays], rollout)
        wanted = given or _trade(keeper, strays, n, rollout)
        return Step({goal.name: Counts(), **wanted}, Phase.PROGRESSING, ready, n)
    reach, phase = _reach(ready, rollout)
    wanted = _trade(goal, [keeper, *strays], reach, rollout)
    return Step(wanted, phase, ready, n)


def _old_side(goal: Revision, rollout: Rollout) -> list[Revision]:
    """Return the revisions beside the goal that have pods, or shall have them again.

    A suspension takes the pods of both sides. Where a partition, or a pause, holds the goal back,
    the stable revision comes back behind it; of how many pairs a pause held nobody knows then.
    """
    olds = [r for r in rollout.revisions if r.name != rollout.goal and r.is_live]
    is_held = rollout.partition_pairs or (rollout.is_paused and goal.desired.is_zero)
    if olds or not is_held or rollout.stable == rollout.goal:
        return olds
    return [r for r in rollout.revisions if r.name == rollout.stable]


def _hold(goal: Revision, olds: Sequence[Revision], rollout: Rollout) -> dict[str, Counts]:
    """Return wanted counts that move no pod from one revision to another.

    Only a target that differs from what is asked for changes anything: pods beyond it leave the old
    side, and what is missing comes to the first old revision that has pods; where nobody has any,
    to the first.
    """
    target, everyone = rollout.target, [*olds, goal]
    wanted = {r.name: r.desired for r in olds} | {goal.name: goal.desired.capped(target)}
    surplus = total(wanted.values()).less(target)
    split = _split([goal, *olds], target)
    for takes_ready in (False, True):
        for old in reversed(olds):
            kept = split[old.name]
            least = kept if takes_ready else Counts(*map(max, kept, usable(old)))
            take = wanted[old.name].less(least).capped(surplus)
            wanted[old.name] = wanted[old.name].less(take)
            surplus = surplus.less(take)
    missing = target.less(total(r.desired for r in everyone))
    room = surge_limit(target, rollout.budget).less(total(r.held for r in rollout.revisions))
    has_pods = (r for r in everyone if not r.desired.is_zero)
    taker = next(has_pods, everyone[0])
    wanted[taker.name] = wanted[taker.name].plus(missing.capped(room))
    return _bounded(wanted, everyone, rollout)


def _split(order: Iterable[Revision], target: Counts) -> dict[str, Counts]:
    """Return what each revision's pairs need, of those asked for, the first revision's first."""
    needs: dict[str, Counts] = {}
    left = pairs_of(target)
    for revision in order:
        pairs = min(left, served_pairs(revision.desired, target))
        needs[revision.name] = growing(target, pairs)
        left -= pairs
    return needs


def _must_wait(goal: Revision, keeper: Revision, rollout: Rollout) -> bool:
    """Whether a goal cannot begin before the keeper has taken over from the strays: there is no
    room for it, and nothing may become unavailable to make some.
    """
    has_room = _in_the_way(goal, 1, rollout).is_zero
    is_serving = served_pairs(usable(keeper), rollout.target) > 0
    return is_serving and not has_room and not rollout.budget.unavailable_pairs


def _without_idle(
    goal: Revision, olds: Sequence[Revision], rollout: Rollout
) -> dict[str, Counts] | None:
    """Return the olds' counts less pods that serve nobody, if the first of them waits for pods, and
    those alone leave room for a pair of the goal: what may never get ready must not keep out what
    mends it.
    """
    if olds[0].desired.less(olds[0].ready).is_zero:
        return None
    lacking, spare = _in_the_way(goal, 1, rollout), _spare(olds, rollout)
    wanted = {r.name: r.desired for r in olds}
    given = make_room(wanted, olds, lacking, spare, rollout.target, takes_pairs=False)
    given = _bounded(given, olds, rollout)
    less = total(wanted.values()).less(total(given.values()))
    return given if lacking.less(less).is_zero else None


def _reach(ready: int, rollout: Rollout) -> tuple[int, Phase]:
    """Return the pairs at which the goal shall stop, and what that makes of the rollout."""
    n = pairs_of(rollout.target)
    is_return = rollout.goal == rollout.stable
    reach = n if is_return else max(0, n - rollout.partition_pairs)
    if reach == n:
        return n, Phase.PROGRESSING
    return reach, Phase.PARTITIONED if ready >= reach else Phase.PROGRESSING


def _as_counted(revision: Revision, rollout: Rollout) -> Revision:
    """Return a revision with the ready pods that the rollout may rest on."""
    if revision.name != rollout.goal or rollout.countable_pairs is None:
        return revision
    most = growing(rollout.target, rollout.countable_pairs)
    return revision._replace(ready=revision.ready.capped(most))


def _counted_pairs(revision: Revision, rollout: Rollout) -> int:
    """Return what a revision serves and the rollout may rest on."""
    return served_pairs(usable(_as_counted(revision, rollout)), rollout.target)


def _trade(
    grow: Revision, shrink: Sequence[Revision], reach: int, rollout: Rollout
) -> dict[str, Counts]:
    """Return wanted counts where `grow` moves towards `reach` pairs and `shrink` make room."""
    target, n = rollout.target, pairs_of(rollout.target)
    floor_pairs = n - reach
    served = min(reach, _counted_pairs(grow, rollout))
    keep = max(floor_pairs, n - rollout.budget.unavailable_pairs - served)
    others = total(r.held for r in rollout.revisions if r.name != grow.name)
    grown = _grow(reach, others, rollout)
    # Both sides may want the same room, after a raised partition: the growing side has it.
    taken = Counts(*map(max, grown, grow.held))
    wanted = _keep_old(shrink, keep, floor_pairs, taken, rollout)
    kept = grow.desired.capped(growing(target, reach))
    wanted[grow.name] = Counts(*map(max, grown, kept))
    everyone = [*shrink, grow]
    wanted = _bounded(wanted, everyone, rollout)
    begun = served_pairs(grow.desired, target)
    is_moving = any(wanted[r.name] != r.desired for r in everyone)
    if is_moving or served < begun or begun >= reach:
        return wanted
    return _making_room(wanted, grow, shrink, begun + 1, rollout)


def _making_room(
    wanted: Mapping[str, Counts],
    grow: Revision,
    shrink: Sequence[Revision],
    reach: int,
    rollout: Rollout,
) -> dict[str, Counts]:
    """Return `wanted`, that moves nothing, less what is in the way of `reach` pairs of `grow`.

    The last revision gives first. Where what it serves is needed, and the bounds give it all back,
    another gives in its place: pods of one role serve more pairs in one revision than in another.
    Between three revisions more is lost to rounding than the bound of pairs allows for: where it
    would hold the rollout for ever, it is waived but for the one pair.
    """
    everyone = [*shrink, grow]
    lacking, spare = _in_the_way(grow, reach, rollout), _spare(everyone, rollout)
    floor = served_floor(rollout.target, rollout.budget)
    for pairs, giver in product((floor, min(floor, 1)), reversed(shrink)):
        order = [*(r for r in shrink if r is not giver), giver]
        given = make_room(wanted, order, lacking, spare, rollout.target)
        given = _bounded(given, everyone, rollout, pairs)
        if given != wanted:
            return given
    return dict(wanted)


def _spare(revisions: Iterable[Revision], rollout: Rollout) -> Counts:
    """Return the ready pods that are not needed for the floor."""
    floor = available_floor(rollout.target, rollout.budget)
    return total(map(usable, revisions)).less(floor)


def _bounded(
    wanted: Mapping[str, Counts],
    everyone: Sequence[Revision],
    rollout: Rollout,
    pairs: int | None = None,
) -> dict[str, Counts]:
    """Return what may be had of `wanted`: the last word on each step, whatever proposed it."""
    floor = served_floor(rollout.target, rollout.budget)
    minimum = MinAvailable(
        pods=available_floor(rollout.target, rollout.budget),
        pairs=floor if pairs is None else pairs,
        answering="" if rollout.budget.unavailable_pairs else rollout.answering,
    )
    usable_by_gateways = [_as_counted(r, rollout) for r in everyone]
    for revisions in (usable_by_gateways, everyone):
        wanted = keep_available(wanted, revisions, minimum, rollout.target)
    return dict(wanted)


def _in_the_way(grow: Revision, reach: int, rollout: Rollout) -> Counts:
    """Return how many pods of others must leave before `grow` can have `reach` pairs."""
    others = (r.held for r in rollout.revisions if r.name != grow.name)
    limit = surge_limit(rollout.target, rollout.budget)
    return over_limit([growing(rollout.target, reach), *others], limit)


def _grow(reach: int, others: Counts, rollout: Rollout) -> Counts:
    """Return the most whole pairs up to `reach` that fit beside `others` in the surge limit."""
    target = rollout.target
    room = surge_limit(target, rollout.budget).less(others)
    return growing(target, min(reach, served_pairs(room, target)))


def _keep_old(
    olds: Sequence[Revision], keep: int, floor_pairs: int, taken: Counts, rollout: Rollout
) -> dict[str, Counts]:
    """Share `keep` pairs among the old revisions, the first of them first.

    A stray keeps no more than it can serve, and what the revisions before it do not serve yet:
    pods of theirs that were asked for and are not ready serve nobody. Nothing grows here, except
    the first revision towards the pairs that a partition leaves it.
    """
    target = rollout.target
    is_whole = rollout.budget.surge_pairs > 0
    wanted: dict[str, Counts] = {}
    left = keep
    for index, old in enumerate(olds):
        bound = shrinking(target, left, is_whole=is_whole)
        if index == 0:
            least = _refilled(floor_pairs, taken, olds, rollout)
            wanted[old.name] = Counts(
                *(max(f, min(d, b)) for f, d, b in zip(least, old.desired, bound, strict=True))
            )
        else:
            serves = shrinking(target, served_pairs(usable(old), target), is_whole=is_whole)
            wanted[old.name] = old.desired.capped(serves).capped(bound)
        left -= served_pairs(usable(old).capped(wanted[old.name]), target)
    return wanted


def _refilled(
    floor_pairs: int, taken: Counts, olds: Sequence[Revision], rollout: Rollout
) -> Counts:
    """Return what the first old revision must have for a partition, within the surge limit; `taken`
    is what the growing side holds.
    """
    target = rollout.target
    least = shrinking(target, floor_pairs, is_whole=True)
    others = total([taken, *(old.held for old in olds[1:])])
    limit = surge_limit(target, rollout.budget)
    room = (most - used for most, used in zip(limit, others, strict=True))
    desired = olds[0].desired
    return Counts(*(min(f, max(r, d)) for f, r, d in zip(least, room, desired, strict=True)))


def _keeper(olds: Sequence[Revision], rollout: Rollout) -> Revision:
    """Return the old revision that outlives the others: the one that gateways send to while it
    serves, else the one that serves best; of equals, who has ready pods, or is stable.
    """

    def rank(old: Revision) -> tuple[bool, int, int, bool, int]:
        served = served_pairs(usable(old), rollout.target)
        return (
            served > 0 and old.name == rollout.answering,
            served,
            sum(usable(old)),
            old.name == rollout.stable,
            served_pairs(old.desired, rollout.target),
        )

    return max(olds, key=rank)


def _suspended(rollout: Rollout) -> Step:
    wanted = {revision.name: Counts() for revision in rollout.revisions}
    return Step(wanted, Phase.SUSPENDED, 0, 0)


def _named(revisions: Iterable[Revision], name: str) -> Revision:
    return next(
        (r for r in revisions if r.name == name), Revision(name, Counts(), Counts(), Counts())
    )
