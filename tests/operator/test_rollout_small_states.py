"""Every state of three revisions with a few pods: what one step takes, and that none is a trap.

Random sequences reach states that rollouts lead to; people and autoscalers lead to others (a
budget edited midway, a Deployment scaled by hand, a revision named again). So here are all of them.
"""

from __future__ import annotations

from itertools import product

import pytest

from baton_operator.planning.gateways import Gateways, countable_pairs
from baton_operator.planning.pairs import (
    Budget,
    Counts,
    Revision,
    available_floor,
    pairs_of,
    served_pairs,
    surge_limit,
)
from baton_operator.planning.rollout import Phase, Rollout, next_step

NAMES = ("a", "b", "c")
BUDGETS = ((1, 0), (0, 1), (1, 1), (2, 0), (0, 2))


def role_states(limit):
    """Yield (desired, ready) of one role for each revision, within the surge limit."""
    one = [(desired, ready) for desired in range(limit + 1) for ready in range(desired + 1)]
    return [each for each in product(one, repeat=3) if sum(d for d, _ in each) <= limit]


def all_states(target, budget):
    limit = surge_limit(target, budget)
    for prefill, decode in product(role_states(limit.prefill), role_states(limit.decode)):
        desired, ready = zip(
            *(zip(p, d, strict=True) for p, d in zip(prefill, decode, strict=True)), strict=True
        )
        yield tuple(
            Revision(name, Counts(*want), Counts(*want), Counts(*have))
            for name, want, have in zip(NAMES, desired, ready, strict=True)
        )


def followed(revisions, wanted, broken, lost=()):
    """Return the revisions when workloads have done as they were told; broken pods stay unready,
    and of `lost` revisions those that are not ready before.
    """

    def ready(revision, now):
        if revision.name in lost:
            return revision.ready.capped(now)
        return Counts() if revision.name in broken else now

    return tuple(
        Revision(r.name, now, now, ready(r, now))
        for r in revisions
        for now in [wanted.get(r.name, r.desired)]
    )


def sum_of(counts, role):
    return sum(each[role] for each in counts)


def rollout_of(target, budget, goal, stable, revisions, answering, **changes):
    """A rollout whose gateways are of `answering`; "" where there are none."""
    gateways = Gateways(answering, is_rolled=True) if answering else None
    pairs = countable_pairs(gateways, goal, revisions, target)
    return Rollout(
        target, goal, stable, revisions, budget,
        answering=answering, countable_pairs=pairs, **changes,
    )  # fmt: skip


def moved(answering, goal, revisions, target):
    """Gateways that are there come to a goal that serves half."""
    served = next(served_pairs(r.ready, target) for r in revisions if r.name == goal)
    return goal if answering and 2 * served >= pairs_of(target) else answering


def check_step(target, budget, revisions, wanted, answering=""):
    limit, floor = surge_limit(target, budget), available_floor(target, budget)
    after = [wanted.get(r.name, r.desired) for r in revisions]
    left = [r.ready.capped(now) for r, now in zip(revisions, after, strict=True)]
    for role in (0, 1):
        existing = sum_of((r.existing for r in revisions), role)
        ready = sum_of((r.ready for r in revisions), role)
        assert sum_of(after, role) <= max(existing, limit[role]), (revisions, wanted)
        assert sum_of(left, role) >= min(ready, floor[role]), (revisions, wanted)
    if budget.unavailable_pairs:
        return
    served = [served_pairs(r.ready, target) for r in revisions]
    serves = [served_pairs(ready, target) for ready in left]
    assert any(serves) or not any(served), (revisions, wanted)
    for revision, was, now in zip(revisions, served, serves, strict=True):
        assert now or not was or revision.name != answering, (revisions, wanted)


class Steps:
    """What is planned in each state of a rollout without a partition, checked when first asked for:
    rollouts with other broken revisions pass through the same states.
    """

    def __init__(self, target, budget, goal, stable):
        self._of = (target, budget, goal, stable)
        self._known = {}

    def __call__(self, revisions, answering):
        state = revisions, answering
        if state not in self._known:
            target, budget, goal, stable = self._of
            step = next_step(rollout_of(target, budget, goal, stable, revisions, answering))
            if step.phase is not Phase.COMPLETE:
                check_step(target, budget, revisions, step.wanted, answering)
            self._known[state] = step
        return self._known[state]


def check_end(steps, target, goal, start, answering, broken, ending, lost=()):
    """Follow steps to the goal; `ending` holds the states known to get there, and gains these."""
    state, passed = (start, answering), []
    while state not in ending:
        assert state not in passed, f"{goal} is never reached from {start}: {state}"
        passed.append(state)
        step = steps(*state)
        if step.phase is Phase.COMPLETE:
            break
        revisions = followed(state[0], step.wanted, broken, lost)
        state = revisions, moved(state[1], goal, revisions, target)
    ending.update(passed)


CASES = {
    "one pair": (Counts(1, 1), BUDGETS),
    "two prefill, one decode": (Counts(2, 1), BUDGETS),
    "one prefill, two decode, surge": (Counts(1, 2), ((1, 0),)),
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("target", "budgets"), CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize(("goal", "stable"), [("c", "a"), ("a", "a")], ids=["forth", "back"])
@pytest.mark.parametrize("gateways", [None, 0, 1], ids=["none", "of one old", "of the other"])
def test_from_any_state_steps_keep_budgets_and_end_at_the_goal(
    target, budgets, goal, stable, gateways
):
    others = [name for name in NAMES if name != goal]
    answering = others[gateways] if gateways is not None else ""
    for budget in (Budget(*each) for each in budgets):
        ends = {broken: set() for broken in ((), (others[0],), (others[1],), tuple(others))}
        steps = Steps(target, budget, goal, stable)
        for revisions in all_states(target, budget):
            problem = rollout_of(
                target, budget, goal, stable, revisions, answering, partition_pairs=1
            )
            check_step(target, budget, revisions, next_step(problem).wanted, answering)
            for broken, ending in ends.items():
                check_end(steps, target, goal, revisions, answering, broken, ending)


@pytest.mark.parametrize("lost", ["a", "b", "ab"])
@pytest.mark.parametrize("answering", ["", "a", "b"])
def test_a_third_revision_begins_although_pods_of_others_never_come(lost, answering):
    target, budget, ending = Counts(1, 1), Budget(1, 0), set()
    steps = Steps(target, budget, "c", "a")
    for revisions in all_states(target, budget):
        if not revisions[2].is_live:
            check_end(steps, target, "c", revisions, answering, (), ending, lost)


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_pause_moves_nothing_in_any_state_of_whole_pairs(budget):
    """Pods that are missing come, pods beyond the target go; none change hands."""
    target, budget = Counts(1, 1), Budget(*budget)
    checked = 0
    for revisions in all_states(target, budget):
        if any(bool(r.desired.prefill) != bool(r.desired.decode) for r in revisions):
            continue
        if not any(r.is_live for r in revisions[:2]):
            continue
        answering = "b"
        step = next_step(rollout_of(target, budget, "c", "a", revisions, answering, is_paused=True))
        check_step(target, budget, revisions, step.wanted, answering)
        assert step.phase is Phase.PAUSED
        for role in (0, 1):
            have = sum_of((r.desired for r in revisions), role)
            changes = [step.wanted.get(r.name, Counts())[role] - r.desired[role] for r in revisions]
            assert max(changes) <= 0 or have < 1, (revisions, step)
            assert min(changes) >= 0 or have > 1, (revisions, step)
        checked += 1
    assert checked >= 8


def test_a_stray_that_serves_nothing_keeps_the_ready_pods_that_the_floor_needs():
    """Found by random sequences: the stray's only decode pod had become unready by itself."""
    target = Counts(3, 1)
    a = Revision("a", Counts(1, 0), Counts(1, 0), Counts(1, 0))
    b = Revision("b", Counts(1, 1), Counts(1, 1), Counts(1, 0))
    c = Revision("c", Counts(), Counts(), Counts())
    step = next_step(Rollout(target, "c", "a", (a, b, c), Budget(0, 1)))
    assert step.wanted == {"a": Counts(1, 0), "b": Counts(1, 0), "c": Counts(0, 0)}


def test_a_goal_without_room_pushes_out_what_is_not_ready_first():
    target = Counts(2, 1)
    a = Revision("a", Counts(1, 1), Counts(1, 1), Counts(1, 1))
    b = Revision("b", Counts(1, 1), Counts(1, 1), Counts(1, 0))
    c = Revision("c", Counts(1, 0), Counts(1, 0), Counts(1, 0))
    step = next_step(Rollout(target, "c", "a", (a, b, c), Budget(1, 0)))
    assert step.wanted["a"] == Counts(1, 1)
    assert step.wanted["b"].decode == 0


def test_where_the_last_stray_may_give_nothing_another_makes_room():
    """Found by random states: a decode pod of `d` serves two pairs, one of `a` serves one."""
    target, budget = Counts(8, 5), Budget(1, 0)
    a, b, c, d = (
        Revision(name, Counts(*pods), Counts(*pods), Counts(*pods))
        for name, pods in {"a": (2, 2), "b": (1, 1), "c": (1, 1), "d": (4, 2)}.items()
    )
    revisions = (a, b, c, d)
    step = next_step(rollout_of(target, budget, "c", "b", revisions, "b"))
    check_step(target, budget, revisions, step.wanted, "b")
    assert step.wanted["a"] == Counts(2, 1)
    check_end(Steps(target, budget, "c", "b"), target, "c", revisions, "b", (), set())


def test_three_revisions_that_lose_more_pairs_to_rounding_than_is_allowed_for_are_no_trap():
    """Found by random states: any decode pod less is a pair less, and there is no room for one."""
    target, budget = Counts(9, 5), Budget(1, 0)
    counts = {"a": Counts(2, 2), "b": Counts(2, 2), "c": Counts(3, 2)}
    revisions = tuple(Revision(name, have, have, have) for name, have in counts.items())
    check_end(Steps(target, budget, "c", "b"), target, "c", revisions, "b", (), set())
