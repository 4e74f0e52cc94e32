"""Single steps where one pair, one pod or one budget more or less would decide otherwise."""

from __future__ import annotations

import pytest

from baton_operator.planning.pairs import Budget, Counts, Revision
from baton_operator.planning.rollout import Phase, Rollout, Step, next_step

NONE = Counts()


def step_to(
    goal,
    target,
    budget,
    *,
    stable="a",
    partition=0,
    is_paused=False,
    answering="",
    countable=None,
    **revisions,
):
    """Return the step from revisions as (wanted) or (wanted, ready); the goal may be absent."""
    found = []
    for name, counts in revisions.items():
        wanted, ready = (counts, counts) if isinstance(counts[0], int) else counts
        found.append(Revision(name, Counts(*wanted), Counts(*wanted), Counts(*ready)))
    return next_step(
        Rollout(
            Counts(*target), goal, stable, tuple(found), Budget(*budget), partition, is_paused,
            answering, countable,
        )
    )  # fmt: skip


def test_a_suspended_rollout_has_no_pairs():
    step = step_to("a", (0, 0), (1, 0), a=(1, 1))
    assert step == Step({"a": NONE}, Phase.SUSPENDED, 0, 0)


@pytest.mark.parametrize("partition", [2, 5])
def test_a_partition_of_every_pair_leaves_the_new_revision_none(partition):
    step = step_to("c", (2, 2), (1, 0), partition=partition, a=(2, 2))
    assert step == Step({"a": Counts(2, 2), "c": NONE}, Phase.PARTITIONED, 0, 2)


@pytest.mark.parametrize(("ready", "phase"), [(0, Phase.PROGRESSING), (1, Phase.PARTITIONED)])
def test_a_partition_is_reached_when_its_last_pair_is_ready(ready, phase):
    new = ((1, 1), (ready, ready))
    assert step_to("c", (2, 2), (1, 0), partition=1, a=(1, 1), c=new).phase is phase


def test_without_a_partition_no_surge_takes_more_than_the_target():
    a = Revision("a", *[Counts(1, 1)] * 3)
    step = next_step(Rollout(Counts(1, 1), "c", "a", (a,), Budget(3, 0)))
    assert step.wanted == {"a": Counts(1, 1), "c": Counts(1, 1)}


def test_beside_an_old_revision_the_new_gives_back_what_a_smaller_target_leaves_over():
    a, c = Revision("a", *[Counts(1, 1)] * 3), Revision("c", *[Counts(3, 3)] * 3)
    step = next_step(Rollout(Counts(1, 1), "c", "a", (a, c), Budget(3, 0)))
    assert step.wanted == {"a": NONE, "c": Counts(1, 1)}


def test_a_pause_before_the_first_pair_takes_nothing_from_the_old():
    step = step_to("c", (1, 1), (0, 1), is_paused=True, a=(1, 1))
    assert step == Step({"a": Counts(1, 1), "c": NONE}, Phase.PAUSED, 0, 1)


def test_a_pause_after_the_last_pair_keeps_the_new_and_lets_the_old_go():
    step = step_to("c", (1, 1), (1, 1), is_paused=True, a=(1, 1), c=(1, 1))
    assert step == Step({"a": NONE, "c": Counts(1, 1)}, Phase.PAUSED, 1, 1)


def test_a_paused_revision_gives_back_what_a_smaller_target_leaves_over():
    step = step_to("c", (1, 1), (1, 1), is_paused=True, a=(1, 1), c=(2, 2))
    assert step.wanted["c"] == Counts(1, 1)


@pytest.mark.parametrize("held", [{"is_paused": True}, {"partition": 3}])
def test_the_old_side_is_refilled_up_to_the_surge_limit_in_one_step(held):
    step = step_to("c", (3, 3), (0, 2), a=(1, 1), **held)
    assert step.wanted == {"a": Counts(3, 3), "c": NONE}


def test_a_refill_waits_for_the_room_of_a_revision_that_is_leaving():
    step = step_to("c", (2, 2), (0, 1), partition=2, a=(1, 1), b=((2, 2), (0, 0)))
    assert step.wanted == {"a": Counts(1, 1), "b": NONE, "c": NONE}


def test_room_is_made_for_one_pair_although_another_revision_is_at_rest():
    """What a pair lacks leaves, down to the floor; what further pairs will lack stays."""
    unpaired = step_to("c", (3, 1), (0, 2), a=(1, 1))
    assert unpaired.wanted == {"a": Counts(1, 0), "c": NONE}
    one_of_three = step_to("c", (1, 3), (0, 2), partition=2, a=((1, 2), (0, 2)))
    assert one_of_three.wanted == {"a": Counts(0, 2), "c": NONE}


def test_nobody_waits_for_revisions_that_serve_no_pair():
    step = step_to("c", (1, 1), (1, 0), stable="b", a=(0, 1), b=(0, 1))
    assert step.wanted == {"a": NONE, "b": Counts(0, 1), "c": NONE}


def test_one_pair_that_is_served_is_enough_to_be_waited_for():
    step = step_to("c", (1, 2), (2, 0), stable="b", a=(1, 0), b=(1, 1))
    assert step.wanted == {"a": Counts(1, 0), "b": Counts(1, 2), "c": NONE}


SPLIT = {
    "no pair more than the target": ((2, 2), (1, 0), {"a": (3, 3), "c": (1, 1)}, {"a": (1, 1)}),
    "a pair more, and the new one is not ready": (
        (1, 1), (1, 0), {"a": (1, 1), "c": ((1, 1), (0, 0))}, {},
    ),
    "a pair more, and none needs to be ready": (
        (1, 1), (1, 1), {"a": (1, 1), "c": ((1, 1), (0, 0))}, {"a": (0, 0)},
    ),
    "a role of one, which each of two pairs needs": (
        (1, 3), (1, 0), {"a": (1, 2), "c": (1, 1)}, {},
    ),
    "of two old ones, the one that gateways do not send to": (
        (2, 2), (1, 0), {"a": (2, 2), "b": (1, 1), "c": (1, 1)}, {"a": (0, 0)},
    ),
    "what is not ready goes before what is": (
        (3, 3), (1, 0), {"a": ((0, 3), (0, 2)), "b": (0, 1)}, {"a": (3, 2)},
    ),
    "what no pair needs goes, and what is missing comes to the same": (
        (2, 3), (1, 0), {"a": (3, 1), "c": (1, 1)}, {"a": (1, 2)},
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("target", "budget", "before", "changes"), SPLIT.values(), ids=SPLIT.keys()
)
def test_a_pause_follows_the_target_and_moves_nothing(target, budget, before, changes):
    step = step_to("c", target, budget, is_paused=True, answering="b", **before)
    asked = {n: c if isinstance(c[0], int) else c[0] for n, c in before.items()}
    wanted = {"c": (0, 0)} | asked | changes
    assert step.wanted == {name: Counts(*counts) for name, counts in wanted.items()}


@pytest.mark.parametrize(
    ("others", "taker"), [({"b": Counts(1, 1)}, "b"), ({}, "a")], ids=["one has", "nobody has"]
)
def test_what_is_missing_in_a_pause_comes_to_an_old_revision_best_one_that_has_pods(others, taker):
    leaving = Revision("a", NONE, Counts(1, 1), Counts(1, 1))
    rest = [Revision(name, *[counts] * 3) for name, counts in others.items()]
    rollout = Rollout(
        Counts(4, 4), "c", "a", (leaving, *rest), Budget(4, 0), is_paused=True, answering="a"
    )
    wanted = {"a": NONE, "c": NONE} | others | {taker: Counts(4, 4)}
    assert next_step(rollout).wanted == wanted


def test_what_is_missing_in_a_pause_waits_for_room():
    leaving = Revision("b", NONE, Counts(2, 2), Counts(2, 2))
    a = Revision("a", *[Counts(1, 1)] * 3)
    rollout = Rollout(Counts(3, 3), "c", "a", (a, leaving), Budget(1, 0), is_paused=True)
    assert next_step(rollout).wanted == {"a": Counts(2, 2), "b": NONE, "c": NONE}


@pytest.mark.parametrize("goal", ["a", "b", "c"])
def test_whichever_revision_is_named_in_a_pause_none_gives_a_pair_to_another(goal):
    before = {"a": (1, 2), "b": ((1, 1), (0, 1)), "c": ((0, 1), (0, 0))}
    step = step_to(goal, (2, 4), (1, 1), is_paused=True, **before)
    assert step == Step(
        {"a": Counts(1, 2), "b": Counts(1, 1), "c": Counts(0, 1)}, Phase.PAUSED, step.pairs_new, 4
    )


def test_the_revision_that_gateways_send_to_outlives_one_that_serves_more():
    before = {"a": (1, 1), "b": (2, 1)}
    to_a = step_to("c", (2, 1), (1, 0), answering="a", **before)
    assert to_a.wanted == {"a": Counts(1, 1), "b": Counts(1, 1), "c": NONE}
    assert step_to("c", (2, 1), (1, 0), **before).wanted["b"] == Counts(2, 1)
    idle = step_to("c", (2, 1), (1, 0), answering="a", a=((1, 1), (1, 0)), b=(2, 1))
    assert idle.wanted == {"a": Counts(0, 0), "b": Counts(2, 1), "c": NONE}


@pytest.mark.parametrize(("budget", "left"), [((1, 0), (1, 1)), ((1, 1), (0, 0))])
def test_the_last_pair_that_gateways_send_to_stays_until_they_have_moved(budget, left):
    both = {"a": (2, 2), "c": (3, 3)}
    assert step_to("c", (3, 3), budget, answering="a", **both).wanted["a"] == Counts(*left)
    assert step_to("c", (3, 3), budget, answering="c", **both).wanted["a"] == NONE


def test_ready_pods_that_gateways_do_not_know_yet_are_counted_for_the_floor():
    """Found by random lives: those of the goal that did not count yet were all taken away."""
    back = {"a": ((1, 1), (0, 0)), "c": (1, 1)}
    step = step_to("c", (1, 1), (1, 0), partition=1, answering="a", countable=0, **back)
    assert step.wanted == {"a": Counts(1, 1), "c": Counts(1, 1)}
    assert (step.pairs_new, step.pairs) == (0, 1)


def test_room_is_made_of_pods_without_a_partner_before_pods_that_serve():
    step = step_to("c", (3, 5), (1, 0), stable="b", a=(1, 4), b=(1, 1), c=(1, 1))
    assert step.wanted == {"a": Counts(1, 3), "b": Counts(1, 1), "c": Counts(1, 1)}
