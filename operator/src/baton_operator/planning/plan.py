"""What a PDDeployment shall become next: scaling, the revision to aim at, the rollout's next step.

Pure: frozen facts and `now` in, decisions out. Everything a decision rests on is in the spec, in
counts of children, or in the last status; nothing is kept in annotations or in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from baton_operator.models import PDDeploymentSpec, ScalingMode
from baton_operator.models.parse import parse_ratio
from baton_operator.names import WORKER_ROLES, Role
from baton_operator.planning.deadline import Waited, charged, piece_seconds
from baton_operator.planning.gateways import Gateways, countable_pairs, counted, gateway_revision
from baton_operator.planning.pairs import Budget, Counts, Revision, pairs_of, served_pairs, usable
from baton_operator.planning.rollout import Phase, Rollout, Step, next_step
from baton_operator.planning.scaling import Scaling, Wanted, scale


class Memory(NamedTuple):
    """What the last status says about the rollout; unix seconds.

    `reached` is the most pairs that the revision which is rolled to has served since all its pods
    were last ready, `progress_at` when that last grew, `waited` the time that counts towards the
    deadline: all of it where a rollback is late. `answering` is the revision that every serving
    gateway pod was last of. `has_returned`: a rollback has ended; what its pods suffer since then
    is no part of it.
    """

    current: str = ""
    update: str = ""
    failed: str = ""
    reached: int = 0
    progress_at: float = 0.0
    waited: Waited = Waited()
    is_upgrade: bool = False
    is_gateway_upgrade: bool = False
    answering: str = ""
    has_returned: bool = False


class Turn(NamedTuple):
    """A model's turn to take what a new operator makes of its spec.

    `is_upgrade`: it has it, and no user asked for the change. `waiting` is the revision that it
    would have and has not yet, `why` says whom it, or its gateways alone, wait for.
    """

    is_upgrade: bool = False
    waiting: str = ""
    why: str = ""


class Facts(NamedTuple):
    """What exists: counts by revision, replicas that scalers ask for by role, the gateways.

    `asked` holds what a scaler that is gone asked for last: its end is no wish for fewer pods.
    `awaiting_room` names revisions with pods that have no room while others of ours are leaving.
    """

    revisions: tuple[Revision, ...] = ()
    asked: dict[Role, int] = {}  # noqa: RUF012 - never written
    awaiting_room: frozenset[str] = frozenset()
    gateways: Gateways | None = None
    turn: Turn = Turn()

    def named(self, name: str) -> Revision:
        """Return a revision's counts; one that does not exist has none."""
        none = Revision(name, Counts(), Counts(), Counts())
        return next((r for r in self.revisions if r.name == name), none)

    def counted(self, goal: str, target: Counts) -> Facts:
        """Return what a rollout to `goal` may count of this, before the gateways have come."""
        return self._replace(revisions=counted(self.gateways, goal, self.revisions, target))

    def awaited(self, goal: str, target: Counts) -> Facts:
        """Return the same as far as a deadline counts the wait for it: gateways that leave have a
        bound of their own, and are no fault of the goal's.
        """
        present = self.gateways and self.gateways._replace(others_leave_in=0.0)
        return self._replace(gateways=present).counted(goal, target)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do next.

    Attributes:
        update: the revision that the spec names.
        goal: the revision to aim at: `update`, or the one to fall back to.
        is_late: whether this is a rollback whose pods missed the deadline as well.
        current: the revision that a rollback returns to, after this step; see `_current`.
        gateway: the revision that the gateways shall be of.
        retired: revisions that nothing needs any more.
        look_in: seconds until the deadline, or gateways that leave, need another look; None when
            no clock runs.
        turn: whether this is, or what waits for, an upgrade of the operator's.
        asked: replicas that each role scaled from outside was last asked for.
    """

    scaling: Scaling
    target: Counts
    update: str
    goal: str
    is_late: bool
    current: str
    gateway: str
    step: Step
    memory: Memory
    retired: tuple[str, ...]
    look_in: float | None
    asked: Mapping[Role, int]
    turn: Turn

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
    2. Carry the memory on: a new update revision starts anew, and so does progress. This comes
       before the deadline, so that a pass that comes late does not fail what went well.
    3. Step towards the spec's revision, and charge the time for which that waits for pods.
    4. Where the deadline is missed, step towards the revision to fall back to instead, and charge
       its time: a rollback that is late as well is told, and waits on.
    5. Note completion; retire revisions that hold nothing and are not wanted.
    """
    scaling = scale_roles(spec, facts)
    target = Counts() if spec.suspend else Counts(scaling.prefill.replicas, scaling.decode.replicas)
    stable = _stable(facts, memory)
    memory = _carried(memory._replace(answering=_answering(memory, facts)), update, facts, now)
    goal = _goal(spec, memory, stable, update)
    memory = _progressed(memory, facts.counted(goal, target), goal, target, now)
    step = _step(spec, target, goal, stable, facts, memory.answering)
    memory, look_in = _judged(spec, memory, facts.awaited(goal, target), goal, stable, step, now)
    if (goal_now := _goal(spec, memory, stable, update)) != goal:
        goal = goal_now
        memory = _begun(memory, facts.counted(goal, target), goal, target)
        step = _step(spec, target, goal, stable, facts, memory.answering)
        awaited = facts.awaited(goal, target)
        memory, look_in = _judged(spec, memory, awaited, goal, stable, step, now)
    current = _current(step, goal, stable, facts, target)
    memory = memory._replace(has_returned=_has_returned(memory, goal, step))
    if step.phase is Phase.COMPLETE and goal == update:  # late, but with nothing to go back to
        memory = memory._replace(failed="")
    return Plan(
        scaling=scaling,
        target=target,
        update=update,
        goal=goal,
        is_late=goal != update and _is_late(spec, memory),
        current=current,
        gateway=_gateway(spec, facts, goal, stable, target),
        step=step,
        memory=memory._replace(current=current),
        retired=_retired(facts, step, keep={goal, current}),
        look_in=_until_gateways_left(look_in, facts),
        asked={r: w.replicas for r in WORKER_ROLES if (w := _wanted(spec, r, facts)).is_external},
        turn=facts.turn,
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


def _carried(memory: Memory, update: str, facts: Facts, now: float) -> Memory:
    if memory.update == update:
        return memory
    is_upgrade = facts.turn.is_upgrade
    return Memory(
        memory.current,
        update,
        progress_at=now,
        is_upgrade=is_upgrade,
        answering=memory.answering,
    )


def _answering(memory: Memory, facts: Facts) -> str:
    """Return the revision that gateways send to until every pod of theirs is of another."""
    gateways = facts.gateways
    if gateways is None or (memory.answering and not gateways.are_one):
        return memory.answering
    return gateways.revision


def _step(
    spec: PDDeploymentSpec, target: Counts, goal: str, stable: str, facts: Facts, answering: str
) -> Step:
    return next_step(
        Rollout(
            target=target,
            goal=goal,
            stable=stable or goal,
            revisions=facts.revisions,
            budget=_budget(spec),
            partition_pairs=spec.rollout.partition,
            is_paused=spec.rollout.paused,
            answering=answering,
            countable_pairs=countable_pairs(facts.gateways, goal, facts.revisions, target),
        )
    )


def _judged(
    spec: PDDeploymentSpec,
    memory: Memory,
    facts: Facts,
    goal: str,
    stable: str,
    step: Step,
    now: float,
) -> tuple[Memory, float | None]:
    """Return the memory with the deadline judged of what is rolled to, and when to look again.

    A step that asks for pods is not waited for yet: that is the operator's own doing, or not doing.
    What has failed and is kept is not judged again, nor what was rolled out and lives alone. A
    rollback that is late stays so until it gets on: nothing is left to turn to.
    """
    is_return = goal != memory.update
    if is_return and memory.has_returned:
        return memory._replace(waited=Waited()), None
    is_alone = not any(r.is_live for r in facts.revisions if r.name != goal)
    if not is_return and (memory.failed == goal or (stable == goal and is_alone)):
        return memory._replace(waited=Waited()), None
    if is_return and _is_late(spec, memory):
        return memory._replace(waited=memory.waited._replace(since=0)), None
    ours = facts.named(goal)
    wanted = step.wanted.get(goal, Counts())
    is_moving = step.phase is Phase.PROGRESSING and not spec.rollout.paused
    missing = ours.desired.capped(wanted).less(ours.ready)
    is_waiting = is_moving and not missing.is_zero and ours.name not in facts.awaiting_room
    deadline = spec.rollout.deadline_seconds
    verdict = charged(memory.waited, deadline, now, is_waiting=is_waiting)
    if is_waiting and verdict.left_seconds <= 0:
        if is_return:
            return memory._replace(waited=Waited(deadline)), None
        return memory._replace(failed=goal, waited=Waited()), None
    look_in = verdict.look_in_seconds
    if look_in is None and is_moving and not wanted.less(ours.ready).is_zero:
        look_in = piece_seconds(deadline)
    return memory._replace(waited=verdict.waited), look_in


def _has_returned(memory: Memory, goal: str, step: Step) -> bool:
    """Return whether this is a rollback that has ended, in this step or before."""
    return goal != memory.update and (memory.has_returned or step.phase is Phase.COMPLETE)


def _is_late(spec: PDDeploymentSpec, memory: Memory) -> bool:
    """Whether a rollback, where this is one, has waited for its deadline."""
    return memory.waited.seconds >= spec.rollout.deadline_seconds


def _until_gateways_left(look_in: float | None, facts: Facts) -> float | None:
    """Return when to look again, at the latest when gateways that leave are waited for no more: of
    one on a lost node nothing will be told.
    """
    if facts.gateways is None or not facts.gateways.others_leave_in:
        return look_in
    left = facts.gateways.others_leave_in
    return left if look_in is None else min(look_in, left)


def _goal(spec: PDDeploymentSpec, memory: Memory, stable: str, update: str) -> str:
    can_return = stable not in ("", update) and spec.rollout.auto_rollback
    return stable if memory.failed == update and can_return else update


def _begun(memory: Memory, facts: Facts, goal: str, target: Counts) -> Memory:
    """Return the memory where a rollout turns to another goal: its time and pairs begin anew."""
    pairs = served_pairs(usable(facts.named(goal)), target)
    return memory._replace(reached=pairs, waited=Waited())


def _progressed(memory: Memory, facts: Facts, goal: str, target: Counts, now: float) -> Memory:
    """Return the memory after what the goal serves now.

    Pods that are all ready end a wait as well, and so does a target of none: what is waited for
    next, after an eviction, a suspension or with another partition, is waited for from the
    beginning.
    """
    ours = facts.named(goal)
    pairs = served_pairs(usable(ours), target)
    if pairs > memory.reached:
        return memory._replace(reached=pairs, progress_at=now, waited=Waited())
    is_at_rest = target.is_zero or (ours.is_live and ours.desired.less(ours.ready).is_zero)
    return memory._replace(reached=pairs, waited=Waited()) if is_at_rest else memory


def _current(step: Step, goal: str, stable: str, facts: Facts, target: Counts) -> str:
    """Return the goal once it alone serves everything; until then what was stable.

    Where nothing was, a revision that serves some pairs: one whose pods never got ready, as of a
    first spec that was wrong, is nothing to return to from the one that mends it.
    """
    if step.phase is Phase.COMPLETE:
        return goal
    if stable:
        return stable
    others = [r for r in facts.revisions if r.name != goal]
    return next((r.name for r in others if served_pairs(usable(r), target)), "")


def _gateway(spec: PDDeploymentSpec, facts: Facts, goal: str, stable: str, target: Counts) -> str:
    """Return the revision for the gateways; in a pause they come to a new one only in need.

    A partition that leaves the goal less than half takes them back: its last pair cannot go while
    they send to it.
    """
    present = facts.gateways.revision if facts.gateways else ""
    is_kept_small = 2 * spec.rollout.partition > pairs_of(target)
    aim = stable if stable and is_kept_small else goal
    aim = present if present and spec.rollout.paused else aim
    return gateway_revision(present, aim, facts.revisions, target)


def _retired(facts: Facts, step: Step, keep: set[str]) -> tuple[str, ...]:
    return tuple(
        revision.name
        for revision in facts.revisions
        if not revision.is_live
        and revision.name not in keep
        and step.wanted.get(revision.name, Counts()).is_zero
    )
