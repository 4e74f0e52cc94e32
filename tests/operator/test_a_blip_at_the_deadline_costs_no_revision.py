"""All pods of the revision that serves may be down when the next one misses its deadline, as with
their node; it stays what a rollback returns to, whatever comes then.
"""

from __future__ import annotations

import msgspec
import pytest

from baton_operator.planning.pairs import Counts
from baton_testing.rollout_fleet import Fleet, TimedFleet, make_spec


def blipped(prefill, decode, **budget):
    """Return a rollout of `a` to a broken `b`, at whose deadline `a` had no pod ready."""
    fleet = Fleet(make_spec(prefill, decode, progress_deadline_seconds=100, **budget))
    fleet.settle()
    fleet.update = "b"
    fleet.broken.add("b")
    fleet.settle()
    fleet.wait(90)
    assert not fleet.plan.has_failed
    fleet.broken.add("a")
    fleet.pods["a"] = [[False] * len(role) for role in fleet.pods["a"]]
    fleet.wait(20)
    fleet.step()
    assert fleet.plan.has_failed
    return fleet


def test_a_suspension_behind_it_keeps_it():
    fleet = blipped(2, 4)
    fleet.spec = msgspec.structs.replace(fleet.spec, suspend=True)
    fleet.settle()
    fleet.broken.discard("a")
    fleet.spec = msgspec.structs.replace(fleet.spec, suspend=False)
    fleet.settle()
    assert fleet.revision("a").ready == Counts(2, 4)


def test_a_scale_in_behind_it_keeps_it():
    fleet = blipped(2, 2, surge=1, unavailable=1)
    fleet.scale(1, 1)
    fleet.step()
    fleet.step()
    fleet.broken.discard("a")
    fleet.settle()
    assert fleet.revision("a").ready == Counts(1, 1)


@pytest.mark.parametrize("auto_rollback", [True, False])
def test_a_canary_stays_within_its_partition(auto_rollback):
    fleet = blipped(4, 4, partition=3, auto_rollback=auto_rollback)
    fleet.broken.discard("b")
    fleet.settle()
    assert fleet.desired["b"].prefill <= 1


def test_who_goes_back_to_it_in_the_spec_gets_it():
    fleet = blipped(2, 2)
    fleet.update = "a"
    fleet.step()
    fleet.wait(101)
    fleet.broken.discard("b")
    fleet.workers_ready()
    fleet.settle()
    fleet.broken.discard("a")
    fleet.settle()
    assert fleet.desired == {"a": Counts(2, 2)}


@pytest.mark.parametrize(("pairs", "budget"), [(2, 1), (4, 2)])
def test_the_room_of_who_failed_is_given_back_to_it(pairs, budget):
    """Its nodes went, and pods that crash have what room is left."""
    spec = make_spec(pairs, pairs, surge=budget, unavailable=budget, progress_deadline_seconds=1000)
    fleet = TimedFleet(spec)
    fleet.room = Counts(pairs + budget, pairs + budget)
    fleet.step()
    fleet.pass_time(400, fleet.step)
    fleet.update = "b"
    fleet.broken.add("b")
    fleet.step()
    fleet.pass_time(500, fleet.step)
    placed = (sum(pod.placed_at is not None for pod in role) for role in fleet.pods["b"])
    fleet.room = Counts(*placed)
    for role, pods in enumerate(fleet.pods["a"]):
        while any(pod.is_ready for pod in pods):
            fleet.evict("a", role)
    fleet.step()
    fleet.pass_time(5000, fleet.step)
    assert fleet.revision("a").ready == Counts(pairs, pairs)
