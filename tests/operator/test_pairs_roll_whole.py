"""Pairs in one pod under random operations: no step splits one, and every promise of a rollout
holds for them as for roles of their own.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)

from baton_operator.planning.pairs import Budget, available_floor, surge_limit
from baton_operator.planning.rollout import Phase
from baton_testing.lengths import length
from baton_testing.rollout_fleet import Fleet, make_spec

sizes = st.integers(1, 7)
budgets = st.sampled_from([(1, 0), (0, 1), (1, 1), (2, 0), (0, 2), (3, 1)])


class Pairs(RuleBasedStateMachine):
    """Pods that hold both roles: their Deployment's counts are either role's."""

    @initialize(size=sizes, budget=budgets)
    def begin(self, size, budget):
        surge, unavailable = budget
        spec = make_spec(
            size, size, surge=surge, unavailable=unavailable, progress_deadline_seconds=1000
        )
        self.budget = Budget(surge, unavailable)
        self.fleet = Fleet(spec)
        self.names = iter(f"r{number}" for number in range(1, 1000))
        self.fleet.settle()

    @rule()
    def reconcile(self):
        fleet = self.fleet
        before, ready_before = fleet.total().prefill, fleet.ready().prefill
        target = fleet.step().target
        for name, counts in fleet.plan.step.wanted.items():
            assert counts.prefill == counts.decode, f"half a pod of {name}: {fleet.desired}"
        limit = surge_limit(target, self.budget).prefill
        floor = available_floor(target, self.budget).prefill
        assert fleet.total().prefill <= max(before, limit)
        assert fleet.ready().prefill >= min(ready_before, floor)

    @rule()
    def pods_become_ready(self):
        self.fleet.workers_ready()

    @rule(index=st.integers(0, 9), is_ready=st.booleans(), data=st.data())
    def a_pod_becomes_ready_or_not(self, index, is_ready, data):
        name = data.draw(st.sampled_from(sorted(self.fleet.pods)))
        for role in (0, 1):
            self.fleet.set_ready(name, role, index, is_ready)

    @rule()
    def gateways_become_ready(self):
        self.fleet.gateways_roll()

    @rule(is_broken=st.booleans())
    def edit_the_spec(self, is_broken):
        self.fleet.update = next(self.names)
        if is_broken:
            self.fleet.broken.add(self.fleet.update)

    @rule(data=st.data())
    def return_to_a_revision(self, data):
        self.fleet.update = data.draw(st.sampled_from(sorted(self.fleet.pods)))

    @rule(size=sizes)
    def scale(self, size):
        self.fleet.scale(size, size)

    @rule(size=st.integers(1, 99))
    def an_autoscaler_asks(self, size):
        self.fleet.scale_from_outside(size, size, "1:4096", "4096:1")

    @rule(pairs=st.integers(0, 3))
    def partition(self, pairs):
        self.fleet.rollout(partition=pairs)

    @rule(paused=st.booleans())
    def pause(self, paused):
        self.fleet.rollout(paused=paused)

    @rule(seconds=st.sampled_from([1, 400, 1001]))
    def time_passes(self, seconds):
        self.fleet.now += seconds

    def teardown(self):
        """Given capacity and healthy pods, the fleet reaches its goal and nothing is left."""
        if not hasattr(self, "fleet"):
            return
        fleet = self.fleet
        fleet.update = "the end"
        fleet.broken.clear()
        fleet.rollout(paused=False, partition=0)
        fleet.settle()
        plan = fleet.plan
        assert plan.step.phase is Phase.COMPLETE
        assert plan.target.prefill == plan.target.decode > 0
        assert fleet.desired == {plan.goal: plan.target}
        assert fleet.revision(plan.goal).ready == plan.target


def run(examples, part=0):
    """Try `examples` sequences; each part tries others, the same in every run."""
    machine = type("Bound", (Pairs,), {})  # the seed is kept on the class
    run_state_machine_as_test(
        seed(part)(machine) if settings().derandomize else machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.hypothesis
@pytest.mark.usefixtures("same_in_every_run")
def test_no_step_of_100_random_sequences_splits_a_pair():
    run(100)


@pytest.mark.hypothesis
@pytest.mark.usefixtures("same_in_every_run")
@pytest.mark.slow
def test_no_step_of_hundreds_of_random_sequences_splits_a_pair():
    run(length(1000, 400), 1)
