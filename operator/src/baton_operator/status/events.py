"""Kubernetes Events on durable changes: what `kubectl describe` tells of a rollout.

One Event for each change, named by its content and the generation of the spec, so that a repeated
reconcile posts nothing twice, and who goes back to a revision is told of it again.
A lost Event harms nobody: failures are logged and counted by the API metrics, never raised.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

from baton_operator.children.revision import semantic_hash
from baton_operator.cluster.api import EVENT, AlreadyExists, ApiError, KubeApi
from baton_operator.models import PDDeployment
from baton_operator.names import API_VERSION, FIELD_MANAGER
from baton_operator.status.conditions import timestamp

log = logging.getLogger(__name__)


class Notice(NamedTuple):
    """One durable change; `is_warning` for what someone should look at."""

    reason: str
    message: str
    is_warning: bool = False


async def post(kube: KubeApi, subject: PDDeployment, notice: Notice, now: float) -> None:
    """Create the Event of a notice."""
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
    except ApiError as error:
        log.warning("event not posted", extra={"object": str(owner), "error": str(error)})
