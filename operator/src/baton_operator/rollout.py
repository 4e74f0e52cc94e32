"""The next step of a rollout: a pure function from observed counts to wanted counts.

Prefill and decode move together in ticks and within budgets, as `pairs` defines them. The old
side's minimum of one pod a role keeps a revision whole while any of it serves. It is waived when
nothing may surge: then a single replica must leave before its successor can come.

The old side keeps N - U - ticks(ready new) ticks, whether or not its own pods are ready: a broken
old pod cannot block the new, and a broken new one never removes an old one. Whatever the ticks say,
no step takes a role's ready pods below its floor (`room.spared`). When all that the growing side
asked for is ready and nothing else may move, its next tick pushes pods out of its way, down to
that floor (`room.cleared`). Limit minus floor is a tick or more, so that it always fits: from any
counts, a goal whose pods become ready is reached.

Every step is derived from counts alone, so that the same function reverses a rollout: the caller
swaps the goal. A third revision starts beside an interrupted rollout. Where it has no room and
nothing may be unavailable, strays first give way to the revision that serves best: that one must
get its pods ready for this, and the third waits for them. Cost: O(revisions * N).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from baton_operator.pairs import (
    Budget,
    Counts,
    Revision,
    available_floor,
    growing,
    served_ticks,
    shrinking,
    surge_limit,
    ticks_of,
    total,
    usable,
)
from baton_operator.room import cleared, excess, spared


class Phase(StrEnum):
    """Where a rollout stands."""

    COMPLETE = "Complete"
    PROGRESSING = "Progressing"
    PARTITIONED = "Partitioned"
    PAUSED = "Paused"
    SUSPENDED = "Suspended"


class Step(NamedTuple):
    """The next wanted counts by revision; `ticks_new` is what the goal serves now, of `ticks`."""

    wanted: dict[str, Counts]
    phase: Phase
    ticks_new: int
    ticks: int


@dataclass(frozen=True, slots=True)
class Rollout:
    """One planning problem.

    Attributes:
        target: wanted pods over all revisions, after scaling.
        goal: the revision that shall serve; present in `revisions`, possibly with no pods.
        stable: the revision that keeps what a partition or a pause leaves to the old side.
        partition_pairs: ticks that stay on the old side; without effect on the way back to the
            stable revision.
        is_paused: hold the split where it is.
    """

    target: Counts
    goal: str
    stable: str
    revisions: tuple[Revision, ...]
    budget: Budget
    partition_pairs: int = 0
    is_paused: bool = False


def next_step(rollout: Rollout) -> Step:
    """Return the counts to want next; equal to the present ones when nothing may move."""
    if rollout.target.is_zero:
        return _suspended(rollout)
    goal = _named(rollout.revisions, rollout.goal)
    olds = [r for r in rollout.revisions if r.name != rollout.goal and r.is_live]
    n = ticks_of(rollout.target)
    ready = served_ticks(usable(goal), rollout.target)
    if not olds:
        phase = Phase.COMPLETE if ready == n else Phase.PROGRESSING
        return Step({goal.name: rollout.target}, phase, ready, n)
    keeper = _keeper(olds, rollout)
    strays = [old for old in olds if old.name != keeper.name]
    may_move = not rollout.is_paused and not goal.is_live
    if strays and may_move and _must_wait(goal, keeper, rollout):
        wanted = {goal.name: Counts(), **_trade(keeper, strays, n, rollout)}
        return Step(wanted, Phase.PROGRESSING, ready, n)
    reach, phase = _reach(goal, rollout)
    wanted = _trade(goal, [keeper, *strays], reach, rollout)
    return Step(wanted, phase, ready, n)


def _must_wait(goal: Revision, keeper: Revision, rollout: Rollout) -> bool:
    """Whether a goal cannot begin before the keeper has taken over from the strays: there is no
    room for it, and nothing may become unavailable to make some.
    """
    has_room = _in_the_way(goal, 1, rollout).is_zero
    is_serving = served_ticks(usable(keeper), rollout.target) > 0
    return is_serving and not has_room and not rollout.budget.unavailable_pairs


def _reach(goal: Revision, rollout: Rollout) -> tuple[int, Phase]:
    """Return the tick at which the goal shall stop, and what that makes of the rollout."""
    n = ticks_of(rollout.target)
    if rollout.is_paused:
        return _begun_ticks(goal, rollout.target), Phase.PAUSED
    is_return = rollout.goal == rollout.stable
    reach = n if is_return else max(0, n - rollout.partition_pairs)
    if reach == n:
        return n, Phase.PROGRESSING
    done = served_ticks(usable(goal), rollout.target) >= reach
    return reach, Phase.PARTITIONED if done else Phase.PROGRESSING


def _begun_ticks(revision: Revision, target: Counts) -> int:
    """Return the largest k whose new_r(k) is wanted already."""
    n = ticks_of(target)
    return max(
        k
        for k in range(n + 1)
        if all(w <= d for w, d in zip(growing(target, k), revision.desired, strict=True))
    )


def _trade(
    grow: Revision, shrink: Sequence[Revision], reach: int, rollout: Rollout
) -> dict[str, Counts]:
    """Return wanted counts where `grow` moves towards `reach` ticks and `shrink` make room."""
    target, n = rollout.target, ticks_of(rollout.target)
    floor_ticks = n - reach
    served = min(reach, served_ticks(usable(grow), target))
    keep = max(floor_ticks, n - rollout.budget.unavailable_pairs - served)
    others = total(r.held for r in rollout.revisions if r.name != grow.name)
    grown = _grow(reach, others, rollout)
    # Both sides may want the same room, after a raised partition: the growing side has it.
    taken = Counts(*map(max, grown, grow.held))
    wanted = _keep_old(shrink, keep, floor_ticks, taken, rollout)
    kept = grow.desired.capped(growing(target, reach))
    wanted[grow.name] = Counts(*map(max, grown, kept))
    floor = available_floor(target, rollout.budget)
    wanted = spared(wanted, [*shrink, grow], floor)
    begun = _begun_ticks(grow, target)
    is_moving = any(wanted[r.name] != r.desired for r in [*shrink, grow])
    if is_moving or served < begun or begun >= reach:
        return wanted
    spare = total(map(usable, [*shrink, grow])).less(floor)
    return cleared(wanted, shrink, _in_the_way(grow, begun + 1, rollout), spare)


def _in_the_way(grow: Revision, tick: int, rollout: Rollout) -> Counts:
    """Return how many pods of others must leave before `grow` can have this tick."""
    others = (r.held for r in rollout.revisions if r.name != grow.name)
    limit = surge_limit(rollout.target, rollout.budget)
    return excess([growing(rollout.target, tick), *others], limit)


def _grow(reach: int, others: Counts, rollout: Rollout) -> Counts:
    """Return the most whole ticks up to `reach` that fit beside `others` in the surge limit."""
    target = rollout.target
    limit = surge_limit(target, rollout.budget)
    room = Counts(*(most - used for most, used in zip(limit, others, strict=True)))
    fits = (
        growing(target, k)
        for k in range(reach, 0, -1)
        if all(w <= r for w, r in zip(growing(target, k), room, strict=True))
    )
    return next(fits, Counts())


def _keep_old(
    olds: Sequence[Revision], keep: int, floor_ticks: int, taken: Counts, rollout: Rollout
) -> dict[str, Counts]:
    """Share `keep` ticks among the old revisions, the first of them first.

    A stray keeps no more than it can serve, and what the revisions before it do not serve yet:
    pods of theirs that were asked for and are not ready serve nobody. Nothing grows here, except
    the first revision towards the ticks that a partition or a pause leaves it. In a pause strays
    keep what they have, whether it serves or not, and the first has what they leave.
    """
    target = rollout.target
    is_whole = rollout.budget.surge_pairs > 0
    wanted: dict[str, Counts] = {}
    left = keep
    for index, old in enumerate(olds):
        bound = shrinking(target, left, is_whole=is_whole)
        if index == 0:
            least = _refilled(floor_ticks, taken, olds, rollout)
            wanted[old.name] = Counts(
                *(max(f, min(d, b)) for f, d, b in zip(least, old.desired, bound, strict=True))
            )
        else:
            serves = shrinking(target, served_ticks(usable(old), target), is_whole=is_whole)
            worth = old.desired if rollout.is_paused else old.desired.capped(serves)
            wanted[old.name] = worth.capped(bound)
        left -= served_ticks(usable(old).capped(wanted[old.name]), target)
    return wanted


def _refilled(
    floor_ticks: int, taken: Counts, olds: Sequence[Revision], rollout: Rollout
) -> Counts:
    """Return what the first old revision must have for a partition or pause, within the surge
    limit; `taken` is what the growing side holds.
    """
    target = rollout.target
    least = shrinking(target, floor_ticks, is_whole=True)
    if rollout.is_paused:
        least = least.less(total(old.desired for old in olds[1:]))
    others = total([taken, *(old.held for old in olds[1:])])
    limit = surge_limit(target, rollout.budget)
    room = (most - used for most, used in zip(limit, others, strict=True))
    desired = olds[0].desired
    return Counts(*(min(f, max(r, d)) for f, r, d in zip(least, room, desired, strict=True)))


def _keeper(olds: Sequence[Revision], rollout: Rollout) -> Revision:
    """Return the old revision that serves best; of equals, who has ready pods, or is stable."""
    return max(
        olds,
        key=lambda r: (
            served_ticks(usable(r), rollout.target),
            sum(usable(r)),
            r.name == rollout.stable,
            served_ticks(r.desired, rollout.target),
        ),
    )


def _suspended(rollout: Rollout) -> Step:
    wanted = {revision.name: Counts() for revision in rollout.revisions}
    return Step(wanted, Phase.SUSPENDED, 0, 0)


def _named(revisions: Iterable[Revision], name: str) -> Revision:
    return next(
        (r for r in revisions if r.name == name), Revision(name, Counts(), Counts(), Counts())
    )
