"""What the API shows of a pass: status of the PDDeployment and its scalers, and Events.

Written only when something changed; counts alone at most once an interval, so that a rollout of a
hundred pods is not a hundred writes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

from baton_operator.children.resources.meta import selector_labels
from baton_operator.cluster.api import PD_DEPLOYMENT, SCALER, KubeApi
from baton_operator.cluster.observe import Observed
from baton_operator.cluster.parents import Invalid, ParentStore
from baton_operator.cluster.partial_objects import ScalerView
from baton_operator.models import ObjectKey, PDDeployment
from baton_operator.models.placement import pod_roles
from baton_operator.names import Role, of_role
from baton_operator.planning.plan import Plan
from baton_operator.planning.scaling import Scaled
from baton_operator.pods.samples import Sample
from baton_operator.status import events
from baton_operator.status.status import Trouble, deployment_status, invalid_status

log = logging.getLogger(__name__)

Json = dict[str, Any]


class Reporter:
    """Writes statuses and Events; remembers when it last wrote which."""

    def __init__(
        self,
        kube: KubeApi,
        parents: ParentStore,
        now: Callable[[], float],
        interval_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        """`now` is what people are told; `clock`, seconds that nobody sets, is for intervals."""
        self._kube = kube
        self._clock = clock
        self._parents = parents
        self._now = now
        self._interval = interval_seconds
        self._written_at: dict[ObjectKey, float] = {}

    def forget(self, key: ObjectKey) -> None:
        """Forget an object that is gone."""
        self._written_at.pop(key, None)

    async def report(
        self, pdd: PDDeployment, plan: Plan, seen: Observed, trouble: Trouble, sample: Sample
    ) -> float | None:
        """Write what changed; return seconds until a held-back write is due, or None.

        The object's own comes first: a scaler that cannot be written hides nothing of it.
        """
        now = self._now()
        status = deployment_status(pdd, plan, seen, trouble, sample, now)
        wait = await self._object(pdd, status, now)
        await self._scalers(pdd, plan, seen)
        return wait

    async def _object(self, pdd: PDDeployment, status: Json, now: float) -> float | None:
        patch = merge_patch(pdd.status, status)
        if not patch:
            return None
        wait = self._written_at.get(pdd.key, -math.inf) + self._interval - self._clock()
        if wait > 0 and not _is_urgent(pdd.status, status):
            return wait
        await self._write(pdd.key, pdd.uid, patch)
        for notice in events.notices(pdd.status, status):
            log.info(
                "changed",
                extra={"object": str(pdd.key), "what": notice.reason, "why": notice.message},
            )
            await events.post(self._kube, pdd, notice, now)
        return None

    async def invalid(self, parent: Invalid) -> None:
        """Report a spec that cannot be served."""
        status = invalid_status(parent.status, parent.generation, parent.message, self._now())
        patch = merge_patch(parent.status, status)
        if patch:
            log.warning("invalid spec", extra={"object": str(parent.key), "why": parent.message})
            await self._write(parent.key, parent.uid, patch)

    async def _write(self, key: ObjectKey, uid: str, patch: Json) -> None:
        # The uid is a precondition: a new object of the same name must not get this status.
        body = {"metadata": {"uid": uid}, "status": patch}
        answer = await self._kube.merge(PD_DEPLOYMENT, key.namespace, key.name, body, "status")
        self._written_at[key] = self._clock()
        self._parents.seen(answer, is_event=False)

    async def _scalers(self, pdd: PDDeployment, plan: Plan, seen: Observed) -> None:
        existing = seen.existing()
        for role in pod_roles(pdd.spec.placement):
            of = Role.PREFILL if role is Role.PAIR else role
            scaler = seen.scaler(of)
            if scaler is None or of not in plan.asked:
                continue
            scaled = plan.scaling.decode if of is Role.DECODE else plan.scaling.prefill
            status = _scaler_status(
                pdd.key.name, role, existing.of(role), plan.target.of(role), scaled
            )
            if status != _written(scaler):
                name = of_role(pdd.key.name, role)
                await self._kube.merge(
                    SCALER, pdd.key.namespace, name, {"status": status}, "status"
                )


def merge_patch(old: Json, new: Json) -> Json:
    """Return the JSON merge patch from `old` to `new`; lists are replaced whole."""
    patch: Json = {key: None for key in old if key not in new}
    for key, value in new.items():
        before = old.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            inner = merge_patch(before, value)
            if inner:
                patch[key] = inner
        elif before != value:
            patch[key] = value
    return patch


def _is_urgent(old: Json, new: Json) -> bool:
    """Whether more than counts changed."""
    if any(
        old.get(key) != new.get(key)
        for key in ("observedGeneration", "currentRevision", "updateRevision")
    ):
        return True
    before, after = old.get("rollout") or {}, new["rollout"]
    if any(before.get(k) != after.get(k) for k in ("failedRevision", "isGatewayUpgrade")):
        return True
    return _truths(old, ("Ready", "Stalled")) != _truths(new, ("Ready", "Stalled"))


def _truths(status: Json, types: tuple[str, ...]) -> dict[str, str]:
    conditions = status.get("conditions") or []
    return {c["type"]: c["status"] for c in conditions if c["type"] in types}


def _scaler_status(name: str, role: Role, existing: int, target: int, scaled: Scaled) -> Json:
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
