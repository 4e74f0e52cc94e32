"""What the planner decides around the steps: scaling, partition, pause, deadline, rollback."""

from __future__ import annotations

import msgspec
import pytest

from baton_operator.models.roles import RoleSpec, ScalingMode, ScalingSpec
from baton_operator.names import Role
from baton_operator.planning.deadline import Waited
from baton_operator.planning.gateways import Gateways
from baton_operator.planning.pairs import Counts, Revision
from baton_operator.planning.plan import Facts, Memory, make_plan, scale_roles
from baton_operator.planning.rollout import Phase
from baton_operator.planning.scaling import Clamp
from baton_operator.status.status import read_memory
from baton_testing.rollout_fleet import Fleet, make_spec


@pytest.fixture
def fleet():
    """A deployment of 2 prefill and 4 decode, rolled out as `a`."""
    fleet = Fleet(make_spec(2, 4, progress_deadline_seconds=100))
    fleet.settle()
    assert fleet.memory.current == "a"
    return fleet


def test_a_partition_keeps_its_pairs_on_the_old_revision(fleet):
    fleet.update = "b"
    fleet.rollout(partition=1)
    fleet.settle()
    assert fleet.desired == {"a": Counts(1, 1), "b": Counts(2, 3)}
    assert fleet.plan.step.phase is Phase.PARTITIONED
    fleet.rollout(partition=0)
    fleet.settle()
    assert fleet.desired == {"b": Counts(2, 4)}


def test_a_raised_partition_takes_pairs_back(fleet):
    fleet.update = "b"
    fleet.rollout(partition=1)
    fleet.settle()
    fleet.rollout(partition=3)
    fleet.settle()
    assert fleet.desired == {"a": Counts(1, 3), "b": Counts(1, 1)}


def test_a_pause_holds_the_split_and_scaling_goes_on(fleet):
    fleet.update = "b"
    fleet.step()
    fleet.all_ready()
    fleet.step()
    held = dict(fleet.desired)
    fleet.rollout(paused=True)
    fleet.settle()
    assert fleet.desired == held
    fleet.scale(4, 8)
    fleet.settle()
    assert fleet.total().decode >= 8
    assert fleet.desired["b"] == held["b"]
    assert fleet.plan.step.phase is Phase.PAUSED
    fleet.rollout(paused=False)
    fleet.settle()
    assert fleet.desired == {"b": Counts(4, 8)}


def test_a_missed_deadline_returns_to_the_old_revision(fleet):
    fleet.update = "b"
    fleet.broken.add("b")
    fleet.settle()
    assert fleet.desired == {"a": Counts(2, 4), "b": Counts(1, 1)}
    fleet.wait(101)
    fleet.settle()
    assert fleet.desired == {"a": Counts(2, 4)}
    assert fleet.plan.has_failed
    assert fleet.plan.is_rolled_back
    assert fleet.plan.goal == "a"


def crash(fleet, name):
    fleet.broken.add(name)
    fleet.pods[name] = [[False] * len(role) for role in fleet.pods[name]]


@pytest.mark.parametrize("others", ["there", "told to leave"])
def test_a_revision_that_crashes_when_all_of_it_was_ready_is_rolled_back(fleet, others):
    """The old revision is not gone then: a place in the rollout at which no time was charged."""
    fleet.update = "b"
    while fleet.facts().named("b").ready != Counts(2, 4):
        fleet.step()
        fleet.all_ready()
    if others == "told to leave":
        fleet.step()
    assert fleet.memory.current == "a"
    crash(fleet, "b")
    assert fleet.wait(110).has_failed
    fleet.settle()
    assert fleet.desired == {"a": Counts(2, 4)}


def test_a_revision_that_crashes_after_the_old_one_is_gone_has_nothing_to_return_to(fleet):
    fleet.update = "b"
    fleet.settle()
    crash(fleet, "b")
    assert not fleet.wait(1000).has_failed
    assert fleet.plan.look_in is None
    assert fleet.desired == {"b": Counts(2, 4)}


@pytest.mark.parametrize("hold", [{"paused": True}, {"partition": 3}], ids=["paused", "partition"])
def test_a_canary_that_was_ready_is_as_healthy_as_its_pods(fleet, hold):
    """Held for ever it is not failed; a partition's that crashes is, as it would be without one."""
    fleet.update = "b"
    fleet.rollout(partition=3)
    fleet.settle()
    fleet.rollout(**hold)
    assert not fleet.wait(1000).has_failed
    crash(fleet, "b")
    assert fleet.wait(110).has_failed == ("partition" in hold)


def test_a_failed_revision_stays_failed_until_the_spec_changes(fleet):
    fleet.update = "b"
    fleet.broken.add("b")
    fleet.settle()
    fleet.wait(101)
    fleet.settle()
    fleet.broken.clear()
    fleet.now += 1000
    fleet.settle()
    assert fleet.desired == {"a": Counts(2, 4)}
    fleet.update = "c"
    fleet.settle()
    assert fleet.desired == {"c": Counts(2, 4)}
    assert not fleet.plan.has_failed


@pytest.mark.parametrize("update", ["a", "b"], ids=["the first revision", "without rollback"])
def test_what_was_late_and_serves_everything_has_not_failed(update):
    """A model that takes longer to load than the deadline: nobody would have to look at it."""
    fleet = Fleet(make_spec(2, 4, progress_deadline_seconds=100, auto_rollback=False))
    if update == "b":
        fleet.settle()
    fleet.update = update
    fleet.broken.add(update)
    fleet.settle()
    assert fleet.wait(110).has_failed
    fleet.broken.clear()
    fleet.settle()
    assert fleet.plan.step.phase is Phase.COMPLETE
    assert (fleet.plan.current, fleet.plan.has_failed) == (update, False)
    assert fleet.desired == {update: Counts(2, 4)}


def test_a_deadline_is_missed_at_its_second_and_that_plan_turns_back_at_once(fleet):
    fleet.update = "b"
    fleet.broken.add("b")
    fleet.step()
    fleet.step()
    plan = fleet.wait(99)
    assert (plan.has_failed, plan.goal) == (False, "b")
    fleet.now += 1
    plan = fleet.step()
    assert (plan.has_failed, plan.goal, plan.look_in) == (True, "a", None)
    assert plan.step.wanted == {"a": Counts(2, 4), "b": Counts()}


def test_without_auto_rollback_a_failure_is_only_reported(fleet):
    fleet.rollout(auto_rollback=False)
    fleet.update = "b"
    fleet.broken.add("b")
    fleet.settle()
    fleet.wait(101)
    fleet.settle()
    assert fleet.plan.has_failed
    assert fleet.desired == {"a": Counts(2, 4), "b": Counts(1, 1)}


def canary(fleet):
    """Bring one pair of `b` up behind a partition, and let its pods be lost."""
    fleet.update = "b"
    fleet.rollout(partition=3)
    fleet.settle()
    assert fleet.plan.step.phase is Phase.PARTITIONED
    for role in (0, 1):
        fleet.set_ready("b", role, 0, False)


def test_a_canary_behind_a_partition_is_not_failed_by_time(fleet):
    fleet.update = "b"
    fleet.rollout(partition=3)
    fleet.settle()
    fleet.wait(1000)
    assert not fleet.plan.has_failed
    fleet.rollout(partition=0)
    fleet.settle()
    assert fleet.desired == {"b": Counts(2, 4)}


def test_a_canary_that_is_often_evicted_has_its_time_again_each_time(fleet):
    for _ in range(5):
        canary(fleet)
        assert not fleet.wait(90).has_failed
        fleet.all_ready()
        fleet.step()
    canary(fleet)
    assert fleet.wait(110).has_failed


@pytest.mark.parametrize("hold", ["pause", "suspend", "partition"])
def test_time_in_which_a_rollout_is_held_does_not_count(fleet, hold):
    fleet.update = "b"
    fleet.broken.add("b")
    fleet.wait(60)
    before = fleet.spec
    if hold == "suspend":
        fleet.spec = msgspec.structs.replace(fleet.spec, suspend=True)
    else:
        fleet.rollout(**({"paused": True} if hold == "pause" else {"partition": 4}))
    assert not fleet.wait(1000).has_failed
    fleet.spec = before
    assert not fleet.wait(20).has_failed
    assert fleet.wait(110).has_failed


def test_a_pause_keeps_the_time_that_was_waited_before(fleet):
    fleet.update = "b"
    fleet.broken.add("b")
    fleet.wait(60)
    fleet.rollout(paused=True)
    fleet.wait(1000)
    fleet.rollout(paused=False)
    fleet.wait(30)
    assert not fleet.plan.has_failed
    assert fleet.wait(15).has_failed


def test_an_operator_that_was_away_charges_a_twentieth(fleet):
    fleet.update = "b"
    fleet.broken.add("b")
    fleet.wait(60)
    fleet.now += 1_000_000
    assert not fleet.wait(30).has_failed
    assert fleet.wait(15).has_failed


@pytest.mark.parametrize("jump", [-500_000, 500_000], ids=["back", "forth"])
def test_a_clock_that_jumps_charges_a_twentieth_at_most(fleet, jump):
    fleet.now = 1_000_000.0
    fleet.update = "b"
    fleet.broken.add("b")
    fleet.wait(50)
    fleet.now += jump
    assert not fleet.wait(40).has_failed
    assert fleet.wait(15).has_failed


def test_pods_that_were_not_asked_for_are_not_waited_for(fleet):
    """The operator's own writes fail: the new revision has no pods that could be late."""
    fleet.update = "b"
    for _ in range(10):
        plan = make_plan(fleet.spec, "b", fleet.facts(), fleet.memory, fleet.now)
        fleet.memory, fleet.now = plan.memory, fleet.now + 50
    assert not plan.has_failed
    assert plan.memory.waited == Waited()


def test_pods_that_wait_for_the_room_of_leaving_ones_are_not_late(fleet):
    fleet.update = "b"
    fleet.step()
    for _ in range(30):
        facts = fleet.facts()._replace(awaiting_room=frozenset("b"))
        plan = make_plan(fleet.spec, "b", facts, fleet.memory, fleet.now)
        fleet.memory, fleet.now = plan.memory, fleet.now + plan.look_in
    assert not plan.has_failed
    assert fleet.wait(101).has_failed


def test_a_look_within_a_piece_changes_nothing_that_must_be_written(fleet):
    fleet.update = "b"
    fleet.broken.add("b")
    fleet.step()
    fleet.step()
    before = fleet.memory
    for _ in range(4):
        fleet.now += 1
        fleet.step()
    assert fleet.memory == before
    fleet.now += 1
    fleet.step()
    assert fleet.memory.waited == Waited(5, int(fleet.now))


def test_the_next_look_is_due_at_the_end_of_the_running_piece(fleet):
    fleet.update = "b"
    fleet.broken.add("b")
    fleet.step()
    fleet.step()
    fleet.now += 2
    assert fleet.step().look_in == 3


def test_a_rollout_whose_pods_are_all_ready_needs_no_look_of_the_clocks(fleet):
    """The old pods' end is an event of its own."""
    full = Counts(2, 4)
    leaving = Revision("a", Counts(), Counts(1, 1), Counts())
    facts = Facts((leaving, Revision("b", full, full, full)))
    memory = fleet.memory._replace(update="b", reached=4)
    plan = make_plan(fleet.spec, "b", facts, memory, fleet.now)
    assert (plan.step.phase, plan.look_in) == (Phase.PROGRESSING, None)


def test_no_status_is_no_memory():
    assert read_memory({}) == Memory() == Memory("", "", "", 0, 0.0, Waited(0, 0), False)


def test_whose_current_revision_is_gone_goes_on_from_the_first_that_lives(fleet):
    one, none = Counts(1, 1), Counts()
    counts = {"a": none, "b": one, "c": one, "d": one}
    facts = Facts(tuple(Revision(name, each, each, each) for name, each in counts.items()))
    memory = fleet.memory._replace(current="gone")
    assert make_plan(fleet.spec, "d", facts, memory, fleet.now).current == "b"


def test_a_deadline_leaves_pods_as_long_again_as_they_must_be_ready():
    rollout = {"progress_deadline_seconds": 10, "min_ready_seconds": 100}
    assert make_spec(**rollout).rollout.deadline_seconds == 200


def test_progress_moves_the_deadline(fleet):
    fleet.update = "b"
    for _ in range(20):
        fleet.step()
        fleet.all_ready()
        fleet.wait(40)
    assert not fleet.plan.has_failed
    assert fleet.memory.current == "b"


def test_a_pass_that_comes_late_does_not_fail_a_rollout_that_went_well(fleet):
    fleet.update = "b"
    fleet.step()
    fleet.all_ready()
    fleet.now += 10_000
    assert not fleet.step().has_failed


def test_a_paused_or_suspended_rollout_cannot_fail(fleet):
    fleet.update = "b"
    fleet.broken.add("b")
    fleet.rollout(paused=True)
    fleet.wait(1000)
    assert fleet.plan.look_in is None
    assert not fleet.plan.has_failed


def test_a_paused_first_revision_cannot_fail():
    fleet = Fleet(make_spec(1, 1, progress_deadline_seconds=100))
    fleet.rollout(paused=True)
    fleet.broken.add("a")
    plan = fleet.wait(1000)
    assert (plan.has_failed, plan.look_in) == (False, None)


@pytest.mark.parametrize(("paused", "revision"), [(False, "b"), (True, "a")])
def test_gateways_move_at_half_the_pairs_and_not_in_a_pause(fleet, paused, revision):
    fleet.rollout(paused=paused)
    half = Counts(1, 2)
    revisions = (Revision("a", half, half, half), Revision("b", half, half, half))
    facts = Facts(revisions, gateways=Gateways("a", is_rolled=True))
    memory = fleet.memory._replace(update="b", reached=2)
    assert make_plan(fleet.spec, "b", facts, memory, fleet.now).gateway == revision


def test_pods_lost_after_completion_start_no_clock(fleet):
    fleet.set_ready("a", 0, 0, False)
    fleet.now += 10_000
    plan = fleet.step()
    assert not plan.has_failed
    assert plan.look_in is None


def test_the_first_revision_can_fail_and_is_kept():
    fleet = Fleet(make_spec(1, 1, progress_deadline_seconds=100))
    fleet.broken.add("a")
    plan = fleet.wait(106)
    assert plan.has_failed
    assert fleet.desired == {"a": Counts(1, 1)}


def test_a_first_revision_that_never_served_is_nothing_to_return_to():
    fleet = Fleet(make_spec(2, 4, progress_deadline_seconds=100))
    fleet.broken.update("ab")
    fleet.settle()
    fleet.update = "b"
    fleet.settle()
    assert fleet.memory.current == ""
    fleet.wait(101)
    fleet.settle()
    assert fleet.plan.has_failed
    assert not fleet.plan.is_rolled_back
    fleet.broken.remove("b")
    fleet.settle()
    assert fleet.desired == {"b": Counts(2, 4)}
    assert fleet.memory.current == "b"
    assert not fleet.plan.has_failed


def test_a_first_revision_that_serves_some_pairs_is_returned_to():
    fleet = Fleet(make_spec(2, 2, progress_deadline_seconds=100))
    fleet.step()
    for role in (0, 1):
        fleet.set_ready("a", role, 0, is_ready=True)
    fleet.update = "b"
    fleet.broken.add("b")
    fleet.step()
    assert fleet.memory.current == "a"


def test_suspension_and_return(fleet):
    fleet.spec = msgspec.structs.replace(fleet.spec, suspend=True)
    fleet.settle()
    assert fleet.total() == Counts()
    assert "a" in fleet.desired
    fleet.spec = msgspec.structs.replace(fleet.spec, suspend=False)
    fleet.settle()
    assert fleet.desired == {"a": Counts(2, 4)}


def test_a_retired_revision_is_only_ever_an_empty_one(fleet):
    fleet.update = "b"
    plan = fleet.step()
    assert plan.retired == ()
    fleet.settle()
    assert set(fleet.desired) == {"b"}


def external(spec, prefill_bounds, decode_bounds):
    roles = [
        RoleSpec(name, replicas=1, scaling=ScalingSpec(ScalingMode.EXTERNAL, *bounds))
        for name, bounds in (("prefill", prefill_bounds), ("decode", decode_bounds))
    ]
    return msgspec.structs.replace(spec, roles=roles)


def test_external_replicas_come_from_the_scaler_within_bounds():
    spec = external(make_spec(), (1, 4), (2, 8))
    scaling = scale_roles(spec, Facts((), {Role.PREFILL: 9, Role.DECODE: 1}))
    assert scaling.prefill == (4, Clamp.MAX)
    assert scaling.decode == (2, Clamp.MIN)


def test_the_specs_replicas_are_the_first_guess_of_an_external_role():
    spec = external(make_spec(), (1, 4), (1, 8))
    assert scale_roles(spec, Facts()).decode.replicas == 1


HALVES = [(Counts(2, 2), "a"), (Counts(2, 2), "b")]


@pytest.mark.parametrize(
    ("partition", "stable", "gateway"),
    [(0, "a", "b"), (2, "a", "b"), (3, "a", "a"), (4, "a", "a"), (4, "", "b")],
)
def test_a_partition_that_leaves_less_than_half_takes_gateways_to_the_stable_revision(
    partition, stable, gateway
):
    spec = make_spec(4, 4, partition=partition)
    facts = Facts(tuple(Revision(n, *[c] * 3) for c, n in HALVES), gateways=Gateways("b", True))
    assert make_plan(spec, "b", facts, Memory(stable, "b"), 1000.0).gateway == gateway


@pytest.mark.parametrize(
    ("gateways", "known", "answering"),
    [
        (None, "a", "a"),
        (Gateways("b", is_rolled=False), "a", "a"),
        (Gateways("b", is_rolled=False), "", "b"),
        (Gateways("b", is_rolled=True), "a", "b"),
    ],
)
def test_who_answers_is_remembered_until_every_gateway_is_of_another(gateways, known, answering):
    facts = Facts(tuple(Revision(n, *[c] * 3) for c, n in HALVES), gateways=gateways)
    for memory in (Memory("a", "b", answering=known), Memory("a", "a", answering=known)):
        plan = make_plan(make_spec(4, 4), "b", facts, memory, 1000.0)
        assert plan.memory.answering == answering


@pytest.mark.parametrize(("answering", "left"), [("a", Counts(1, 1)), ("b", Counts())])
def test_of_two_older_revisions_the_one_that_gateways_send_to_keeps_a_pair(answering, left):
    two = (Revision("a", *[Counts(1, 1)] * 3), Revision("b", *[Counts(2, 1)] * 3))
    facts = Facts(two, gateways=Gateways(answering, is_rolled=True))
    plan = make_plan(make_spec(2, 1), "c", facts, Memory("a", "c"), 1000.0)
    assert plan.step.wanted["a"] == left
