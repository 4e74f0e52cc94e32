"""Who leaves when a workload shrinks: the pods with the fewest requests in flight.

The choice is pure; asking pods and marking them with a deletion cost is the edge. Kubernetes
removes pods that are not ready first and then by cost; the preStop hook drains whoever it is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from baton_operator.cluster.api import POD, ApiError, KubeApi
from baton_operator.cluster.observe import Observed, PodRef
from baton_operator.models import ObjectKey
from baton_operator.names import ANNOTATION_DELETION_COST, health_ports
from baton_operator.planning.rollout import Step

log = logging.getLogger(__name__)

VICTIM_COST = "-1000"


class PodProbe(Protocol):
    """Asks pods over the pod contract's HTTP."""

    async def remaining(self, ip: str, port: int) -> int | None:
        """Return requests and KV leases that still need the process with this health port; None
        when it does not answer.
        """
        ...


class Shrink(NamedTuple):
    """Pods of one workload, and how many of them shall leave."""

    pods: tuple[PodRef, ...]
    leaving: int


def shrinks(seen: Observed, step: Step) -> list[Shrink]:
    """Return every workload that shrinks but does not vanish; then all its pods leave anyway."""
    found = []
    for workload in seen.workloads:
        wanted = step.wanted.get(workload.revision)
        if wanted is None:
            continue
        left = wanted.of(workload.role)
        count = workload.counts.desired - left
        if count > 0 and left > 0:
            pods = tuple(
                pod
                for pod in seen.pods
                if (pod.role, pod.revision) == (workload.role, workload.revision)
                and not pod.view.is_deleting
            )
            found.append(Shrink(pods, count))
    return found


def choose_victims(
    pods: Sequence[PodRef], remaining: Sequence[int | None], count: int
) -> list[PodRef]:
    """Return who shall leave: not ready first, then who does not answer, then the least busy."""

    def order(each: tuple[PodRef, int | None]) -> tuple[bool, int, str]:
        pod, busy = each
        return (pod.view.is_ready, -1 if busy is None else busy, pod.name)

    ranked = sorted(zip(pods, remaining, strict=True), key=order)
    return [pod for pod, _ in ranked[:count]]


async def mark_victims(
    kube: KubeApi, probe: PodProbe, owner: ObjectKey, shrink: Shrink
) -> list[str]:
    """Mark who leaves, unmark who stays; return the names of those who leave.

    A mark that cannot be written costs the right choice, not the request: it is logged, and the
    pod that leaves instead drains all the same.
    """
    remaining = await asyncio.gather(*(_remaining(probe, pod) for pod in shrink.pods))
    victims = choose_victims(shrink.pods, remaining, shrink.leaving)
    leaving = {pod.name for pod in victims}
    changes = []
    for pod in shrink.pods:
        cost = VICTIM_COST if pod.name in leaving else ""
        if pod.view.deletion_cost != cost:
            changes.append(_mark(kube, owner, pod, cost))
    await asyncio.gather(*changes)
    return sorted(leaving)


async def _remaining(probe: PodProbe, pod: PodRef) -> int | None:
    """Return what still needs a pod; None when a process in it does not answer."""
    ports = health_ports(pod.role)
    told = await asyncio.gather(*(probe.remaining(pod.view.ip, port) for port in ports))
    return None if None in told else sum(filter(None, told))


async def _mark(kube: KubeApi, owner: ObjectKey, pod: PodRef, cost: str) -> None:
    patch = {"metadata": {"annotations": {ANNOTATION_DELETION_COST: cost or None}}}
    try:
        await kube.merge(POD, owner.namespace, pod.name, patch)
    except ApiError as error:
        extra = {"object": str(owner), "pod": pod.name, "error": str(error)}
        log.warning("deletion cost not set", extra=extra)
