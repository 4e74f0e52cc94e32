"""What every child has: its name, labels, and the reference to its owner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from baton_operator.names import (
    API_VERSION,
    LABEL_MANAGED_BY,
    LABEL_NAME,
    LABEL_REVISION,
    LABEL_ROLE,
    MANAGED_BY,
    PARENT_KIND,
    Role,
)

Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Owner:
    """The PDDeployment that children belong to."""

    namespace: str
    name: str
    uid: str

    def reference(self) -> Manifest:
        """Return the owner reference: garbage collection deletes children with their owner."""
        return {
            "apiVersion": API_VERSION,
            "kind": PARENT_KIND,
            "name": self.name,
            "uid": self.uid,
            "controller": True,
            "blockOwnerDeletion": True,
        }


def selector_labels(name: str, role: Role | None = None, revision: str = "") -> dict[str, str]:
    """Return the labels that select pods: minimal, and never changed for a given child."""
    labels = {LABEL_NAME: name}
    if role is not None:
        labels[LABEL_ROLE] = role.value
    if revision:
        labels[LABEL_REVISION] = revision
    return labels


def child_labels(name: str, role: Role | None = None, revision: str = "") -> dict[str, str]:
    """Return the recommended labels and our own."""
    return {
        "app.kubernetes.io/name": "baton",
        "app.kubernetes.io/instance": name,
        "app.kubernetes.io/component": role.value if role else "deployment",
        "app.kubernetes.io/part-of": "baton",
        LABEL_MANAGED_BY: MANAGED_BY,
        **selector_labels(name, role, revision),
    }


def manifest(
    owner: Owner,
    api_version: str,
    kind: str,
    name: str,
    *,
    role: Role | None = None,
    revision: str = "",
    **body: Any,
) -> Manifest:
    """Return a child's manifest; `body` holds its top-level fields beside metadata."""
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": owner.namespace,
            "labels": child_labels(owner.name, role, revision),
            "ownerReferences": [owner.reference()],
        },
        **body,
    }
