"""Exact step sequences of rollouts: (old prefill, old decode), (new prefill, new decode)."""

from __future__ import annotations

import pytest

from baton_operator.names import Role
from baton_operator.planning.pairs import Budget, Counts, Revision
from baton_operator.planning.rollout import Phase, Rollout, next_step

NONE = Counts()


def sequence(target, budget, old_ready=True, limit=60):
    """Roll from `a` to `b`, every new pod ready before the next step."""
    target = Counts(*target)
    old = Revision("a", target, target, target if old_ready else NONE)
    new = Revision("b", NONE, NONE, NONE)
    steps = []
    for _ in range(limit):
        step = next_step(Rollout(target, "b", "a", (old, new), Budget(*budget)))
        a, b = step.wanted.get("a", NONE), step.wanted["b"]
        if step.phase is Phase.COMPLETE:
            return steps
        steps.append((tuple(a), tuple(b)))
        old = Revision("a", a, a, a if old_ready else NONE)
        new = Revision("b", b, b, b)
    raise AssertionError(f"not complete: {steps}")


TABLE = {
    "one pair, surge": ((1, 1), (1, 0), [((1, 1), (1, 1)), ((0, 0), (1, 1))]),
    "one pair, no surge": ((1, 1), (0, 1), [((0, 0), (0, 0)), ((0, 0), (1, 1))]),
    "one prefill for three decodes moves in fractions": (
        (1, 3),
        (1, 0),
        [
            ((1, 3), (1, 1)),
            ((1, 2), (1, 1)),
            ((1, 2), (1, 2)),
            ((1, 1), (1, 2)),
            ((1, 1), (1, 3)),
            ((0, 0), (1, 3)),
        ],
    ),
    "the ratio holds at every step": (
        (2, 4),
        (1, 0),
        [
            ((2, 4), (1, 1)),
            ((1, 3), (1, 1)),
            ((1, 3), (1, 2)),
            ((1, 2), (1, 2)),
            ((1, 2), (2, 3)),
            ((1, 1), (2, 3)),
            ((1, 1), (2, 4)),
            ((0, 0), (2, 4)),
        ],
    ),
    "surge and unavailable together": (
        (4, 4),
        (1, 1),
        [
            ((3, 3), (1, 1)),
            ((2, 2), (2, 2)),
            ((1, 1), (3, 3)),
            ((0, 0), (4, 4)),
        ],
    ),
    "two pairs at a time": (
        (4, 4),
        (2, 0),
        [
            ((4, 4), (2, 2)),
            ((2, 2), (2, 2)),
            ((2, 2), (4, 4)),
            ((0, 0), (4, 4)),
        ],
    ),
    "more prefill than decode": (
        (5, 2),
        (1, 1),
        [
            ((4, 1), (1, 1)),
            ((3, 1), (2, 1)),
            ((2, 1), (3, 2)),
            ((1, 1), (4, 2)),
            ((0, 0), (5, 2)),
        ],
    ),
    "no surge on a full cluster": (
        (2, 4),
        (0, 1),
        [
            ((1, 3), (0, 0)),
            ((1, 3), (1, 1)),
            ((1, 2), (1, 1)),
            ((1, 2), (1, 2)),
            ((0, 1), (1, 2)),
            ((0, 1), (2, 3)),
            ((0, 0), (2, 3)),
            ((0, 0), (2, 4)),
        ],
    ),
}


@pytest.mark.parametrize(("target", "budget", "steps"), TABLE.values(), ids=TABLE.keys())
def test_steps(target, budget, steps):
    assert sequence(target, budget) == steps


@pytest.mark.parametrize(("target", "budget", "steps"), TABLE.values(), ids=TABLE.keys())
def test_broken_old_pods_do_not_change_the_steps(target, budget, steps):
    assert sequence(target, budget, old_ready=False) == steps


INTERRUPTED = {
    "a third revision starts beside two that share the pairs": (
        (2, 2), (1, 0), {"a": (1, 1), "b": (1, 1)}, 0,
        [
            {"a": (1, 1), "b": (1, 1), "c": (1, 1)},
            {"a": (1, 1), "b": (0, 0), "c": (1, 1)},
            {"a": (1, 1), "c": (2, 2)},
            {"a": (0, 0), "c": (2, 2)},
        ],
    ),
    "without room for a third, the better of two takes over first": (
        (1, 3), (1, 0), {"a": (1, 2), "b": (1, 1)}, 0,
        [
            {"a": (1, 3), "b": (1, 1), "c": (0, 0)},
            {"a": (1, 3), "b": (0, 0), "c": (0, 0)},
            {"a": (1, 3), "c": (1, 1)},
            {"a": (1, 2), "c": (1, 1)},
            {"a": (1, 2), "c": (1, 2)},
            {"a": (1, 1), "c": (1, 2)},
            {"a": (1, 1), "c": (1, 3)},
            {"a": (0, 0), "c": (1, 3)},
        ],
    ),
    "without surge the old revisions only shrink, and keep the floor between them": (
        (3, 1), (0, 1), {"a": (1, 0), "b": (1, 1)}, 0,
        [
            {"a": (1, 0), "b": (1, 0), "c": (0, 0)},
            {"a": (1, 0), "b": (1, 0), "c": (1, 1)},
            {"a": (1, 0), "b": (0, 0), "c": (1, 1)},
            {"a": (1, 0), "c": (2, 1)},
            {"a": (0, 0), "c": (2, 1)},
            {"c": (3, 1)},
        ],
    ),
    "a partition of two pairs stops half way": (
        (2, 4), (1, 0), {"a": (2, 4)}, 2,
        [
            {"a": (2, 4), "c": (1, 1)},
            {"a": (1, 3), "c": (1, 1)},
            {"a": (1, 3), "c": (1, 2)},
            {"a": (1, 2), "c": (1, 2)},
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("target", "budget", "olds", "partition", "steps"), INTERRUPTED.values(), ids=INTERRUPTED.keys()
)
def test_steps_from_the_middle_of_a_rollout(target, budget, olds, partition, steps):
    revisions = {n: Revision(n, *[Counts(*c)] * 3) for n, c in olds.items()}
    revisions["c"] = Revision("c", NONE, NONE, NONE)
    taken = []
    for _ in range(len(steps) + 2):
        now = tuple(revisions.values())
        step = next_step(
            Rollout(Counts(*target), "c", "a", now, Budget(*budget), partition_pairs=partition)
        )
        taken.append({name: tuple(counts) for name, counts in step.wanted.items()})
        revisions |= {n: Revision(n, *[c] * 3) for n, c in step.wanted.items()}
    assert taken[: len(steps)] == steps
    at_rest = {name: counts for name, counts in steps[-1].items() if any(counts)}
    assert taken[-1] == at_rest


def test_a_new_revision_that_never_gets_ready_keeps_every_old_pod():
    target = Counts(2, 4)
    old = Revision("a", target, target, target)
    new = Revision("b", NONE, NONE, NONE)
    for _ in range(5):
        step = next_step(Rollout(target, "b", "a", (old, new), Budget(1, 0)))
        assert step.wanted["a"] == target
        new = Revision("b", step.wanted["b"], step.wanted["b"], NONE)
    assert new.desired == Counts(1, 1)


def test_a_rollout_is_reversed_by_naming_the_old_revision():
    target = Counts(2, 4)
    midway = (
        Revision("a", Counts(1, 2), Counts(1, 2), Counts(1, 2)),
        Revision("b", Counts(1, 2), Counts(1, 2), Counts(1, 2)),
    )
    back = []
    revisions = midway
    for _ in range(20):
        step = next_step(Rollout(target, "a", "a", revisions, Budget(1, 0)))
        if step.phase is Phase.COMPLETE:
            break
        back.append((tuple(step.wanted["a"]), tuple(step.wanted["b"])))
        revisions = tuple(Revision(n, c, c, c) for n, c in step.wanted.items())
    assert back == [
        ((2, 3), (1, 2)),
        ((2, 3), (1, 1)),
        ((2, 4), (1, 1)),
        ((2, 4), (0, 0)),
    ]


def test_a_third_revision_waits_until_the_interrupted_one_has_left():
    target = Counts(1, 3)
    a = Revision("a", Counts(1, 2), Counts(1, 2), Counts(1, 2))
    b = Revision("b", Counts(1, 1), Counts(1, 1), Counts(1, 1))
    c = Revision("c", NONE, NONE, NONE)
    step = next_step(Rollout(target, "c", "a", (a, b, c), Budget(1, 0)))
    assert step.wanted == {"a": Counts(1, 3), "b": Counts(1, 1), "c": NONE}
    a = Revision("a", Counts(1, 3), Counts(1, 3), Counts(1, 3))
    step = next_step(Rollout(target, "c", "a", (a, b, c), Budget(1, 0)))
    assert step.wanted == {"a": Counts(1, 3), "b": NONE, "c": NONE}


PAUSED = {
    "no room for the third": ((1, 3), (1, 0), {"a": (1, 2), "b": (1, 1)}),
    "room for the third": ((2, 2), (1, 0), {"a": (1, 1), "b": (1, 1)}),
    "nothing may surge": ((3, 3), (0, 1), {"a": (2, 2), "b": (1, 1)}),
}


@pytest.mark.parametrize("ready", [True, False], ids=["ready", "the interrupted one broken"])
@pytest.mark.parametrize(("target", "budget", "olds"), PAUSED.values(), ids=PAUSED.keys())
def test_a_third_revision_that_is_paused_moves_nothing_between_the_others(
    target, budget, olds, ready
):
    counts = {name: Counts(*have) for name, have in olds.items()}
    revisions = [Revision(n, c, c, c if ready or n == "a" else NONE) for n, c in counts.items()]
    revisions.append(Revision("c", NONE, NONE, NONE))
    paused = Rollout(Counts(*target), "c", "a", tuple(revisions), Budget(*budget), is_paused=True)
    step = next_step(paused)
    assert step.wanted == {**counts, "c": NONE}
    assert step.phase is Phase.PAUSED


def test_an_interrupted_revision_serves_on_while_the_keeper_refills():
    """Found by random sequences: pods that the keeper had just asked for counted as serving."""
    target = Counts(3, 3)
    a = Revision("a", Counts(3, 3), Counts(3, 3), Counts(1, 3))
    b = Revision("b", Counts(1, 1), Counts(1, 1), Counts(1, 1))
    c = Revision("c", NONE, NONE, NONE)
    step = next_step(Rollout(target, "c", "a", (a, b, c), Budget(2, 0)))
    assert step.wanted == {"a": Counts(3, 3), "b": Counts(1, 1), "c": Counts(1, 1)}


def test_a_broken_interrupted_revision_gives_way_at_once():
    target = Counts(1, 3)
    a = Revision("a", Counts(1, 3), Counts(1, 3), Counts(1, 3))
    b = Revision("b", Counts(1, 1), Counts(1, 1), NONE)
    step = next_step(
        Rollout(target, "c", "a", (a, b, Revision("c", NONE, NONE, NONE)), Budget(1, 0))
    )
    assert step.wanted["b"] == NONE


def test_suspension_wants_no_pod_of_any_revision():
    a = Revision("a", Counts(1, 1), Counts(1, 1), Counts(1, 1))
    step = next_step(Rollout(NONE, "b", "a", (a,), Budget(1, 0)))
    assert (step.phase, step.wanted) == (Phase.SUSPENDED, {"a": NONE})


def test_counts_are_told_by_role_and_of_pairs_as_pods():
    assert [Counts(2, 5).of(role) for role in (Role.PREFILL, Role.DECODE)] == [2, 5]
    assert Counts(3, 3).of(Role.PAIR) == 3
