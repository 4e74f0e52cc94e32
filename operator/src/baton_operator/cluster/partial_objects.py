"""What the operator reads of an object: a few fields, decoded straight from the wire.

A watched pod is tens of kilobytes and a child's spec is our own text; keeping neither is what
keeps the operator small. Owns the mapping from wire to these views, and no policy.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec

from baton_operator.cluster.pod_failures import ContainerStatus, PodFailure, pod_failure
from baton_operator.names import (
    ANNOTATION_APPLIED,
    ANNOTATION_DELETION_COST,
    ANNOTATION_MADE_FROM,
    FIELD_MANAGER,
    GROUP,
    LABEL_NAME,
    LABEL_REVISION,
    LABEL_ROLE,
    LABEL_TEMPLATE,
    PARENT_KIND,
    SEED_MANAGER,
    marks,
)


class _Wire(msgspec.Struct, frozen=True, rename="camel"):
    """Base of wire views: unknown fields are skipped without being built."""


class ManagedFields(_Wire, frozen=True):
    """Who wrote, when, through which subresource."""

    manager: str = ""
    operation: str = ""
    subresource: str = ""
    time: str = ""


class OwnerReference(_Wire, frozen=True):
    """One owner."""

    api_version: str = ""
    kind: str = ""
    name: str = ""
    uid: str = ""
    controller: bool = False


class Metadata(_Wire, frozen=True):
    """The part of object metadata that matters here."""

    name: str
    uid: str = ""
    namespace: str = ""
    resource_version: str = "0"
    generation: int = 0
    creation_timestamp: str = ""
    deletion_timestamp: datetime | None = None
    deletion_grace_period_seconds: int | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    owner_references: list[OwnerReference] = []
    managed_fields: list[ManagedFields] = []


class WireCondition(_Wire, frozen=True):
    """A condition of a pod or Deployment."""

    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""


class _TargetRef(_Wire, frozen=True):
    name: str = ""
    role: str = ""


class SpecView(_Wire, frozen=True):
    """Fields of any watched kind's spec."""

    replicas: int | None = None
    target_ref: _TargetRef | None = None


class StatusView(_Wire, frozen=True):
    """Fields of any watched kind's status."""

    observed_generation: int = 0
    replicas: int = 0
    available_replicas: int | None = None
    updated_replicas: int = 0
    phase: str = ""
    pod_ip: str = msgspec.field(name="podIP", default="")
    conditions: list[WireCondition] = []
    init_container_statuses: list[ContainerStatus] = []
    container_statuses: list[ContainerStatus] = []
    desired: int | None = None
    selector: str = ""
    clamped_by: str = ""


class PartialObject(_Wire, frozen=True):
    """An object as decoded from the wire."""

    metadata: Metadata
    spec: SpecView = SpecView()
    status: StatusView = StatusView()


class WatchEvent(msgspec.Struct, frozen=True):
    """One line of a watch stream; the object is decoded by kind or, for ERROR, as a Status."""

    type: str
    object: msgspec.Raw


class Workload(msgspec.Struct, frozen=True):
    """Counts of a Deployment. `updated`: pods of the template as it is now.

    `refusal` is what the server says to pods that it does not let in: a quota, pod security, or a
    webhook. Such pods do not exist, so nothing else tells of them.
    """

    desired: int
    existing: int
    ready: int
    updated: int
    refusal: str = ""

    @property
    def is_rolled(self) -> bool:
        """Whether every pod is of the template as it is now, and as many are there as wanted."""
        return self.existing == self.updated == self.desired


class PodView(msgspec.Struct, frozen=True):
    """One pod. `blocked` is the scheduler's message when it finds no room; `pod_failure`, what
    keeps its containers from running.

    `template` is the same for pods of one Deployment and template. A pod that is deleted must have
    ended at `grace_ends_at` (unix seconds by the server's clock, 0 for another), in `grace_seconds`
    from when that was said; `has_ended`, that it has.
    """

    is_ready: bool
    is_deleting: bool
    ip: str
    blocked: str
    deletion_cost: str
    pod_failure: PodFailure | None = None
    template: str = ""
    grace_ends_at: float = 0.0
    grace_seconds: int = 0
    has_ended: bool = False


class ScalerView(msgspec.Struct, frozen=True):
    """A PDRoleScaler: what was asked for, and the status as written."""

    role: str
    wanted: int
    replicas: int
    desired: int | None
    selector: str
    clamped_by: str


View = Workload | PodView | ScalerView | None


class Child(msgspec.Struct, frozen=True):
    """A child as the store keeps it.

    Attributes:
        version: resourceVersion as a number; it grows with every write of the object.
        controller_uid: uid of the controlling owner, empty without one.
        parent: name of the PDDeployment that controls it, empty where none does.
        edited_at: time of the last write by someone else to what is not status; empty if none.
        created_entry: place in managedFields of what we created it with; None once applied.
        made_from: of gateways, hashes of what was asked for and of the pods that this became.
        marks: a number for the labels and notes that we give it.
    """

    name: str
    uid: str
    version: int
    generation: int
    applied_hash: str
    controller_uid: str
    edited_at: str
    is_deleting: bool
    role: str
    revision: str
    created_entry: int | None = None
    view: View = None
    made_from: str = ""
    parent: str = ""
    marks: int = 0

    def belongs_to(self, uid: str) -> bool:
        """Whether it is a child of the PDDeployment with this uid.

        One that lost its owner reference is still ours by the hash that we left on it: forgotten,
        an old revision's workload would run for ever beside the new one.
        """
        return self.controller_uid == uid or (not self.controller_uid and bool(self.applied_hash))

    def is_left_by(self, name: str, uid: str) -> bool:
        """Whether it is of another PDDeployment of this name than the one with this uid.

        A name is one object's: the other is gone, and garbage collection takes what it left.
        """
        return bool(name) and self.parent == name and self.controller_uid != uid


_decode = msgspec.json.Decoder(PartialObject).decode
decode_event = msgspec.json.Decoder(WatchEvent).decode


def decode_partial(data: bytes | msgspec.Raw) -> PartialObject:
    """Return the view of an object's JSON."""
    return _decode(data)


def partial_of(body: dict[str, Any]) -> PartialObject:
    """Return the view of an object that is decoded already."""
    return msgspec.convert(body, PartialObject)


def owner_name(partial: PartialObject) -> str:
    """Return the PDDeployment that controls it, or else that its labels name; "" for none.

    A label alone would hide who lost it: an old revision's workload would run for ever.
    """
    meta = partial.metadata
    parent = next((o.name for o in meta.owner_references if o.controller and _is_parent(o)), "")
    return parent or meta.labels.get(LABEL_NAME, "")


def _is_parent(owner: OwnerReference) -> bool:
    """Whether it is a PDDeployment of ours: another group may have a kind of that name."""
    return owner.kind == PARENT_KIND and owner.api_version.partition("/")[0] == GROUP


def child_of(partial: PartialObject, kind: str) -> Child:
    """Return what the store keeps of a child of this kind."""
    meta = partial.metadata
    controller = next((o for o in meta.owner_references if o.controller), OwnerReference())
    return Child(
        name=meta.name,
        uid=meta.uid,
        version=int(meta.resource_version or 0),
        generation=meta.generation,
        applied_hash=meta.annotations.get(ANNOTATION_APPLIED, ""),
        controller_uid=controller.uid,
        edited_at=_edited_at(meta),
        is_deleting=meta.deletion_timestamp is not None,
        role=meta.labels.get(LABEL_ROLE, ""),
        revision=meta.labels.get(LABEL_REVISION, ""),
        created_entry=_created_entry(meta),
        view=_view(partial, kind),
        made_from=meta.annotations.get(ANNOTATION_MADE_FROM, ""),
        parent=controller.name if _is_parent(controller) else "",
        marks=0 if kind == "Pod" else marks(meta.labels, meta.annotations),
    )


def _edited_at(meta: Metadata) -> str:
    ours = (FIELD_MANAGER, SEED_MANAGER)
    others = (m for m in meta.managed_fields if not m.subresource and m.manager not in ours)
    return max((m.time for m in others), default="")


def _created_entry(meta: Metadata) -> int | None:
    places = {
        entry.operation: place
        for place, entry in enumerate(meta.managed_fields)
        if entry.manager == FIELD_MANAGER and not entry.subresource
    }
    return None if "Apply" in places else places.get("Update")


def _view(partial: PartialObject, kind: str) -> View:
    if kind == "Deployment":
        return _workload(partial)
    if kind == "Pod":
        return _pod(partial)
    if kind == "PDRoleScaler":
        target = partial.spec.target_ref or _TargetRef()
        status = partial.status
        return ScalerView(
            role=target.role,
            wanted=partial.spec.replicas or 0,
            replicas=status.replicas,
            desired=status.desired,
            selector=status.selector,
            clamped_by=status.clamped_by,
        )
    return None


def _workload(partial: PartialObject) -> Workload:
    status = partial.status
    desired = 1 if partial.spec.replicas is None else partial.spec.replicas
    is_current = status.observed_generation >= partial.metadata.generation
    failures = (c for c in status.conditions if (c.type, c.status) == ("ReplicaFailure", "True"))
    refusal = next((c.message or c.reason for c in failures), "")
    return Workload(
        desired=desired,
        existing=status.replicas,
        ready=status.available_replicas or 0,
        updated=status.updated_replicas if is_current else 0,
        refusal=refusal,
    )


def _pod(partial: PartialObject) -> PodView:
    conditions = {c.type: c for c in partial.status.conditions}
    scheduled = conditions.get("PodScheduled", WireCondition())
    blocked = scheduled.message if scheduled.reason == "Unschedulable" else ""
    deleted = partial.metadata.deletion_timestamp  # the server adds the grace period to it
    return PodView(
        is_ready=conditions.get("Ready", WireCondition()).status == "True",
        is_deleting=deleted is not None,
        ip=partial.status.pod_ip,
        blocked=blocked,
        deletion_cost=partial.metadata.annotations.get(ANNOTATION_DELETION_COST, ""),
        pod_failure=pod_failure(
            [*partial.status.init_container_statuses, *partial.status.container_statuses]
        ),
        template=partial.metadata.labels.get(LABEL_TEMPLATE, ""),
        grace_ends_at=deleted.timestamp() if deleted else 0.0,
        grace_seconds=partial.metadata.deletion_grace_period_seconds or 0,
        has_ended=partial.status.phase in ("Succeeded", "Failed"),
    )
