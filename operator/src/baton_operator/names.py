"""Every name the operator gives: API group, labels, annotations, child objects, ports.

One place, because names are the operator's only memory between restarts: a child is found again by
what it is called. Knows no object's content.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

GROUP: Final = "baton.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"
PARENT_KIND: Final = "PDDeployment"

FIELD_MANAGER: Final = "baton-operator"
SEED_MANAGER: Final = "baton-operator-seed"
"""Owns values that are only first guesses (a scaler's replicas), so that others may take them."""

MANAGED_BY: Final = "baton-operator"
LABEL_MANAGED_BY: Final = "app.kubernetes.io/managed-by"
LABEL_NAME: Final = f"{GROUP}/name"
LABEL_ROLE: Final = f"{GROUP}/role"
LABEL_REVISION: Final = f"{GROUP}/revision"
LABEL_TEMPLATE: Final = "pod-template-hash"
CHILD_SELECTOR: Final = f"{LABEL_MANAGED_BY}={MANAGED_BY}"
_RECOMMENDED: Final = frozenset(
    f"app.kubernetes.io/{part}" for part in ("name", "instance", "component", "part-of")
)
"""What a child is labelled with beside labels that are ours alone."""

ANNOTATION_APPLIED: Final = f"{GROUP}/applied-hash"
ANNOTATION_MADE_FROM: Final = f"{GROUP}/made-from"
ANNOTATION_RESTARTED: Final = f"{GROUP}/restarted-at"
ANNOTATION_DELETION_COST: Final = "controller.kubernetes.io/pod-deletion-cost"

MAX_NAME_LENGTH: Final = 40
"""Longest PDDeployment name: the longest child suffix still fits a 63 character label."""
NAME_PATTERN: Final = "[a-z]([-a-z0-9]*[a-z0-9])?"
NAME_RULE: Final = "metadata.name must be a DNS label that begins with a letter"

PORT_HEALTH: Final = 8080
PORT_KV: Final = 5557
PORT_LINK: Final = 5555
PORT_GATEWAY: Final = 8000
PORT_PAIR_DECODE_HEALTH: Final = 8081
"""Of decode beside prefill: the containers of a pod share its ports."""
WORKER_PORTS: Final = {"health": PORT_HEALTH, "kv": PORT_KV}
GATEWAY_PORTS: Final = {"http": PORT_GATEWAY, "health": PORT_HEALTH, "link": PORT_LINK}
"""The worker container's ports by name."""

CONTAINER_NAME: Final = "worker"
"""The container that is ours in a template; in a pod of a pair it is called by its role."""

FOLDER_CONFIG: Final = "/etc/baton"
FOLDER_KEYS: Final = "/etc/baton-keys"
FOLDER_API_KEYS: Final = "/etc/baton-api-keys"
FOLDER_MODEL: Final = "/models"
FOLDER_CONTROL: Final = "/run/baton"
FOLDER_SHARED: Final = "/run/baton-kv"
FOLDER_TEMPORARY: Final = "/tmp"  # noqa: S108
"""Where the volumes of ours are in a container of ours."""


class Role(StrEnum):
    """Who a pod is in the deployment. `PAIR` is a pod with a container of either worker role; no
    process is one.
    """

    PREFILL = "prefill"
    DECODE = "decode"
    PAIR = "pair"
    GATEWAY = "gateway"


WORKER_ROLES: Final = (Role.PREFILL, Role.DECODE)
_WORKLOADS: Final = frozenset({*WORKER_ROLES, Role.PAIR})
PROCESS_ROLES: Final = (*WORKER_ROLES, Role.GATEWAY)
"""Who a process is: each has keys of its own."""


PAIR_PORTS: Final = {
    Role.PREFILL: {"health": PORT_HEALTH},
    Role.DECODE: {"health": PORT_PAIR_DECODE_HEALTH, "kv": PORT_KV},
}
"""The ports of a pair's containers by role and name."""


def health_ports(role: str) -> tuple[int, ...]:
    """Return the health port of each process in a pod of this role."""
    of_pair = tuple(ports["health"] for ports in PAIR_PORTS.values())
    return of_pair if role == Role.PAIR else (PORT_HEALTH,)


def worker_id(pod: str, role: Role, *, is_paired: bool) -> str:
    """Return what the worker of this role in a pod is called: a name is one process's."""
    return f"{pod}-{role}" if is_paired else pod


def is_own_key(key: str) -> bool:
    """Whether a label or annotation of a pod is ours alone; of the recommended ones one is."""
    return key == LABEL_MANAGED_BY or key.startswith(f"{GROUP}/")


def marks(labels: Mapping[str, str], annotations: Mapping[str, str]) -> int:
    """Return a number for what a child says of itself, whatever others have added to it.

    Nothing else tells of a label that is taken away: it counts no generation up, and nobody is
    noted as who manages what is not there.
    """
    own = {key: value for key, value in labels.items() if key in _RECOMMENDED or is_own_key(key)}
    made_from = annotations.get(ANNOTATION_MADE_FROM, "")
    return hash((frozenset(own.items()), made_from))


def of_workload(owner: str, workload_name: str) -> tuple[Role, str] | None:
    """Return role and revision of the workload of this name, or None when it is none of workers.

    A name cannot be edited: labels that say the same can.
    """
    middle, _, role = workload_name.removeprefix(f"{owner}-").rpartition("-")
    is_ours = workload_name.startswith(f"{owner}-") and bool(middle)
    return (Role(role), middle) if is_ours and role in _WORKLOADS else None


def of_record(owner: str, config_map_name: str) -> str:
    """Return the revision whose record has this name, "" when it is none's."""
    is_ours = config_map_name.startswith(f"{owner}-")
    is_other = not is_ours or is_gateway_file(owner, config_map_name)
    return "" if is_other else config_map_name.removeprefix(f"{owner}-")


def revision_record(name: str, revision: str) -> str:
    """Return the name of the ConfigMap that records a revision."""
    return f"{name}-{revision}"


def workload(name: str, revision: str, role: Role) -> str:
    """Return the name of the Deployment of a revision's role, or of its pairs."""
    return f"{name}-{revision}-{role}"


def gateway(name: str) -> str:
    """Return the name of the gateway's Deployment and policy."""
    return f"{name}-gateway"


def gateway_file(name: str, content_hash: str) -> str:
    """Return the name of the ConfigMap with a gateway's configuration.

    Named for its content, so that a gateway that restarts reads what it was made with.
    """
    return f"{gateway(name)}-{content_hash}"


def is_gateway_file(owner: str, config_map_name: str) -> bool:
    """Whether a ConfigMap of this name is a gateway's configuration."""
    return config_map_name.startswith(gateway_file(owner, ""))


def client_service(name: str) -> str:
    """Return the name of the Service that clients call."""
    return name


def link_service(name: str) -> str:
    """Return the name of the headless Service through which workers find every gateway."""
    return f"{name}-link"


def curve_secret(name: str) -> str:
    """Return the name of the Secret with the CURVE keys."""
    return f"{name}-curve"


def service_account(name: str) -> str:
    """Return the name of the ServiceAccount of every pod of a PDDeployment."""
    return f"{name}-pods"


def of_role(name: str, role: Role) -> str:
    """Return the name of a role's, or all pairs', scaler, disruption budget and network policy."""
    return f"{name}-{role}"
