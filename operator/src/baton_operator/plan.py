"""What a PDDeployment shall become next: scaling, the revision to aim at, the rollout's next step.

Pure: frozen facts and `now` in, decisions out. Everything a decision rests on is in the spec, in
counts of children, or in the last status; nothing is kept in annotations or in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from baton_operator.models import PDDeploymentSpec, ScalingMode
from baton_operator.models.parse import parse_ratio
from baton_operator.names import WORKER_ROLES, Role
from baton_operator.pairs import Budget, Counts, Revision, served_ticks, ticks_of, usable
from baton_operator.rollout import Phase, Rollout, Step, next_step
from baton_operator.scaling import Scaling, Wanted, scale


class Memory(NamedTuple):
    """What the last status says about the rollout; unix seconds.

    `reached` is the most ticks that `update` has served, `progress_at` when that last grew.
    """

    current: str = ""
    update: str = ""
    failed: str = ""
    reached: int = 0
    progress_at: float = 0.0


class Facts(NamedTuple):
    """What exists: counts by revision, and replicas that scalers ask for by role."""

    revisions: tuple[Revision, ...] = ()
    asked: dict[Role, int] = {}  # noqa: RUF012 - never written


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do next.

    Attributes:
        update: the revision that the spec names.
        goal: the revision to aim at: `update`, or the one to fall back to.
        current: the last revision that was rolled out fully, after this step.
        retired: revisions that nothing needs any more.
        deadline_in: seconds until the rollout has failed; None when no clock runs.
    """

    scaling: Scaling
    target: Counts
    update: str
    goal: str
    current: str
    step: Step
    memory: Memory
    retired: tuple[str, ...]
    deadline_in: float | None

    @property
    def has_failed(self) -> bool:
        """Whether the spec's revision missed its deadline."""
        return self.memory.failed == self.update

    @property
    def is_rolled_back(self) -> bool:
        """Whether another revision than the spec's is aimed at."""
        return self.goal != self.update


def make_plan(
    spec: PDDeploymentSpec, update: str, facts: Facts, memory: Memory, now: float
) -> Plan:
    """Return the plan.

    1. Scale: bounds and ratio applied to what spec and scalers ask for.
    2. Carry the memory on: a new update revision starts its clock, progress restarts it. This
       comes before the deadline, so that a pass that comes late does not fail what went well.
    3. Judge the deadline, and choose the goal.
    4. Step the rollout; note completion.
    5. Retire revisions that hold nothing and are not wanted.
    """
    scaling = scale_roles(spec, facts)
    target = Counts() if spec.suspend else Counts(scaling.prefill.replicas, scaling.decode.replicas)
    stable = _stable(facts, memory)
    memory = _progressed(_carried(memory, update, now), facts, target, now)
    is_served = memory.reached >= ticks_of(target)
    memory, deadline_in = _judged(spec, memory, now, is_over=is_served or stable == update)
    goal = _goal(spec, memory, stable, update)
    step = next_step(
        Rollout(
            target=target,
            goal=goal,
            stable=stable or goal,
            revisions=facts.revisions,
            budget=_budget(spec),
            partition_pairs=spec.rollout.partition,
            is_paused=spec.rollout.paused,
        )
    )
    current = _current(step, goal, stable, facts)
    return Plan(
        scaling=scaling,
        target=target,
        update=update,
        goal=goal,
        current=current,
        step=step,
        memory=memory._replace(current=current),
        retired=_retired(facts, step, keep={goal, current}),
        deadline_in=deadline_in,
    )


def scale_roles(spec: PDDeploymentSpec, facts: Facts) -> Scaling:
    """Return both roles' replicas."""
    bounds = spec.ratio.prefill_per_decode
    wanted = [_wanted(spec, role, facts) for role in WORKER_ROLES]
    return scale(wanted[0], wanted[1], parse_ratio(bounds.min), parse_ratio(bounds.max))


def _wanted(spec: PDDeploymentSpec, role: Role, facts: Facts) -> Wanted:
    own = spec.role(role.value)
    if own.scaling.mode is ScalingMode.STATIC:
        return Wanted(own.replicas)
    asked = facts.asked.get(role, own.replicas)
    return Wanted(asked, is_external=True, least=own.scaling.min, most=own.scaling.max)


def _budget(spec: PDDeploymentSpec) -> Budget:
    rollout = spec.rollout
    return Budget(rollout.max_surge.pairs, rollout.max_unavailable.pairs)


def _stable(facts: Facts, memory: Memory) -> str:
    """Return the revision that was last rolled out fully, if it still exists."""
    names = {revision.name for revision in facts.revisions}
    return memory.current if memory.current in names else ""


def _carried(memory: Memory, update: str, now: float) -> Memory:
    if memory.update == update:
        return memory
    return Memory(current=memory.current, update=update, progress_at=now)


def _judged(
    spec: PDDeploymentSpec, memory: Memory, now: float, *, is_over: bool
) -> tuple[Memory, float | None]:
    """Return the memory with the deadline judged, and the seconds left when a clock runs."""
    is_still = spec.suspend or spec.rollout.paused
    if is_still or is_over or memory.failed == memory.update:
        return memory, None
    left = memory.progress_at + spec.rollout.progress_deadline_seconds - now
    if left > 0:
        return memory, left
    return memory._replace(failed=memory.update), None


def _goal(spec: PDDeploymentSpec, memory: Memory, stable: str, update: str) -> str:
    can_return = stable and stable != update and spec.rollout.auto_rollback
    return stable if memory.failed == update and can_return else update


def _progressed(memory: Memory, facts: Facts, target: Counts, now: float) -> Memory:
    ours = (r for r in facts.revisions if r.name == memory.update)
    ticks = next((served_ticks(usable(revision), target) for revision in ours), 0)
    if ticks <= memory.reached:
        return memory
    return memory._replace(reached=ticks, progress_at=now)


def _current(step: Step, goal: str, stable: str, facts: Facts) -> str:
    """Return the goal once it alone serves everything; until then what was stable."""
    if step.phase is Phase.COMPLETE:
        return goal
    if stable:
        return stable
    served = [r for r in facts.revisions if r.name != goal and r.is_live]
    return served[0].name if served else ""


def _retired(facts: Facts, step: Step, keep: set[str]) -> tuple[str, ...]:
    return tuple(
        revision.name
        for revision in facts.revisions
        if not revision.is_live
        and revision.name not in keep
        and step.wanted.get(revision.name, Counts()).is_zero
    )
