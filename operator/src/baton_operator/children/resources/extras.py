"""Small children: the pods' ServiceAccount, role scalers, and the PodMonitor."""

from __future__ import annotations

from baton_operator import names
from baton_operator.children.resources.meta import Manifest, Owner, manifest, selector_labels
from baton_operator.models import RoleSpec
from baton_operator.names import API_VERSION, Role

POD_MONITOR_API_VERSION = "monitoring.coreos.com/v1"


def service_account(owner: Owner) -> Manifest:
    """Return the account of every pod: no permissions, no token."""
    return manifest(
        owner,
        "v1",
        "ServiceAccount",
        names.service_account(owner.name),
        automountServiceAccountToken=False,
    )


def role_scaler(owner: Owner, role: RoleSpec) -> Manifest:
    """Return the scaler of an External role, without replicas: others own those."""
    kind = Role(role.name)
    return manifest(
        owner,
        API_VERSION,
        "PDRoleScaler",
        names.of_role(owner.name, kind),
        role=kind,
        spec={"targetRef": {"name": owner.name, "role": kind.value}},
    )


def pod_monitor(owner: Owner) -> Manifest:
    """Return the PodMonitor that scrapes every pod of the deployment."""
    endpoints = [{"port": "health", "path": "/metrics"}]
    return manifest(
        owner,
        POD_MONITOR_API_VERSION,
        "PodMonitor",
        owner.name,
        spec={
            "selector": {"matchLabels": selector_labels(owner.name)},
            "podMetricsEndpoints": endpoints,
            "podTargetLabels": [names.LABEL_ROLE, names.LABEL_REVISION],
        },
    )
