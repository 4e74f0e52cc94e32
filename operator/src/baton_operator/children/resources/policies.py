"""What pods may: their ServiceAccount, and whom they talk to, by default-deny NetworkPolicies.

prefill -> gateway link, decode -> gateway link, prefill -> decode KV, clients -> gateway HTTP,
scrapers and the operator -> health ports, every pod -> DNS. KV of a pair does not leave its pod.
"""

from __future__ import annotations

from typing import Any

from baton_operator import names
from baton_operator.children.resources.meta import Manifest, Owner, manifest, selector_labels
from baton_operator.models import PDDeploymentSpec
from baton_operator.models.placement import pod_roles
from baton_operator.names import Role

_ANYWHERE: list[Manifest] = [{"namespaceSelector": {}}]
_DNS: Manifest = {"ports": [{"protocol": p, "port": 53} for p in ("UDP", "TCP")]}


def service_account(owner: Owner) -> Manifest:
    """Return the account of every pod: no permissions, no token."""
    return manifest(
        owner,
        "v1",
        "ServiceAccount",
        names.service_account(owner.name),
        automountServiceAccountToken=False,
    )


def network_policies(
    owner: Owner, spec: PDDeploymentSpec, operator_namespace: str = ""
) -> list[Manifest]:
    """Return a policy for each kind of pod; empty when they are off.

    The operator, in `operator_namespace` ("" outside of a cluster), asks workers who is least
    busy and what they serve, also where `metricsFrom` names others only.
    """
    if not spec.network_policy.enabled:
        return []
    roles = pod_roles(spec.placement)
    scrape = _scrape(spec, *names.health_ports(roles[0]))
    if spec.network_policy.metrics_from and operator_namespace:
        scrape["from"] = [*scrape["from"], _operator(operator_namespace)]
    gateway = _gateway(owner, spec, _scrape(spec, names.PORT_HEALTH))
    if spec.has_pairs:
        return [_pair(owner, scrape), gateway]
    return [_prefill(owner, scrape), _decode(owner, scrape), gateway]


def _operator(operator_namespace: str) -> Manifest:
    return {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": operator_namespace}},
        "podSelector": {"matchLabels": {"app.kubernetes.io/component": "operator"}},
    }


def _prefill(owner: Owner, scrape: Manifest) -> Manifest:
    egress = [
        _to(owner, Role.GATEWAY, names.PORT_LINK),
        _to(owner, Role.DECODE, names.PORT_KV),
        _DNS,
    ]
    return _policy(owner, Role.PREFILL, [scrape], egress)


def _decode(owner: Owner, scrape: Manifest) -> Manifest:
    ingress = [scrape, _from([_pods(owner, Role.PREFILL)], names.PORT_KV)]
    return _policy(owner, Role.DECODE, ingress, [_to(owner, Role.GATEWAY, names.PORT_LINK), _DNS])


def _pair(owner: Owner, scrape: Manifest) -> Manifest:
    egress = [_to(owner, Role.GATEWAY, names.PORT_LINK), _DNS]
    return _policy(owner, Role.PAIR, [scrape], egress)


def _gateway(owner: Owner, spec: PDDeploymentSpec, scrape: Manifest) -> Manifest:
    clients = spec.network_policy.clients_from or _ANYWHERE
    workers = [_pods(owner, role) for role in pod_roles(spec.placement)]
    ingress = [_from(clients, names.PORT_GATEWAY), _from(workers, names.PORT_LINK), scrape]
    return _policy(owner, Role.GATEWAY, ingress, [_DNS])


def _policy(owner: Owner, role: Role, ingress: list[Any], egress: list[Any]) -> Manifest:
    return manifest(
        owner,
        "networking.k8s.io/v1",
        "NetworkPolicy",
        names.of_role(owner.name, role),
        role=role,
        spec={
            "podSelector": {"matchLabels": selector_labels(owner.name, role)},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": ingress,
            "egress": egress,
        },
    )


def _pods(owner: Owner, role: Role) -> Manifest:
    return {"podSelector": {"matchLabels": selector_labels(owner.name, role)}}


def _from(peers: list[Manifest], *ports: int) -> Manifest:
    return {"from": peers, "ports": [{"protocol": "TCP", "port": port} for port in ports]}


def _to(owner: Owner, role: Role, port: int) -> Manifest:
    return {"to": [_pods(owner, role)], "ports": [{"protocol": "TCP", "port": port}]}


def _scrape(spec: PDDeploymentSpec, *ports: int) -> Manifest:
    return _from(spec.network_policy.metrics_from or _ANYWHERE, *ports)
