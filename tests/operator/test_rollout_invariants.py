"""Random operations on a fleet: what every step keeps, and where every sequence can still go."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from baton_operator.models import ScalingMode
from baton_operator.planning.pairs import (
    Budget,
    Counts,
    available_floor,
    growing,
    pairs_of,
    served_pairs,
    surge_limit,
    total,
)
from baton_operator.planning.rollout import Phase
from baton_testing.lengths import length
from baton_testing.rollout_fleet import Fleet, make_spec

PARTS = 8  # of the long run, which processors share
SEQUENCES = length(10_000, 2_000)

sizes = st.integers(1, 7)
budgets = st.sampled_from([(1, 0), (0, 1), (1, 1), (2, 0), (0, 2), (3, 1)])


def whole_pairs(ready_by_revision, target):
    """Pairs that revisions serve by themselves: no pair across revisions is counted."""
    return sum(served_pairs(ready, target) for ready in ready_by_revision)


class Rollouts(RuleBasedStateMachine):
    """Edits, pauses, failures, and pods that come and go, in any order."""

    @initialize(prefill=sizes, decode=sizes, budget=budgets)
    def begin(self, prefill, decode, budget):
        surge, unavailable = budget
        spec = make_spec(
            prefill,
            decode,
            surge=surge,
            unavailable=unavailable,
            progress_deadline_seconds=1000,
        )
        self.budget = Budget(surge, unavailable)
        self.fleet = Fleet(spec)
        self.names = iter(f"r{number}" for number in range(1, 1000))
        self.target = None
        self.fleet.settle()

    @rule()
    def reconcile(self):
        self._checked_step()

    @rule()
    def pods_become_ready(self):
        self.fleet.workers_ready()

    @rule(role=st.integers(0, 1), index=st.integers(0, 9), data=st.data())
    def a_pod_becomes_ready_or_not(self, role, index, data):
        name = data.draw(st.sampled_from(sorted(self.fleet.pods)))
        self.fleet.set_ready(name, role, index, data.draw(st.booleans()))

    @rule()
    def gateways_become_ready(self):
        self.fleet.gateways_roll()

    @rule(is_broken=st.booleans(), has_broken_gateways=st.booleans())
    def edit_the_spec(self, is_broken, has_broken_gateways):
        self.fleet.update = next(self.names)
        if is_broken:
            self.fleet.broken.add(self.fleet.update)
        if has_broken_gateways:
            self.fleet.broken_gateways.add(self.fleet.update)

    @rule(data=st.data())
    def return_to_a_revision(self, data):
        self.fleet.update = data.draw(st.sampled_from(sorted(self.fleet.pods)))

    @rule(prefill=sizes, decode=sizes)
    def scale(self, prefill, decode):
        self.fleet.scale(prefill, decode)

    @rule(prefill=sizes, decode=sizes)
    def an_autoscaler_asks(self, prefill, decode):
        self.fleet.scale_from_outside(prefill, decode, "1:3", "2:1")

    @rule(pairs=st.integers(0, 3))
    def partition(self, pairs):
        self.fleet.rollout(partition=pairs)

    @rule(paused=st.booleans())
    def pause(self, paused):
        self.fleet.rollout(paused=paused)

    @rule(seconds=st.sampled_from([1, 400, 1001]))
    def time_passes(self, seconds):
        self.fleet.now += seconds

    @precondition(lambda self: self.fleet.plan is not None)
    @rule()
    def the_operator_restarts_without_its_last_status(self):
        self.fleet.memory = self.fleet.memory._replace(reached=0)

    def _checked_step(self):
        fleet = self.fleet
        before_total, before_ready = fleet.total(), fleet.ready()
        ready_before = [fleet.revision(name).ready for name in fleet.pods]
        answering = fleet.answering
        answered = fleet.revision(answering).ready if answering in fleet.pods else Counts()
        desired_before = dict(fleet.desired)
        plan = fleet.step()
        target = plan.target
        self._check_pause(desired_before, plan)
        if all(role.scaling.mode is ScalingMode.EXTERNAL for role in fleet.spec.roles):
            assert target.decode <= 3 * target.prefill <= 6 * target.decode
        limit = surge_limit(target, self.budget)
        floor = available_floor(target, self.budget)
        for role in (0, 1):
            after_total, after_ready = fleet.total()[role], fleet.ready()[role]
            assert after_total <= max(before_total[role], limit[role])
            assert after_ready >= min(before_ready[role], floor[role])
        if self.budget.surge_pairs:
            self._check_pairs(whole_pairs(ready_before, target), target)
        self._check_gateways(answering, answered, target)
        assert set(fleet.pods) >= {plan.goal}

    def _check_pause(self, before, plan):
        """Held, nothing is moved from one revision to another: pods that are missing come, pods
        that are too many go, and only because the target is another or a pair was begun before.

        Where nothing may surge, a pause may find all old pods gone: then there is nothing to hold.
        """
        last, self.target = self.target, plan.target
        is_held = any(not c.is_zero for name, c in before.items() if name != plan.goal)
        if not self.fleet.spec.rollout.paused or last != plan.target or not is_held:
            return
        after = self.fleet.desired
        assert after.get(plan.goal, Counts()) == before.get(plan.goal, Counts())
        for role in (0, 1):
            have = sum(counts[role] for counts in before.values())
            changes = [after.get(name, Counts())[role] - before[name][role] for name in before]
            assert max(changes) <= 0 or have < plan.target[role], (before, after)
            assert min(changes) >= 0 or have > plan.target[role], (before, after)

    def _serving(self):
        """Ready pods of revisions that have both roles: a role alone serves nobody."""
        revisions = map(self.fleet.revision, self.fleet.pods)
        return total(r.ready for r in revisions if all(r.ready))

    def _check_pairs(self, before, target):
        """Serving inside revisions never falls below the budget and one role's rounding."""
        n = pairs_of(target)
        rounding = -(-n // min(target))
        missing = self.budget.unavailable_pairs
        least = max(0 if missing else 1, n - missing - rounding)
        after = [self.fleet.revision(name).ready for name in self.fleet.pods]
        assert whole_pairs(after, target) >= min(before, least)

    def _check_gateways(self, answering, ready_before, target):
        """The workers that gateways send to are not all taken away before the gateways go."""
        if self.budget.unavailable_pairs or not served_pairs(ready_before, target):
            return
        assert served_pairs(self.fleet.revision(answering).ready, target)

    def teardown(self):
        if not hasattr(self, "fleet"):
            return
        self._comes_to_its_partition()
        self._comes_to_rest(self.fleet.update)
        self._comes_to_rest("the way back")

    def _comes_to_its_partition(self):
        """Given capacity and healthy pods, the new revision has what a partition leaves it, the old
        side has the rest, and gateways are of one that serves.
        """
        fleet = self.fleet
        fleet.broken.clear()
        fleet.broken_gateways.clear()
        fleet.rollout(paused=False)
        fleet.settle()
        plan, n = fleet.plan, pairs_of(fleet.plan.target)
        left = fleet.spec.rollout.partition if plan.goal != plan.current else 0
        assert fleet.desired[plan.goal] == growing(plan.target, max(0, n - left))
        assert plan.target.less(fleet.ready()) == Counts()
        assert served_pairs(fleet.revision(fleet.answering).ready, plan.target)

    def _comes_to_rest(self, update):
        """Given capacity and healthy pods, the fleet reaches its goal and nothing is left."""
        fleet = self.fleet
        fleet.update = update
        fleet.broken.discard(update)
        fleet.broken_gateways.clear()
        fleet.rollout(paused=False, partition=0)
        fleet.settle()
        plan = fleet.plan
        assert plan.step.phase is Phase.COMPLETE
        assert plan.goal == update or plan.has_failed
        assert fleet.desired == {plan.goal: plan.target}
        assert fleet.answering == plan.goal
        assert fleet.revision(plan.goal).ready == plan.target
        assert plan.target != Counts()


def run(examples, part=0):
    """Try `examples` sequences; each part tries others, the same in every run."""
    machine = type("Bound", (Rollouts,), {})  # the seed is kept on the class
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
def test_every_step_of_100_random_sequences_keeps_budgets_pairs_and_progress():
    run(100)


@pytest.mark.hypothesis
@pytest.mark.usefixtures("same_in_every_run")
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(PARTS))
def test_every_step_of_thousands_of_random_sequences_keeps_budgets_pairs_and_progress(part):
    run(SEQUENCES // PARTS, 1 + part)


EDIT = ("edit_the_spec", {"is_broken": False, "has_broken_gateways": False})
RECONCILE, READY = ("reconcile", {}), ("pods_become_ready", {})
PAUSE, BACK = ("pause", {"paused": True}), ("return_to_a_revision", {"data": None})
ONCE_BROKEN = {
    "a third revision and other ratio take a stray's last pair": (
        ("begin", {"prefill": 1, "decode": 5, "budget": (1, 0)}),
        *(EDIT, RECONCILE, READY, RECONCILE),
        ("an_autoscaler_asks", {"prefill": 3, "decode": 5}),
        *(EDIT, RECONCILE, READY, RECONCILE),
    ),
    "asked for more in a pause, one pod that serves goes first": (
        ("begin", {"prefill": 1, "decode": 1, "budget": (1, 0)}),
        EDIT,
        ("an_autoscaler_asks", {"prefill": 1, "decode": 2}),
        *(RECONCILE, READY, PAUSE),
        ("an_autoscaler_asks", {"prefill": 2, "decode": 3}),
        RECONCILE,
    ),
    "a third revision takes the one that the gateways still send to": (
        ("begin", {"prefill": 1, "decode": 1, "budget": (1, 0)}),
        EDIT,
        ("an_autoscaler_asks", {"prefill": 2, "decode": 1}),
        *(RECONCILE, READY, EDIT, RECONCILE),
    ),
    "the way back begins in a pause": (
        ("begin", {"prefill": 2, "decode": 3, "budget": (1, 1)}),
        *(EDIT, RECONCILE, PAUSE, BACK, READY, RECONCILE),
    ),
    "what the way back lacks comes in a pause": (
        ("begin", {"prefill": 2, "decode": 3, "budget": (1, 1)}),
        *(EDIT, RECONCILE, PAUSE, BACK, RECONCILE),
    ),
}


@pytest.mark.parametrize("steps", ONCE_BROKEN.values(), ids=ONCE_BROKEN)
def test_every_step_of_sequences_that_once_broke_something_keeps_it(steps):
    machine = Rollouts()
    for name, facts in steps:
        if name == "return_to_a_revision":
            machine.fleet.update = min(machine.fleet.pods)
        else:
            getattr(machine, name)(**facts)
