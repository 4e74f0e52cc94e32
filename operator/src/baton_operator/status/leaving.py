"""The status of a PDDeployment that is deleted and still there: foreground deletion waits for pods,
which may drain for minutes, and nothing is made again meanwhile. Pure.
"""

from __future__ import annotations

from typing import Any

from baton_operator.cluster.observe import Observed
from baton_operator.models import PDDeployment
from baton_operator.names import WORKER_ROLES
from baton_operator.status.conditions import Condition, Truth, merge_conditions

_REASON = "Deleted"


def leaving_status(pdd: PDDeployment, seen: Observed, now: float) -> dict[str, Any]:
    """Return the last status, or what is true once less is ready than that says.

    One that somebody's finalizer holds before anything of it is deleted serves on as it was.
    """
    status = pdd.status
    ready = dict(zip(WORKER_ROLES, seen.ready(), strict=True))
    told = {role["name"]: role.get("ready", 0) for role in status.get("roles") or []}
    has_gateway = seen.gateway is not None and seen.gateway.ready > 0
    if has_gateway and all(ready[role] >= told.get(role, 0) for role in WORKER_ROLES):
        return status
    counts = ", ".join(f"{count} {role} pods ready" for role, count in ready.items())
    message = f"it is being deleted, and waits for its pods to end; {counts}"
    conditions = [
        Condition("Ready", Truth.FALSE, _REASON, message),
        Condition("Reconciling", Truth.TRUE, _REASON, message),
        Condition("Stalled", Truth.FALSE, _REASON),
    ]
    before = status.get("conditions") or []
    return status | {
        "observedGeneration": pdd.generation,
        "ready": Truth.FALSE.value,
        "roles": [_role(role, ready.get(role["name"], 0)) for role in status.get("roles") or []],
        **{role.value: f"{count}/0" for role, count in ready.items()},
        "conditions": merge_conditions(before, conditions, pdd.generation, now),
    }


def _role(told: dict[str, Any], ready: int) -> dict[str, Any]:
    return told | {"desired": 0, "ready": ready}
