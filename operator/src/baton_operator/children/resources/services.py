"""Services: one for clients, one headless through which workers find every gateway."""

from __future__ import annotations

from baton_operator import names
from baton_operator.children.resources.meta import Manifest, Owner, manifest, selector_labels
from baton_operator.models import PDDeploymentSpec
from baton_operator.names import Role

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
