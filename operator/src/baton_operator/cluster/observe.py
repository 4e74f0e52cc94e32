"""From the child store to the facts that planning and status need, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import msgspec

from baton_operator import names
from baton_operator.cluster.partial_objects import Child, PodView, ScalerView, Workload
from baton_operator.cluster.store import ChildId, ChildStore
from baton_operator.models import ObjectKey
from baton_operator.names import WORKER_ROLES, Role
from baton_operator.planning.gateways import Gateways
from baton_operator.planning.pairs import Counts, Revision, total

GRACE_ALLOWANCE_SECONDS = 30.0
"""How much later than its grace period a pod may be seen to end, by a kubelet's own pace. Who is
there longer is on a node that nobody hears of, and is not waited for.

It is counted from when this process learnt that the pod leaves, by seconds that nobody sets: the
server's clock, which says when the grace ends, may be another than ours. A new leader counts anew.
"""

_QUOTA = "exceeded quota"
"""The server's words when a ResourceQuota has no room for a pod."""


class WorkloadRef(NamedTuple):
    """A worker workload that exists."""

    child_id: ChildId
    child: Child
    role: Role
    revision: str
    counts: Workload


class PodRef(NamedTuple):
    """A pod that exists; one that leaves is waited for `wait_seconds` more, if they are any."""

    name: str
    role: str
    revision: str
    view: PodView
    wait_seconds: float = 0.0


@dataclass(frozen=True)
class Observed:
    """Everything that matters and exists of one PDDeployment; `version` is the store's."""

    workloads: tuple[WorkloadRef, ...] = ()
    gateway: Workload | None = None
    gateway_revision: str = ""
    gateway_made_from: str = ""
    gateway_files: tuple[Child, ...] = ()
    scalers: tuple[ScalerView, ...] = ()
    pods: tuple[PodRef, ...] = ()
    records: tuple[Child, ...] = ()
    leaving: tuple[ChildId, ...] = ()
    version: int = 0

    @cached_property
    def revisions(self) -> tuple[Revision, ...]:
        """The counts by revision, in order of name."""
        names = sorted({w.revision for w in self.workloads})
        return tuple(self._revision(name) for name in names)

    @cached_property
    def gateways(self) -> Gateways | None:
        """What the gateways are of, or None when there are none.

        A pod that leaves is unready at once, and serves who is connected to it until nobody is; its
        Deployment counts it no more. Pods may be known later than the Deployment's counts: those of
        two templates that are both to stay are not all new, whatever it counts.
        """
        if self.gateway is None:
            return None
        return Gateways(
            self.gateway_revision,
            is_rolled=self.gateway.is_rolled and len(self._templates) <= 1,
            others_leave_in=max((pod.wait_seconds for pod in self._leaving_gateways), default=0.0),
        )

    @cached_property
    def gateways_leave_by(self) -> float:
        """Until when (unix seconds, by the server's clock) gateways that leave are waited for; 0
        for none.
        """
        if self.gateway is None:
            return 0.0
        ends = (pod.view.grace_ends_at for pod in self._leaving_gateways)
        return max((end + GRACE_ALLOWANCE_SECONDS for end in ends), default=0.0)

    def scaler(self, role: Role) -> ScalerView | None:
        """Return the role's scaler, or that of its pairs, or None."""
        return next((s for s in self.scalers if s.role in (role, Role.PAIR)), None)

    def ready(self) -> Counts:
        """Return ready worker pods over all revisions."""
        return total(revision.ready for revision in self.revisions)

    def existing(self) -> Counts:
        """Return worker pods over all revisions that have not begun to terminate."""
        return total(revision.existing for revision in self.revisions)

    def blocked(self) -> str:
        """Return what the scheduler says about a pod without room, or an empty string."""
        return next((p.view.blocked for p in self.pods if p.view.blocked), "")

    def awaiting_room(self) -> frozenset[str]:
        """Return revisions with pods that find no room while other workers are still leaving.

        Pods that leave hold their place, for as long as they drain: who waits for it is not late.
        """
        if not any(p.view.is_deleting for p in self.pods if p.role != Role.GATEWAY):
            return frozenset()
        blocked = {p.revision for p in self.pods if p.view.blocked}
        refused = {w.revision for w in self.workloads if _QUOTA in w.counts.refusal}
        return frozenset(blocked | refused)

    def refusal(self, role: Role | None = None) -> str:
        """Return whose pods the server does not let in, and its words; of a role, or any."""
        asked = [(w.child.name, w.counts) for w in self.workloads if _has(w.role, role)]
        if self.gateway is not None and role in (None, Role.GATEWAY):
            asked.append(("the gateway's Deployment", self.gateway))
        told = (f"{name}: {counts.refusal}" for name, counts in asked if counts.refusal)
        return next(told, "")

    def failing_pod(self, role: Role | None = None) -> PodRef | None:
        """Return the first pod, by name, that something keeps from running; of a role, or any."""
        failing = (
            pod
            for pod in self.pods
            if pod.view.pod_failure and not pod.view.is_deleting and _has(pod.role, role)
        )
        return min(failing, key=lambda pod: pod.name, default=None)

    @cached_property
    def _gateway_pods(self) -> list[PodRef]:
        """Gateways' pods that have not ended."""
        return [pod for pod in self.pods if pod.role == Role.GATEWAY and not pod.view.has_ended]

    @cached_property
    def _templates(self) -> set[str]:
        """What gateways that are to stay are made from."""
        views = (pod.view for pod in self._gateway_pods)
        return {view.template for view in views if not view.is_deleting and view.template}

    @cached_property
    def _leaving_gateways(self) -> list[PodRef]:
        """Gateways made from something else that leave, and are waited for."""
        return [
            pod
            for pod in self._gateway_pods
            if pod.view.is_deleting
            and pod.view.template not in self._templates
            and pod.wait_seconds > 0
        ]

    def _revision(self, name: str) -> Revision:
        of_role = {w.role: w.counts for w in self.workloads if w.revision == name}
        none = Workload(0, 0, 0, 0)
        pairs = of_role.get(Role.PAIR, none)
        counts = [of_role.get(role, pairs) for role in WORKER_ROLES]
        return Revision(
            name,
            desired=Counts(*(c.desired for c in counts)),
            existing=Counts(*(c.existing for c in counts)),
            ready=Counts(*(min(c.ready, c.existing) for c in counts)),
        )


def observe(store: ChildStore, owner: ObjectKey, uid: str) -> Observed:
    """Return what exists; children of another owner of that name do not count.

    Those that lost their owner do: the next write gives them back, or retires them.
    """
    workloads: list[WorkloadRef] = []
    gateway: Child | None = None
    gateway_files: list[Child] = []
    scalers: list[ScalerView] = []
    pods: list[PodRef] = []
    records: list[Child] = []
    leaving: list[ChildId] = []
    for key, entry in store.children(owner):
        child = entry.child
        if isinstance(child.view, PodView):
            grace = child.view.grace_seconds + GRACE_ALLOWANCE_SECONDS
            wait = grace - store.leaves_for(entry) if child.is_deleting else 0.0
            pods.append(PodRef(child.name, child.role, child.revision, child.view, wait))
            continue
        if not child.belongs_to(uid):
            continue
        if child.is_deleting:
            leaving.append(key)
        elif isinstance(child.view, ScalerView):
            scalers.append(child.view)
        elif isinstance(child.view, Workload) and child.name == names.gateway(owner.name):
            gateway = child
        elif isinstance(child.view, Workload):
            if of_workers := names.of_workload(owner.name, child.name):
                workloads.append(WorkloadRef(key, child, *of_workers, child.view))
        elif key.kind == "ConfigMap" and names.is_gateway_file(owner.name, child.name):
            gateway_files.append(child)
        elif key.kind == "ConfigMap" and (of := names.of_record(owner.name, child.name)):
            records.append(msgspec.structs.replace(child, revision=of))
    return Observed(
        workloads=tuple(workloads),
        gateway=gateway.view if gateway and isinstance(gateway.view, Workload) else None,
        gateway_revision=gateway.revision if gateway else "",
        gateway_made_from=gateway.made_from if gateway else "",
        gateway_files=tuple(gateway_files),
        scalers=tuple(scalers),
        pods=tuple(pods),
        records=tuple(records),
        leaving=tuple(leaving),
        version=store.version(owner),
    )


def _has(pod_role: str, role: Role | None) -> bool:
    """Whether a pod of a role holds a process of another, or of any."""
    return role in (None, pod_role) or (pod_role == Role.PAIR and role in WORKER_ROLES)
