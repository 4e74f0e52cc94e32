"""Kubernetes Events on durable changes: what `kubectl describe` tells of a rollout.

One Event for each change, named by its content and the generation of the spec, so that a repeated
reconcile posts nothing twice, and who goes back to a revision is told of it again.
A lost Event harms nobody: failures are logged and counted by the API metrics, and not raised, but
for the one that ends all writes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

from baton_operator.children.revision import semantic_hash
from baton_operator.cluster.api import EVENT, AlreadyExists, ApiError, KubeApi, NamespaceEnds
from baton_operator.models import PDDeployment
from baton_operator.names import API_VERSION, FIELD_MANAGER
from baton_operator.status.conditions import timestamp

log = logging.getLogger(__name__)

Json = dict[str, Any]


class Notice(NamedTuple):
    """One durable change; `is_warning` for what someone should look at."""

    reason: str
    message: str
    is_warning: bool = False


def notices(old: Json, new: Json) -> Iterator[Notice]:
    """Yield what changed for good between two statuses."""
    update, was = new.get("updateRevision", ""), old.get("updateRevision", "")
    if update and update != was:
        text = f"rolling out {update}" if not was else f"rolling out {update} in place of {was}"
        yield Notice("RolloutStarted", text)
    current = new.get("currentRevision", "")
    if current and current == update and current != old.get("currentRevision", ""):
        yield Notice("RolloutComplete", f"{current} serves every pair")
    rollout = new.get("rollout") or {}
    failed, why = rollout.get("failedRevision", ""), rollout.get("failedReason", "")
    if failed and failed != (old.get("rollout") or {}).get("failedRevision", ""):
        text = f"{failed} made no progress within its deadline"
        yield Notice("RolloutFailed", f"{text}; {why}" if why else text, True)
    if rollout.get("phase") == "RollbackFailed" != (old.get("rollout") or {}).get("phase"):
        text = f"the rollback to {current} made no progress within its deadline either"
        yield Notice("RollbackFailed", text, True)
    for kind in ("PodsRefused", "HandoffFellBack"):
        if _reason(new, kind, "True") and not _reason(old, kind, "True"):
            yield Notice(kind, _message(new, kind), True)
    reason = _reason(new, "Stalled", "True")
    if reason == "Conflict" and reason != _reason(old, "Stalled", "True"):
        yield Notice("Conflict", _message(new, "Stalled"), True)


async def post(kube: KubeApi, subject: PDDeployment, notice: Notice, now: float) -> None:
    """Create the Event of a notice.

    Raises:
        NamespaceEnds: there will be no more Events, nor anything else.
    """
    owner, uid = subject.key, subject.uid
    digest = semantic_hash([uid, subject.generation, notice.reason, notice.message])
    manifest = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{owner.name}.{digest}", "namespace": owner.namespace},
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": "PDDeployment",
            "name": owner.name,
            "namespace": owner.namespace,
            "uid": uid,
        },
        "type": "Warning" if notice.is_warning else "Normal",
        "reason": notice.reason,
        "message": notice.message,
        "firstTimestamp": timestamp(now),
        "lastTimestamp": timestamp(now),
        "count": 1,
        "source": {"component": FIELD_MANAGER},
    }
    try:
        await kube.create(EVENT, manifest, FIELD_MANAGER)
    except AlreadyExists:
        return
    except NamespaceEnds:
        raise
    except ApiError as error:
        log.warning("event not posted", extra={"object": str(owner), "error": str(error)})


def _reason(status: Json, type_: str, truth: str) -> str:
    conditions = status.get("conditions") or []
    found = (c["reason"] for c in conditions if (c["type"], c["status"]) == (type_, truth))
    return next(found, "")


def _message(status: Json, type_: str) -> str:
    conditions = status.get("conditions") or []
    return next((c["message"] for c in conditions if c["type"] == type_), "")
