"""Nodes that kwok plays: pods scheduled there become ready at once and run nothing."""

from __future__ import annotations

from typing import Any


def fake_node(name: str, pods: int = 2000) -> dict[str, Any]:
    """Return a node with room for this many pods."""
    room = {"cpu": "4096", "memory": "64Ti", "pods": str(pods), "nvidia.com/gpu": "4096"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "annotations": {"kwok.x-k8s.io/node": "fake"},
            "labels": {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "type": "kwok"},
        },
        "status": {"capacity": room, "allocatable": room},
    }
