"""Every state of three revisions with a few pods: what one step takes, and that none is a trap.

Random sequences reach states that rollouts lead to; people and autoscalers lead to others (a
budget edited midway, a Deployment scaled by hand, a revision named again). So here are all of them.
"""

from __future__ import annotations

from itertools import product

import pytest

from baton_operator.pairs import Budget, Counts, Revision, available_floor, surge_limit
from baton_operator.rollout import Phase, Rollout, next_step

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


def followed(revisions, wanted, broken):
    """Return the revisions when workloads have done as they were told; broken pods stay unready."""
    return tuple(
        Revision(r.name, now, now, Counts() if r.name in broken else now)
        for r in revisions
        for now in [wanted.get(r.name, r.desired)]
    )


def sum_of(counts, role):
    return sum(each[role] for each in counts)


def check_step(target, budget, revisions, wanted):
    limit, floor = surge_limit(target, budget), available_floor(target, budget)
    after = [wanted.get(r.name, r.desired) for r in revisions]
    left = [r.ready.capped(now) for r, now in zip(revisions, after, strict=True)]
    for role in (0, 1):
        existing = sum_of((r.existing for r in revisions), role)
        ready = sum_of((r.ready for r in revisions), role)
        assert sum_of(after, role) <= max(existing, limit[role]), (revisions, wanted)
        assert sum_of(left, role) >= min(ready, floor[role]), (revisions, wanted)


def check_end(target, budget, goal, stable, start, broken, ending):
    """Follow steps to the goal; `ending` holds the states known to get there, and gains these."""
    revisions, passed = start, []
    while revisions not in ending:
        assert revisions not in passed, f"{goal} is never reached from {start}: {revisions}"
        passed.append(revisions)
        step = next_step(Rollout(target, goal, stable, revisions, budget))
        if step.phase is Phase.COMPLETE:
            break
        check_step(target, budget, revisions, step.wanted)
        revisions = followed(revisions, step.wanted, broken)
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
def test_from_any_state_steps_keep_budgets_and_end_at_the_goal(target, budgets, goal, stable):
    others = [name for name in NAMES if name != goal]
    for budget in (Budget(*each) for each in budgets):
        ends = {broken: set() for broken in ((), (others[0],), (others[1],), tuple(others))}
        for revisions in all_states(target, budget):
            step = next_step(Rollout(target, goal, stable, revisions, budget, partition_pairs=1))
            check_step(target, budget, revisions, step.wanted)
            for broken, ending in ends.items():
                check_end(target, budget, goal, stable, revisions, broken, ending)


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
        step = next_step(Rollout(target, "c", "a", revisions, budget, is_paused=True))
        check_step(target, budget, revisions, step.wanted)
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
