"""The status of a PDDeployment's scalers, from which autoscalers read. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from baton_operator.children.resources.meta import selector_labels
from baton_operator.cluster.observe import Observed
from baton_operator.cluster.partial_objects import ScalerView
from baton_operator.models import PDDeployment
from baton_operator.models.placement import pod_roles
from baton_operator.names import Role, of_role
from baton_operator.planning.plan import Plan
from baton_operator.planning.scaling import Scaled

Json = dict[str, Any]


def scaler_statuses(pdd: PDDeployment, plan: Plan, seen: Observed) -> Iterator[tuple[str, Json]]:
    """Yield name and status of each scaler that does not have that yet."""
    existing = seen.existing()
    for role in pod_roles(pdd.spec.placement):
        of = Role.PREFILL if role is Role.PAIR else role
        scaler = seen.scaler(of)
        if scaler is None or of not in plan.asked:
            continue
        scaled = plan.scaling.decode if of is Role.DECODE else plan.scaling.prefill
        status = _status(pdd.key.name, role, existing.of(role), plan.target.of(role), scaled)
        if status != _written(scaler):
            yield of_role(pdd.key.name, role), status


def _status(name: str, role: Role, existing: int, target: int, scaled: Scaled) -> Json:
    labels = selector_labels(name, role)
    return {
        "replicas": existing,
        "desired": target,
        "selector": ",".join(f"{key}={value}" for key, value in labels.items()),
        "clampedBy": scaled.clamped_by.value,
    }


def _written(scaler: ScalerView) -> Json:
    return {
        "replicas": scaler.replicas,
        "desired": scaler.desired,
        "selector": scaler.selector,
        "clampedBy": scaler.clamped_by,
    }
