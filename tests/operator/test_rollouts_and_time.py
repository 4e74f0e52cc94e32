"""Random operations on a fleet that lives in time: who is failed, and who never is.

Pods take time to be ready and to leave, nodes are full, pods are evicted, the operator is away, its
clock jumps, people pause, suspend and partition. Whatever of this comes in whatever order, a
revision whose pods become ready when they are given the time for it is never failed, and one whose
pods do not is failed after a bounded time of waiting for them.
"""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis import Phase as Part
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from baton_operator.planning.pairs import Budget, Counts, available_floor, surge_limit
from baton_operator.planning.rollout import Phase
from baton_testing.lengths import length
from baton_testing.rollout_fleet import TimedFleet, make_spec

PARTS = 2  # of the long run, which processors share
DEADLINE_SECONDS = 600
STEPS = 15
"""Absences and jumps charge a twentieth each: so many leave a pod the time that it takes."""

sizes = st.integers(1, 5)
budgets = st.sampled_from([(1, 0), (0, 1), (1, 1), (2, 0)])


class RolloutsInTime(RuleBasedStateMachine):
    """What happens in the life of a deployment, in any order, while time passes."""

    @initialize(prefill=sizes, decode=sizes, budget=budgets)
    def begin(self, prefill, decode, budget):
        surge, unavailable = budget
        self.budget = Budget(surge, unavailable)
        self.fleet = TimedFleet(
            make_spec(
                prefill,
                decode,
                surge=surge,
                unavailable=unavailable,
                progress_deadline_seconds=DEADLINE_SECONDS,
            )
        )
        self.names = iter(f"r{number}" for number in range(1, 1000))
        self.is_tight = False
        self._look()
        self.fleet.pass_time(300, self._look)
        self.fleet.now += 10_000_000
        assert self.fleet.plan.step.phase is Phase.COMPLETE

    @rule(seconds=st.sampled_from([1, 40, 90, 200, 2000]))
    def time_passes(self, seconds):
        self._look()
        self.fleet.pass_time(seconds, self._look)

    @rule(seconds=st.sampled_from([1, 50, 99, 3000]))
    def the_operator_is_away(self, seconds):
        self.fleet.pass_time(seconds)

    @rule(seconds=st.sampled_from([-100_000, -30, 30, 1900, 100_000]))
    def the_clock_jumps(self, seconds):
        self.fleet.now += seconds
        self._look()

    @rule(is_broken=st.booleans())
    def edit_the_spec(self, is_broken):
        self.fleet.update = next(self.names)
        if is_broken:
            self.fleet.broken.add(self.fleet.update)
        self._look()

    @rule(data=st.data())
    def return_to_a_revision(self, data):
        self.fleet.update = data.draw(st.sampled_from(sorted(self.fleet.pods)))

    @rule(prefill=sizes, decode=sizes)
    def scale(self, prefill, decode):
        self.fleet.scale(prefill, decode)
        self._bound_room()
        self._look()

    @rule(pairs=st.integers(0, 3))
    def partition(self, pairs):
        self.fleet.rollout(partition=pairs)
        self._look()

    @rule(paused=st.booleans())
    def pause(self, paused):
        self.fleet.rollout(paused=paused)
        self._look()

    @rule(suspend=st.booleans())
    def suspend(self, suspend):
        self.fleet.spec = msgspec.structs.replace(self.fleet.spec, suspend=suspend)

    @rule(is_tight=st.booleans())
    def the_quota_changes(self, is_tight):
        """A tight one has room for the surge, and none for pods that leave beside it."""
        self.is_tight = is_tight
        self._bound_room()

    @rule(data=st.data())
    def a_pod_is_evicted(self, data):
        """As the budget for disruptions has it: only where nothing is missing yet."""
        found = [
            (name, role)
            for name, roles in self.fleet.pods.items()
            for role, pods in enumerate(roles)
            if pods and all(pod.is_ready for pod in [*roles[0], *roles[1]])
        ]
        if found:
            self.fleet.evict(*data.draw(st.sampled_from(sorted(found))))
            self._look()

    @rule()
    def what_rolls_crashes(self):
        """Pods that were ready are not any more, and never will be: at any moment of a rollout."""
        fleet = self.fleet
        if fleet.update in fleet.pods and fleet.memory.current != fleet.update:
            fleet.crash(fleet.update)
            self._look()

    def _bound_room(self):
        roles = Counts(*(self.fleet.spec.role(name).replicas for name in ("prefill", "decode")))
        self.fleet.room = surge_limit(roles, self.budget) if self.is_tight else None

    def _look(self):
        """Plan, and check what the plan may do."""
        fleet = self.fleet
        before_total, before_ready = fleet.total(), fleet.ready()
        fleet.step()
        plan = fleet.step()
        limit = surge_limit(plan.target, self.budget)
        floor = available_floor(plan.target, self.budget)
        for role in (0, 1):
            assert fleet.total()[role] <= max(before_total[role], limit[role])
            assert fleet.ready()[role] >= min(before_ready[role], floor[role])
        if plan.has_failed:
            assert fleet.update in fleet.broken, "a revision that works has failed"
        assert 0 <= plan.memory.waited.seconds < DEADLINE_SECONDS or plan.is_late
        if fleet.spec.suspend or fleet.spec.rollout.paused:
            assert plan.memory.waited.since == 0

    def teardown(self):
        if not hasattr(self, "fleet"):
            return
        self._set_free()
        self._comes_to_rest("sound")
        self._is_failed("hollow")
        self._is_failed("fickle", self._crash_at_the_end)

    def _set_free(self):
        self.fleet.rollout(paused=False, partition=0)
        self.fleet.spec = msgspec.structs.replace(self.fleet.spec, suspend=False)

    def _comes_to_rest(self, update):
        """What works is rolled out, however full the nodes are."""
        self.fleet.update = update
        self._look()
        self.fleet.pass_time(30 * (self.fleet.START + self.fleet.DRAIN), self._look)
        plan = self.fleet.plan
        assert plan.step.phase is Phase.COMPLETE
        assert set(self.fleet.desired) == {update}
        assert self.fleet.revision(update).ready == plan.target

    def _crash_at_the_end(self, update):
        """Its pods become ready, and end as soon as all are, or all old ones have been told to."""
        fleet = self.fleet
        fleet.broken.discard(update)
        for _ in range(60):
            fleet.step()
            is_whole = fleet.revision(update).ready == fleet.plan.target
            if is_whole or fleet.desired["sound"].is_zero:
                break
            fleet.pass_time(fleet.START / 2)
        assert fleet.plan.step.phase is Phase.PROGRESSING
        fleet.crash(update)

    def _is_failed(self, update, breaks=None):
        """What does not is failed, at the deadline and a piece or two; what worked serves on."""
        fleet = self.fleet
        fleet.broken.add(update)
        fleet.update = update
        if breaks is not None:
            breaks(update)
        self._look()
        pieces = 3 * DEADLINE_SECONDS / 20
        fleet.pass_time(DEADLINE_SECONDS + 2 * fleet.DRAIN + pieces, self._look)
        assert fleet.plan.has_failed
        fleet.pass_time(30 * fleet.START, self._look)
        assert fleet.plan.goal == "sound"
        assert fleet.revision("sound").ready == fleet.plan.target


def run(examples, part=0):
    """Try `examples` sequences; each part tries others, the same in every run."""
    machine = type("Bound", (RolloutsInTime,), {})  # the seed is kept on the class
    run_state_machine_as_test(
        seed(part)(machine) if settings().derandomize else machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=STEPS,
            deadline=None,
            # To shrink a life of many looks takes longer than to read it.
            phases=(Part.explicit, Part.reuse, Part.generate),
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.hypothesis
@pytest.mark.usefixtures("same_in_every_run")
def test_only_what_never_becomes_ready_is_failed_in_20_random_lives():
    run(20)


@pytest.mark.hypothesis
@pytest.mark.usefixtures("same_in_every_run")
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(PARTS))
def test_only_what_never_becomes_ready_is_failed_in_hundreds_of_random_lives(part):
    run(length(1000, 300) // PARTS, 1 + part)
