"""A rollback to pods that cannot come back: told after a deadline of its own, and no dead end.

The node of the old revision's pods is gone, its image, or the quota. What serves serves on, and the
next spec is acted upon.
"""

from __future__ import annotations

import msgspec
import pytest

from baton_operator.cluster.observe import Observed
from baton_operator.models import ObjectKey, PDDeployment
from baton_operator.planning.pairs import Budget, Counts, Revision
from baton_operator.planning.plan import Facts, Memory, make_plan
from baton_operator.planning.rollout import Phase, Rollout, next_step
from baton_operator.pods.samples import Sample
from baton_operator.status.events import notices
from baton_operator.status.status import Trouble, deployment_status, read_memory
from baton_testing.rollout_fleet import Fleet, make_spec

DEADLINE_SECONDS = 100


def rolled(pairs, **budget):
    fleet = Fleet(make_spec(pairs, pairs, progress_deadline_seconds=DEADLINE_SECONDS, **budget))
    fleet.settle()
    return fleet


def lose(fleet, name, pairs):
    """Let so many pods of each role be lost, and none become ready from now on."""
    fleet.broken.add(name)
    for role in fleet.pods.get(name, ()):
        role[:] = sorted(role, reverse=True)
        first = max(0, sum(role) - pairs)
        role[:] = [is_ready and number < first for number, is_ready in enumerate(role)]


def stuck(pairs, lost, serving=0, **budget):
    """Return a fleet whose rollout to `b` has failed, with `lost` pairs of `a` that stay away, or
    where nothing of `a` was left.
    """
    fleet = rolled(pairs, **budget)
    fleet.update = "b"
    fleet.step()
    while fleet.memory.reached < serving:
        fleet.all_ready()
        fleet.step()
    fleet.broken.add("b")
    fleet.step()
    lose(fleet, "a", lost)
    while not fleet.plan.has_failed and "a" in fleet.pods:
        fleet.wait(1)
    return fleet


@pytest.mark.parametrize(("pairs", "lost"), [(1, 1), (2, 1), (2, 2), (4, 1)])
def test_a_rollback_without_progress_is_late_after_a_deadline_of_its_own(pairs, lost):
    fleet = stuck(pairs, lost)
    served = fleet.ready()
    assert fleet.plan.goal == "a"
    assert fleet.plan.look_in is not None, "nobody would look at the clock"
    assert not fleet.wait(DEADLINE_SECONDS - 10).is_late
    plan = fleet.wait(20)
    assert (plan.is_late, plan.goal, plan.look_in) == (True, "a", None)
    assert fleet.ready() == served
    before = fleet.memory, dict(fleet.desired)
    assert fleet.wait(100 * DEADLINE_SECONDS).is_late
    assert (fleet.memory, fleet.desired) == before, "nothing is written again and again"


def test_a_rollback_that_gets_on_is_not_late_and_ends():
    fleet = stuck(4, 2)
    fleet.wait(2 * DEADLINE_SECONDS)
    for role in (0, 1):
        fleet.pods["a"][role][2] = True
    assert not fleet.step().is_late
    fleet.broken.discard("a")
    fleet.settle()
    assert (fleet.plan.goal, fleet.plan.step.phase) == ("a", Phase.COMPLETE)
    assert not fleet.plan.is_late


def test_a_longer_deadline_gives_a_late_rollback_more_time():
    fleet = stuck(2, 1)
    assert fleet.wait(2 * DEADLINE_SECONDS).is_late
    fleet.rollout(progress_deadline_seconds=10 * DEADLINE_SECONDS)
    assert not fleet.step().is_late
    assert fleet.wait(10 * DEADLINE_SECONDS).is_late


def test_a_pause_stops_the_clock_of_a_rollback():
    fleet = stuck(2, 1)
    fleet.rollout(paused=True)
    assert not fleet.wait(10 * DEADLINE_SECONDS).is_late
    fleet.rollout(paused=False)
    assert fleet.wait(2 * DEADLINE_SECONDS).is_late


@pytest.mark.parametrize("budget", [(1, 0), (0, 1), (1, 1)])
@pytest.mark.parametrize("pairs", [1, 2, 3])
def test_the_next_spec_is_rolled_out_whatever_the_rollback_lacks(pairs, budget):
    """It had no room, and waited for pods of the old revision that could not come."""
    surge, unavailable = budget
    for lost in range(pairs + 1):
        for serving in range(pairs):
            fleet = stuck(pairs, lost, serving, surge=surge, unavailable=unavailable)
            fleet.wait(2 * DEADLINE_SECONDS)
            fleet.settle()
            fleet.update = "c"
            fleet.settle()
            assert fleet.plan.step.phase is Phase.COMPLETE, (lost, serving, fleet.desired)
            assert fleet.desired == {"c": Counts(pairs, pairs)}


def test_what_serves_nobody_gives_its_room_to_a_third_revision_and_what_serves_stays():
    a = Revision("a", Counts(2, 2), Counts(2, 2), Counts(1, 1))
    b = Revision("b", Counts(1, 1), Counts(1, 1), Counts())
    c = Revision("c", Counts(), Counts(), Counts())
    step = next_step(Rollout(Counts(2, 2), "c", "a", (a, b, c), Budget(1, 0), answering="a"))
    assert step.wanted == {"a": Counts(2, 2), "b": Counts(), "c": Counts()}
    b = b._replace(ready=Counts(1, 1))
    step = next_step(Rollout(Counts(2, 2), "c", "a", (a, b, c), Budget(1, 0), answering="a"))
    assert step.wanted == {"a": Counts(1, 1), "b": Counts(1, 1), "c": Counts()}


def test_what_has_failed_is_not_gone_back_to_and_serves_on_until_it_is_asked_for_again():
    """Of many passes one in which it served more would be one too many, and for good."""
    fleet = stuck(4, 4, serving=2)
    fleet.broken.discard("b")
    for _ in range(20):
        plan = fleet.wait(DEADLINE_SECONDS)
        assert (plan.goal, plan.has_failed) == ("a", True)
        fleet.workers_ready()
    assert plan.is_late
    assert min(sum(role) for role in fleet.pods["b"]) >= 2
    fleet.update = "b2"
    fleet.settle()
    assert fleet.plan.step.phase is Phase.COMPLETE
    assert fleet.desired == {"b2": Counts(4, 4)}


def test_behind_a_suspension_a_late_rollback_has_its_time_anew():
    fleet = stuck(4, 2)
    assert fleet.wait(2 * DEADLINE_SECONDS).is_late
    fleet.spec = msgspec.structs.replace(fleet.spec, suspend=True)
    assert not fleet.wait(1).is_late
    fleet.settle()
    fleet.spec = msgspec.structs.replace(fleet.spec, suspend=False)
    assert not fleet.wait(DEADLINE_SECONDS - 10).is_late
    assert fleet.wait(20).is_late


def returned(pairs):
    """Return a fleet whose rollback from a broken `b` has ended."""
    fleet = rolled(pairs)
    fleet.update = "b"
    fleet.broken.add("b")
    fleet.settle()
    fleet.wait(2 * DEADLINE_SECONDS)
    fleet.settle()
    assert (fleet.plan.goal, fleet.plan.step.phase) == ("a", Phase.COMPLETE)
    return fleet


@pytest.mark.parametrize("pairs", [1, 2, 4])
def test_what_pods_suffer_behind_a_rollback_that_has_ended_is_no_failure_of_it(pairs):
    """An eviction or a node too few for a scale-out is told as of any model that serves."""
    fleet = returned(pairs)
    lose(fleet, "a", 1)
    assert not fleet.wait(2 * DEADLINE_SECONDS).is_late
    fleet = returned(pairs)
    fleet.scale(pairs + 2, pairs + 2)
    fleet.step()
    fleet.broken.add("a")
    assert not fleet.wait(2 * DEADLINE_SECONDS).is_late
    fleet.update = "c"
    assert not fleet.step().memory.has_returned


def test_a_rollback_that_was_called_off_and_asked_for_again_is_timed_again():
    fleet = stuck(2, 1)
    fleet.rollout(auto_rollback=False)
    assert fleet.wait(2 * DEADLINE_SECONDS).goal == "b"
    fleet.rollout(auto_rollback=True)
    assert not fleet.wait(DEADLINE_SECONDS - 10).is_late
    assert fleet.wait(20).is_late


def test_the_old_spec_named_again_has_a_deadline_while_the_new_one_has_pods():
    """A rollback by hand: nothing was left to tell that it did not end."""
    fleet = rolled(4)
    fleet.update = "b"
    fleet.step()
    fleet.all_ready()
    fleet.step()
    lose(fleet, "a", 2)
    fleet.update = "a"
    plan = fleet.wait(DEADLINE_SECONDS + 20)
    assert (plan.has_failed, plan.goal) == (True, "a")
    fleet.broken.clear()
    fleet.settle()
    assert (fleet.plan.step.phase, fleet.plan.has_failed) == (Phase.COMPLETE, False)


NOW = 1_800_000_000.0


def status_of(memory, before=None, counts=None):
    """Return a status: of 2 pairs `a` serves one, and `b` none, unless `counts` say otherwise."""
    spec = make_spec(2, 2)
    have = counts or {"a": (2, 1), "b": (1, 0)}
    revisions = tuple(
        Revision(name, Counts(want, want), Counts(want, want), Counts(ready, ready))
        for name, (want, ready) in have.items()
    )
    plan = make_plan(spec, "b", Facts(revisions), memory, NOW)
    pdd = PDDeployment(ObjectKey("ns", "chat"), "uid", 7, "1", False, spec, before or {})
    return deployment_status(pdd, plan, Observed(), Trouble(), Sample(), NOW)


def failed_memory(waited_seconds):
    memory = Memory("a", "b", "b", reached=1)
    return memory._replace(waited=memory.waited._replace(seconds=waited_seconds))


DEFAULT_SECONDS = make_spec().rollout.deadline_seconds


def test_a_late_rollback_is_told_by_condition_phase_and_one_event():
    before = status_of(failed_memory(0))
    status = status_of(failed_memory(DEFAULT_SECONDS), before)
    told = {c["type"]: (c["status"], c["reason"], c["message"]) for c in status["conditions"]}
    assert before["rollout"]["phase"] == "RollingBack"
    assert status["rollout"]["phase"] == "RollbackFailed"
    assert told["Stalled"] == (
        "True",
        "RollbackDeadlineExceeded",
        "revision b made no progress within its deadline; nor did the rollback, 1 of 2 pairs on a",
    )
    assert told["Progressing"][:2] == ("False", "RollbackDeadlineExceeded")
    assert told["Reconciling"][:2] == ("False", "RollbackDeadlineExceeded")
    text = "the rollback to a made no progress within its deadline either"
    assert [tuple(n) for n in notices(before, status)] == [("RollbackFailed", text, True)]
    assert list(notices(status, status_of(read_memory(status), status))) == []


def test_a_rollback_that_has_ended_is_remembered_by_its_phase():
    ended = status_of(failed_memory(0), counts={"a": (2, 2)})
    assert ended["rollout"]["phase"] == "RolledBack"
    memory = read_memory(ended)
    assert memory.has_returned
    evicted = status_of(memory, ended, counts={"a": (2, 1)})
    assert evicted["rollout"]["phase"] == "RolledBack"
    assert list(notices(ended, evicted)) == []
    assert not read_memory(status_of(failed_memory(0))).has_returned
