"""The status of a PDDeployment, computed from plan and observation. Pure; written by `report`.

Ready, Reconciling and Stalled follow kstatus, so that `helm --wait`, Argo CD and Flux understand
them. Unknown means not observed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from baton_operator.cluster.observe import Observed
from baton_operator.models import PDDeployment, PDDeploymentSpec
from baton_operator.names import WORKER_ROLES, Role
from baton_operator.planning.deadline import Waited
from baton_operator.planning.gateways import Gateways
from baton_operator.planning.pairs import Counts, served_pairs, usable
from baton_operator.planning.plan import Memory, Plan
from baton_operator.planning.rollout import Phase
from baton_operator.pods.samples import Sample
from baton_operator.status import causes
from baton_operator.status.conditions import (
    Condition,
    Truth,
    merge_conditions,
    timestamp,
    unix_seconds,
)
from baton_operator.status.handoff import handoff_condition, handoff_status

_LATE = "RollbackDeadlineExceeded"
_RETURNED = "RolledBack"
"""The phase by which the next pass knows that the rollback has ended."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """What keeps reconciling from its goal: children of others, failed writes.

    `leaving` are being deleted, or an earlier PDDeployment of this name left them; `refused` are
    those of `failed` that come back as long as spec and cluster are as they are.
    """

    foreign: tuple[str, ...] = ()
    leaving: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    invalid: str = ""


def read_memory(status: dict[str, Any]) -> Memory:
    """Return what the last status says about the rollout; unreadable parts count as absent."""
    rollout = status.get("rollout") or {}
    return Memory(
        current=status.get("currentRevision", ""),
        update=status.get("updateRevision", ""),
        failed=rollout.get("failedRevision", ""),
        reached=rollout.get("reached", 0),
        progress_at=_time(rollout, "progressTime"),
        is_upgrade=rollout.get("isUpgrade", False),
        is_gateway_upgrade=rollout.get("isGatewayUpgrade", False),
        answering=rollout.get("answeringRevision", ""),
        waited=Waited(rollout.get("waitedSeconds", 0), int(_time(rollout, "waitingSince"))),
        has_returned=rollout.get("phase") == _RETURNED,
    )


def read_asked(status: dict[str, Any]) -> dict[Role, int]:
    """Return the replicas that scalers last asked for, by role; unknown roles are left out."""
    told = {role["name"]: role["asked"] for role in status.get("roles") or [] if "asked" in role}
    return {role: told[role] for role in WORKER_ROLES if role in told}


def _time(fields: dict[str, Any], name: str) -> float:
    try:
        return unix_seconds(fields.get(name, ""))
    except ValueError:
        return 0.0


def deployment_status(
    pdd: PDDeployment,
    plan: Plan,
    seen: Observed,
    trouble: Trouble,
    sample: Sample,
    now: float,
) -> dict[str, Any]:
    """Return the whole status."""
    ready, existing = seen.ready(), seen.existing()
    updated = next((r.existing for r in seen.revisions if r.name == plan.update), Counts())
    rollout = _rollout(plan, seen, pdd.status.get("rollout") or {})
    conditions = [
        *_conditions(pdd.spec, plan, seen, trouble, rollout.get("failedReason", "")),
        *handoff_condition(pdd.spec, sample.kv),
    ]
    roles = [
        {"name": role.value, "desired": d, "replicas": e, "ready": r, "updated": u}
        | ({"asked": plan.asked[role]} if role in plan.asked else {})
        for role, d, e, r, u in zip(
            WORKER_ROLES, plan.target, existing, ready, updated, strict=True
        )
    ]
    return {
        "observedGeneration": pdd.generation,
        "currentRevision": plan.current,
        "updateRevision": plan.update,
        **({"gatewayRevision": seen.gateway_revision} if seen.gateway_revision else {}),
        "ready": next(c.status.value for c in conditions if c.type == "Ready"),
        "prefill": f"{ready.prefill}/{plan.target.prefill}",
        "decode": f"{ready.decode}/{plan.target.decode}",
        "roles": roles,
        "rollout": rollout,
        **_told(sample),
        **handoff_status(pdd.spec, sample.kv),
        "conditions": merge_conditions(
            pdd.status.get("conditions") or [], conditions, pdd.generation, now
        ),
    }


def _told(sample: Sample) -> dict[str, Any]:
    """Return what pods say of themselves; what is not known is left out."""
    told: dict[str, Any] = {}
    if sample.wire:
        told["wire"] = {"range": sample.wire, "configHash": sample.config_hash}
    if sample.acceptance is not None:
        told["speculative"] = {"acceptance": f"{sample.acceptance:.2f}"}
    return told


def invalid_status(
    status: dict[str, Any], generation: int, message: str, now: float
) -> dict[str, Any]:
    """Return the status of a spec that cannot be served; what runs goes on as it is."""
    conditions = [
        Condition("Ready", Truth.FALSE, "InvalidSpec", message),
        Condition("Reconciling", Truth.FALSE, "InvalidSpec", message),
        Condition("Stalled", Truth.TRUE, "InvalidSpec", message),
        Condition("SpecValid", Truth.FALSE, "InvalidSpec", message),
    ]
    kept = {key: value for key, value in status.items() if key != "conditions"}
    return kept | {
        "observedGeneration": generation,
        "ready": "False",
        "conditions": merge_conditions(status.get("conditions") or [], conditions, generation, now),
    }


def _rollout(plan: Plan, seen: Observed, before: dict[str, Any]) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "phase": _phase(plan),
        "step": plan.step.pairs_new,
        "steps": plan.step.pairs,
        "reached": plan.memory.reached,
    }
    if plan.memory.failed:
        entry["failedRevision"] = plan.memory.failed
        if why := causes.of_failure(seen, plan.memory.failed, before):
            entry["failedReason"] = why
    if plan.memory.progress_at:
        entry["progressTime"] = timestamp(plan.memory.progress_at)
    if plan.memory.is_upgrade and plan.current != plan.update:
        entry["isUpgrade"] = True
    if plan.memory.is_gateway_upgrade and seen.gateway is not None and not seen.gateway.is_rolled:
        entry["isGatewayUpgrade"] = True
    answering = plan.memory.answering
    is_over = plan.step.phase is Phase.COMPLETE
    if answering and not (is_over and _are_of(answering, seen.gateways)):
        entry["answeringRevision"] = answering
    if plan.turn.waiting:
        entry["waitingRevision"] = plan.turn.waiting
    if plan.memory.waited.seconds:
        entry["waitedSeconds"] = plan.memory.waited.seconds
    if plan.memory.waited.since:
        entry["waitingSince"] = timestamp(plan.memory.waited.since)
    return entry


def _phase(plan: Plan) -> str:
    if plan.is_late:
        return "RollbackFailed"
    if plan.is_rolled_back:
        return _RETURNED if plan.memory.has_returned else "RollingBack"
    return "Failed" if plan.has_failed else plan.step.phase.value


def _are_of(revision: str, gateways: Gateways | None) -> bool:
    return gateways is not None and gateways.revision == revision and gateways.are_one


def _conditions(
    spec: PDDeploymentSpec, plan: Plan, seen: Observed, trouble: Trouble, why_failed: str
) -> list[Condition]:
    parts = [*_roles(plan, seen), _gateway(spec, plan, seen)]
    stalled = _stalled(plan, seen, trouble, why_failed)
    ready = _ready(spec, plan, parts, trouble)
    return [
        ready,
        _reconciling(plan, seen, ready, stalled, trouble),
        stalled,
        *parts,
        _progressing(plan),
        Condition("SpecValid", Truth.TRUE, "Valid"),
        _capacity(seen),
        _pods(seen),
        _refused(seen),
        _ratio(plan),
    ]


def _ready(
    spec: PDDeploymentSpec, plan: Plan, parts: Sequence[Condition], trouble: Trouble
) -> Condition:
    if spec.suspend:
        return Condition("Ready", Truth.FALSE, "Suspended", "spec.suspend is true")
    broken = _broken(trouble)
    if broken is not None:
        return Condition("Ready", Truth.FALSE, *broken)
    waiting = [part for part in parts if part.status is not Truth.TRUE]
    if waiting:  # what the server refuses may be why, and people look here first
        message = "; ".join((waiting[0].message, *trouble.refused, *_to_go(trouble)))
        return Condition("Ready", Truth.FALSE, waiting[0].reason, message)
    pairs = plan.step.pairs
    return Condition("Ready", Truth.TRUE, "PairsServing", f"{pairs} pair{'s' * (pairs != 1)}")


def _to_go(trouble: Trouble) -> list[str]:
    """Return what must be gone before it is made again: a finalizer may hold it for ever."""
    return [f"waits until these are gone: {', '.join(trouble.leaving)}"] if trouble.leaving else []


def _broken(trouble: Trouble) -> tuple[str, str] | None:
    """Return reason and message of what only a person can mend."""
    if trouble.foreign:
        names = ", ".join(trouble.foreign)
        return "Conflict", f"not controlled by this PDDeployment, left alone: {names}"
    return None


def _reconciling(
    plan: Plan, seen: Observed, ready: Condition, stalled: Condition, trouble: Trouble
) -> Condition:
    if trouble.failed and stalled.status is Truth.FALSE:
        return Condition("Reconciling", Truth.TRUE, "WriteFailed", "; ".join(trouble.failed))
    if stalled.status is Truth.TRUE:
        return Condition("Reconciling", Truth.FALSE, stalled.reason, stalled.message)
    if plan.step.phase is Phase.PAUSED:
        held = f"rollout.paused is true; {_progress(plan)}"
        return Condition("Reconciling", Truth.FALSE, "Paused", held)
    if ready.status is Truth.TRUE:
        return _rolling(plan, seen)
    if plan.step.phase is Phase.SUSPENDED:
        return Condition("Reconciling", Truth.FALSE, "UpToDate")
    return Condition("Reconciling", Truth.TRUE, ready.reason, ready.message)


def _rolling(plan: Plan, seen: Observed) -> Condition:
    """Return what still changes while every role serves."""
    if plan.step.phase is Phase.PROGRESSING:
        message = "; ".join(filter(None, (_progress(plan), _gateways(seen) or _leaving(seen))))
        message = _with_cause(message, seen)
        return Condition("Reconciling", Truth.TRUE, "Progressing", message)
    if message := _gateways(seen):
        message = _with_cause(message, seen, Role.GATEWAY)
        return Condition("Reconciling", Truth.TRUE, "GatewayRolling", message)
    if plan.turn.why:
        return Condition("Reconciling", Truth.FALSE, "UpgradeWaits", plan.turn.why)
    return Condition("Reconciling", Truth.FALSE, "UpToDate")


def _gateways(seen: Observed) -> str:
    """Return how far gateways are that still change, or an empty string."""
    pods = seen.gateway
    if pods is None or pods.is_rolled:
        return ""
    roll = f"gateways roll to {seen.gateway_revision}" if seen.gateway_revision else "gateways roll"
    return f"{roll}: {pods.updated} new pods and {pods.existing - pods.updated} old ones"


def _leaving(seen: Observed) -> str:
    """Return until when a rollout waits for gateways that leave, or an empty string."""
    by = seen.gateways_leave_by
    return f"old gateways end their connections, by {timestamp(by)} at latest" if by else ""


def _stalled(plan: Plan, seen: Observed, trouble: Trouble, why_failed: str) -> Condition:
    broken = _broken(trouble)
    if broken is not None:
        return Condition("Stalled", Truth.TRUE, *broken)
    if trouble.refused:
        return Condition("Stalled", Truth.TRUE, "WriteFailed", "; ".join(trouble.refused))
    if plan.has_failed:
        message = f"revision {plan.update} made no progress within its deadline"
        message = f"{message}; {why_failed}" if why_failed else message
        if plan.is_late:
            why_late = causes.of_revision(seen, plan.goal)
            parts = (message, f"nor did the rollback, {_progress(plan)}", why_late)
            message = "; ".join(filter(None, parts))
            return Condition("Stalled", Truth.TRUE, _LATE, message)
        return Condition("Stalled", Truth.TRUE, "ProgressDeadlineExceeded", message)
    return Condition("Stalled", Truth.FALSE, "Moving")


def _roles(plan: Plan, seen: Observed) -> list[Condition]:
    return [
        _available(role, have, want, seen)
        for role, have, want in zip(WORKER_ROLES, seen.ready(), plan.target, strict=True)
    ]


def _gateway(spec: PDDeploymentSpec, plan: Plan, seen: Observed) -> Condition:
    if seen.gateway is None:
        return Condition("GatewayReady", Truth.UNKNOWN, "NotObserved", "no gateway Deployment yet")
    serving = [r.name for r in seen.revisions if served_pairs(usable(r), plan.target)]
    if serving and seen.gateway_revision and seen.gateway_revision not in serving:
        message = f"gateways are of {seen.gateway_revision}, workers of {', '.join(serving)}"
        return Condition("GatewayReady", Truth.FALSE, "GatewayOfAnotherRevision", message)
    return _available(Role.GATEWAY, seen.gateway.ready, spec.gateway.replicas, seen)


def _available(role: Role, have: int, want: int, seen: Observed) -> Condition:
    name, message = role.value.capitalize(), f"{have} of {want} ready"
    if have >= want:
        return Condition(f"{name}Ready", Truth.TRUE, "AllReady", message)
    message = _with_cause(message, seen, role)
    return Condition(f"{name}Ready", Truth.FALSE, f"{name}NotReady", message)


def _with_cause(message: str, seen: Observed, role: Role | None = None) -> str:
    """Return a message with what keeps pods from running, or from existing, when something does."""
    cause = causes.of_role(seen, role)
    return f"{message}; {cause}" if cause else message


def _progress(plan: Plan) -> str:
    return f"{plan.step.pairs_new} of {plan.step.pairs} pairs on {plan.goal}"


def _progressing(plan: Plan) -> Condition:
    step, message = plan.step, _progress(plan)
    if plan.is_late:
        return Condition("Progressing", Truth.FALSE, _LATE, message)
    if plan.is_rolled_back:
        return Condition("Progressing", Truth.FALSE, "RolledBack", message)
    if plan.has_failed:
        return Condition("Progressing", Truth.FALSE, "ProgressDeadlineExceeded", message)
    is_moving = step.phase in (Phase.PROGRESSING, Phase.COMPLETE)
    return Condition("Progressing", Truth.of(is_moving), step.phase.value, message)


def _capacity(seen: Observed) -> Condition:
    blocked = seen.blocked()
    if blocked:
        return Condition("CapacityBlocked", Truth.TRUE, "Unschedulable", blocked)
    return Condition("CapacityBlocked", Truth.FALSE, "Scheduled")


def _pods(seen: Observed) -> Condition:
    pod = seen.failing_pod()
    if pod is None or pod.view.pod_failure is None:
        return Condition("PodsFailing", Truth.FALSE, "NoneFailing")
    return Condition("PodsFailing", Truth.TRUE, pod.view.pod_failure.reason, causes.of_pod(pod))


def _refused(seen: Observed) -> Condition:
    refusal = seen.refusal()
    if not refusal:
        return Condition("PodsRefused", Truth.FALSE, "NoneRefused")
    return Condition("PodsRefused", Truth.TRUE, "FailedCreate", refusal)


def _ratio(plan: Plan) -> Condition:
    scaling = plan.scaling
    message = f"{scaling.prefill.replicas} prefill to {scaling.decode.replicas} decode"
    if not scaling.is_ratio_kept:
        return Condition("RatioSatisfied", Truth.FALSE, "OutOfBounds", message)
    clamped = scaling.prefill.clamped_by or scaling.decode.clamped_by
    return Condition("RatioSatisfied", Truth.TRUE, "Clamped" if clamped else "InBounds", message)
