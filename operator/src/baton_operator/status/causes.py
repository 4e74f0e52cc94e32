"""What keeps pods from serving, as a line for people: of a role now, of a revision as it failed.

Pure.
"""

from __future__ import annotations

from typing import Any

from baton_operator.cluster.observe import Observed, PodRef
from baton_operator.names import Role

_MOST_CHARACTERS = 2048
"""Of the cause of a failure, as the schema of a status has it."""


def of_pod(pod: PodRef) -> str:
    """Return what keeps a pod from running, or an empty string."""
    failure = pod.view.pod_failure
    return f"pod {pod.name}: {failure.reason}: {failure.message}" if failure is not None else ""


def of_role(seen: Observed, role: Role | None = None) -> str:
    """Return what keeps pods of a role, or any, from running or existing, or an empty string."""
    pod = seen.failing_pod(role)
    return seen.refusal(role) if pod is None else of_pod(pod)


def of_failure(seen: Observed, revision: str, rollout: dict[str, Any]) -> str:
    """Return why a revision failed: what the `rollout` of the last status says of it, or where it
    fails just now, what is seen. Its pods may be gone a moment later.
    """
    if rollout.get("failedRevision") == revision:
        return str(rollout.get("failedReason", ""))
    return of_revision(seen, revision)[:_MOST_CHARACTERS]


def of_revision(seen: Observed, revision: str) -> str:
    """Return what keeps its own pods from serving, else what keeps those of no revision, which
    gateways are: what another revision's suffer is no reason of this one's.
    """
    able = (p for p in seen.pods if p.revision in (revision, "") and not p.view.is_deleting)
    pods = sorted(able, key=lambda pod: (not pod.revision, pod.name))
    refused = (f"{w.child.name}: {w.counts.refusal}" for w in seen.workloads
               if w.revision == revision and w.counts.refusal)  # fmt: skip
    blocked = (f"pod {pod.name}: Unschedulable: {pod.view.blocked}" for pod in pods
               if pod.view.blocked)  # fmt: skip
    own = next(filter(None, (*map(of_pod, pods), *refused, *blocked)), "")
    return own or seen.refusal(Role.GATEWAY)
