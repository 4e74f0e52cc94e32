"""Workloads: a Deployment for each revision's role, and the gateway's; and what scales a role.

A worker Deployment's pod template never changes after creation: a change is another revision with
another name, and only the planner moves replicas between them.
"""

from __future__ import annotations

from baton_operator import names
from baton_operator.children.resources.meta import Manifest, Owner, manifest, selector_labels
from baton_operator.models import PDDeploymentSpec
from baton_operator.names import API_VERSION, Role

_PAUSED = False
"""Said, so that `kubectl rollout pause` of a child does not stay: gateways would keep old pods, and
a rollout would wait for new ones until its deadline. `rollout.paused` is the way to pause.
"""


def worker_workload(
    owner: Owner,
    spec: PDDeploymentSpec,
    kind: Role,
    revision: str,
    template: Manifest,
    replicas: int,
) -> Manifest:
    """Return the workload of one role, or of the pairs, of one revision."""
    return manifest(
        owner,
        "apps/v1",
        "Deployment",
        names.workload(owner.name, revision, kind),
        role=kind,
        revision=revision,
        spec={
            "replicas": replicas,
            "paused": _PAUSED,
            "revisionHistoryLimit": 0,
            "minReadySeconds": spec.rollout.min_ready_seconds,
            "progressDeadlineSeconds": spec.rollout.deadline_seconds,
            "selector": {"matchLabels": selector_labels(owner.name, kind, revision)},
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1},
            },
            "template": template,
        },
    )


def gateway_workload(
    owner: Owner, spec: PDDeploymentSpec, template: Manifest, revision: str
) -> Manifest:
    """Return the gateway's Deployment.

    Its label alone names the revision: pods that need not change for a new one stay.
    """
    return manifest(
        owner,
        "apps/v1",
        "Deployment",
        names.gateway(owner.name),
        role=Role.GATEWAY,
        revision=revision,
        spec={
            "replicas": spec.gateway.replicas,
            "paused": _PAUSED,
            "revisionHistoryLimit": 1,
            "progressDeadlineSeconds": spec.rollout.deadline_seconds,
            "selector": {"matchLabels": selector_labels(owner.name, Role.GATEWAY)},
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0},
            },
            "template": template,
        },
    )


def role_scaler(owner: Owner, kind: Role) -> Manifest:
    """Return the scaler of an External role, or of pairs, without replicas: others own those."""
    return manifest(
        owner,
        API_VERSION,
        "PDRoleScaler",
        names.of_role(owner.name, kind),
        role=kind,
        spec={"targetRef": {"name": owner.name, "role": kind.value}},
    )
