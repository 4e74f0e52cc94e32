"""The last word on a step, on proposals that no rollout makes: what is given back, and for what."""

from __future__ import annotations

import pytest

from baton_operator.planning.pairs import Budget, Counts, Revision, served_floor, served_pairs
from baton_operator.planning.step_limits import MinAvailable, keep_available, make_room

NONE = Counts()


def ready(**counts):
    return [Revision(name, *[Counts(*each)] * 3) for name, each in counts.items()]


def nothing(order):
    return {revision.name: NONE for revision in order}


LEAST = {
    "the first gives back first, pairs before single pods": (
        MinAvailable(NONE, 3, ""), {"a": (2, 2), "b": (2, 2)}, {"a": (2, 2), "b": (1, 1)},
    ),
    "one that serves nothing gives no pair back": (
        MinAvailable(NONE, 2, ""), {"a": (2, 0), "b": (2, 2)}, {"a": (0, 0), "b": (2, 2)},
    ),
    "no more pairs than are served now": (
        MinAvailable(NONE, 9, ""), {"a": (3, 1), "b": (1, 1)}, {"a": (1, 1), "b": (1, 1)},
    ),
    "a pair of the one that gateways send to, and no more": (
        MinAvailable(NONE, 0, "b"), {"a": (2, 2), "b": (2, 2)}, {"a": (0, 0), "b": (1, 1)},
    ),
    "none of one that serves nothing": (
        MinAvailable(NONE, 0, "b"), {"a": (2, 2), "b": (2, 0)}, {"a": (0, 0), "b": (0, 0)},
    ),
    "what is given back as a pair counts as pods": (
        MinAvailable(Counts(2, 2), 1, "b"), {"a": (2, 2), "b": (2, 2)}, {"a": (1, 1), "b": (1, 1)},
    ),
    "single pods where no pair is": (
        MinAvailable(Counts(2, 1), 4, ""), {"a": (1, 0), "b": (2, 0)}, {"a": (1, 0), "b": (1, 0)},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("least", "have", "left"), LEAST.values(), ids=LEAST.keys())
def test_of_what_serves_the_least_is_given_back(least, have, left):
    order = ready(**have)
    found = keep_available(nothing(order), order, least, Counts(4, 4))
    assert found == {name: Counts(*counts) for name, counts in left.items()}


def test_what_is_left_already_is_not_given_back_twice():
    order = ready(a=(2, 2), b=(2, 2))
    wanted = {"a": Counts(), "b": Counts(2, 2)}
    assert keep_available(wanted, order, MinAvailable(Counts(2, 2), 2, "b"), Counts(4, 4)) == wanted


def test_a_pair_is_given_back_beside_those_that_stay():
    order = ready(a=(3, 3))
    found = keep_available({"a": Counts(1, 3)}, order, MinAvailable(NONE, 2, ""), Counts(4, 4))
    assert found == {"a": Counts(2, 3)}


@pytest.mark.parametrize(
    ("lacking", "spare", "left"),
    [
        ((0, 1), (0, 9), {"a": (1, 3), "b": (2, 2)}),
        ((0, 2), (0, 9), {"a": (1, 2), "b": (2, 2)}),
        ((0, 4), (0, 9), {"a": (1, 1), "b": (2, 1)}),
        ((0, 9), (0, 3), {"a": (1, 1), "b": (2, 1)}),
        ((1, 0), (9, 0), {"a": (1, 4), "b": (1, 2)}),
    ],
)
def test_what_is_not_ready_leaves_first_then_what_serves_nobody_then_what_serves(
    lacking, spare, left
):
    a = Revision("a", Counts(1, 4), Counts(1, 4), Counts(1, 3))
    b = Revision("b", Counts(2, 2), Counts(2, 2), Counts(2, 2))
    wanted = {"a": a.desired, "b": b.desired}
    found = make_room(wanted, [a, b], Counts(*lacking), Counts(*spare), Counts(4, 4))
    assert found == {name: Counts(*counts) for name, counts in left.items()}


@pytest.mark.parametrize(
    ("target", "budget", "pairs"),
    [
        ((4, 4), (1, 0), 3),
        ((4, 4), (2, 1), 2),
        ((4, 4), (0, 1), 0),
        ((4, 4), (1, 4), 0),
        ((2, 4), (1, 0), 2),
        ((5, 3), (1, 0), 3),
        ((1, 7), (1, 0), 1),
        ((1, 7), (1, 1), 0),
        ((0, 4), (1, 0), 3),
        ((0, 0), (1, 0), 0),
    ],
)
def test_the_pairs_that_stay_are_all_but_the_budget_and_a_roles_rounding(target, budget, pairs):
    assert served_floor(Counts(*target), Budget(*budget)) == pairs


def test_nobody_serves_a_target_of_nothing():
    assert served_pairs(Counts(3, 3), NONE) == 0
