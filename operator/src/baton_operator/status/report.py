"""What the API shows of a pass: status of the PDDeployment, and Events.

Written only when something changed; counts alone at most once an interval, so that a rollout of a
hundred pods is not a hundred writes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from baton_operator.cluster.api import PD_DEPLOYMENT, ApiError, KubeApi
from baton_operator.cluster.observe import Observed
from baton_operator.cluster.parents import Invalid, ParentStore
from baton_operator.models import ObjectKey, PDDeployment
from baton_operator.planning.plan import Plan
from baton_operator.pods.samples import Sample
from baton_operator.status import events
from baton_operator.status.leaving import leaving_status
from baton_operator.status.status import Trouble, deployment_status, invalid_status

log = logging.getLogger(__name__)

Json = dict[str, Any]


_URGENT = ("failedRevision", "isGatewayUpgrade")
"""Of a rollout: what is to be known at once, or by a successor."""


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
        """Write what changed; return seconds until a held-back write is due, or None."""
        now = self._now()
        status = deployment_status(pdd, plan, seen, trouble, sample, now)
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

    async def leaving(self, pdd: PDDeployment, seen: Observed) -> None:
        """Report what is left of an object that is being deleted, unless it has gone meanwhile."""
        patch = merge_patch(pdd.status, leaving_status(pdd, seen, self._now()))
        if not patch:
            return
        try:
            await self._write(pdd.key, pdd.uid, patch)
        except ApiError as error:
            if error.status not in (HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT):
                raise

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
    if any(before.get(k) != after.get(k) for k in _URGENT):
        return True
    return _truths(old, ("Ready", "Stalled")) != _truths(new, ("Ready", "Stalled"))


def _truths(status: Json, types: tuple[str, ...]) -> dict[str, str]:
    conditions = status.get("conditions") or []
    return {c["type"]: c["status"] for c in conditions if c["type"] in types}
