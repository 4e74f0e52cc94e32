"""A rollout that is held stays held behind a suspension: a partition, a pause's old side."""

from __future__ import annotations

import msgspec
import pytest

from baton_operator.planning.pairs import Counts
from baton_operator.planning.rollout import Phase
from baton_testing.fake_kube import Cluster
from baton_testing.rollout_fleet import Fleet, make_spec


@pytest.fixture
def fleet():
    """A deployment of 2 prefill and 4 decode, rolled out as `a`."""
    fleet = Fleet(make_spec(2, 4, progress_deadline_seconds=100))
    fleet.settle()
    return fleet


def suspend(fleet, is_suspended=True):
    fleet.spec = msgspec.structs.replace(fleet.spec, suspend=is_suspended)
    fleet.settle()


PARTITIONS = {
    1: {"a": Counts(1, 1), "b": Counts(2, 3)},
    2: {"a": Counts(1, 2), "b": Counts(1, 2)},
    4: {"a": Counts(2, 4), "b": Counts(0, 0)},
}


@pytest.mark.parametrize(("pairs", "split"), PARTITIONS.items())
@pytest.mark.parametrize("is_before", [True, False], ids=["rolled before", "edited meanwhile"])
def test_a_partition_keeps_its_pairs(fleet, pairs, split, is_before):
    fleet.rollout(partition=pairs)
    if is_before:
        fleet.update = "b"
        fleet.settle()
        assert fleet.desired == split
    suspend(fleet)
    assert fleet.total() == Counts()
    fleet.update = "b"
    suspend(fleet, is_suspended=False)
    assert fleet.desired == split
    assert fleet.plan.step.phase is Phase.PARTITIONED
    assert fleet.memory.current == "a"
    fleet.rollout(partition=0)
    fleet.settle()
    assert fleet.desired == {"b": Counts(2, 4)}
    assert fleet.memory.current == "b"


def test_a_partition_keeps_its_pairs_while_the_new_revision_is_broken(fleet):
    fleet.rollout(partition=2)
    fleet.update = "b"
    fleet.broken.add("b")
    suspend(fleet)
    suspend(fleet, is_suspended=False)
    assert fleet.desired["a"].decode >= 2
    fleet.wait(120)
    fleet.settle()
    assert fleet.desired == {"a": Counts(2, 4)}
    assert fleet.plan.is_rolled_back


@pytest.mark.parametrize("is_before", [True, False], ids=["paused before", "edited meanwhile"])
def test_a_pause_keeps_the_old_revision(fleet, is_before):
    fleet.rollout(paused=True)
    if is_before:
        fleet.update = "b"
        fleet.settle()
    suspend(fleet)
    fleet.update = "b"
    suspend(fleet, is_suspended=False)
    assert fleet.desired == {"a": Counts(2, 4), "b": Counts(0, 0)}
    assert fleet.plan.step.phase is Phase.PAUSED
    fleet.rollout(paused=False)
    fleet.settle()
    assert fleet.desired == {"b": Counts(2, 4)}


def test_a_pause_in_the_middle_gives_all_to_the_old_revision(fleet):
    """How many pairs either side had is known from pods alone, of which there are none."""
    fleet.update = "b"
    for _ in range(3):
        fleet.step()
        fleet.all_ready()
    fleet.rollout(paused=True)
    fleet.settle()
    assert not fleet.desired["b"].is_zero
    suspend(fleet)
    suspend(fleet, is_suspended=False)
    assert fleet.desired == {"a": Counts(2, 4), "b": Counts(0, 0)}


def test_pods_that_still_end_change_nothing(fleet):
    """A Deployment counts pods for a moment after it was asked to have none."""
    fleet.rollout(paused=True)
    fleet.update = "b"
    fleet.settle()
    fleet.spec = msgspec.structs.replace(fleet.spec, suspend=True)
    fleet.step()
    fleet.pods["a"] = [[True], [True]]
    fleet.spec = msgspec.structs.replace(fleet.spec, suspend=False)
    fleet.settle()
    assert fleet.desired == {"a": Counts(2, 4), "b": Counts(0, 0)}


def test_what_is_not_held_comes_back_as_the_spec_says(fleet):
    suspend(fleet)
    fleet.update = "b"
    suspend(fleet, is_suspended=False)
    assert fleet.desired == {"b": Counts(2, 4)}


def test_a_first_revision_has_nobody_to_stand_behind():
    fleet = Fleet(make_spec(2, 4, partition=4, paused=True))
    suspend(fleet)
    suspend(fleet, is_suspended=False)
    assert fleet.desired == {"a": Counts(2, 4)}
    assert fleet.plan.step.phase is Phase.COMPLETE


async def test_the_old_revisions_pods_are_made_from_its_record():
    cluster = Cluster()
    await cluster.create(rollout={"partition": 1})
    await cluster.settle()
    old = cluster.status()["updateRevision"]
    cluster.change(image="worker:2")
    await cluster.settle()
    cluster.change(suspend=True)
    await cluster.settle()
    cluster.change(suspend=False)
    await cluster.settle()
    new = cluster.status()["updateRevision"]
    assert cluster.replicas()[old, "decode"] == 1
    assert cluster.replicas()[new, "decode"] == 0
    assert cluster.status()["currentRevision"] == old
    assert cluster.condition("Ready") == ("True", "PairsServing")
    assert cluster.status()["rollout"]["phase"] == "Partitioned"
