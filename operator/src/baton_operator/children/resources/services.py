"""How pods are found: the Service for clients, the headless one through which workers find every
gateway, and the PodMonitor for scrapers.
"""

from __future__ import annotations

from collections.abc import Mapping

from baton_operator import names
from baton_operator.children.resources.meta import Manifest, Owner, manifest, selector_labels
from baton_operator.models import PDDeploymentSpec
from baton_operator.names import Role

POD_MONITOR_API_VERSION = "monitoring.coreos.com/v1"
_FAMILIES = "PreferDualStack"
"""Both families where the cluster has both; else the one it has."""


def client_service(owner: Owner, spec: PDDeploymentSpec) -> Manifest:
    """Return the Service with the OpenAI API, on port 80."""
    return manifest(
        owner,
        "v1",
        "Service",
        names.client_service(owner.name),
        role=Role.GATEWAY,
        spec={
            "type": spec.gateway.service_type,
            "ipFamilyPolicy": _FAMILIES,
            "selector": selector_labels(owner.name, Role.GATEWAY),
            "ports": [{"name": "http", "port": 80, "targetPort": "http", "protocol": "TCP"}],
        },
    )


def link_service(owner: Owner) -> Manifest:
    """Return the headless Service of the gateways.

    Gateways that are not ready are published too: one becomes ready by the workers that find it.
    """
    port = {"name": "link", "port": names.PORT_LINK, "targetPort": "link", "protocol": "TCP"}
    return manifest(
        owner,
        "v1",
        "Service",
        names.link_service(owner.name),
        role=Role.GATEWAY,
        spec={
            "clusterIP": "None",
            "ipFamilyPolicy": _FAMILIES,
            "publishNotReadyAddresses": True,
            "selector": selector_labels(owner.name, Role.GATEWAY),
            "ports": [port],
        },
    )


def pod_monitor(owner: Owner, labels: Mapping[str, str]) -> Manifest:
    """Return the PodMonitor that scrapes every pod of the deployment, with `labels` by which a
    Prometheus selects it.
    """
    endpoints = [{"port": "health", "path": "/metrics"}]
    monitor = manifest(
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
    monitor["metadata"]["labels"] |= labels
    return monitor
