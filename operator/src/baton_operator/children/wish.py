"""A child that shall exist: its manifest, and how it begins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum, auto

from baton_operator.children.resources.meta import Manifest
from baton_operator.cluster.store import ChildId


class Wave(IntEnum):
    """What is written when: a wave begins when the one before it is answered.

    A server that has everything at once answers everything late, so what pods wait for longest is
    sent before the rest. What guards them is sent before they can exist: no pod is ever open.
    """

    GUARDS = auto()
    WORKLOADS = auto()
    REST = auto()


@dataclass(frozen=True, slots=True)
class Wish:
    """A child that shall exist.

    Seeded children (a Secret's keys, a scaler's replicas) are created once from `seed()` and
    afterwards applied without what was seeded.
    """

    manifest: Manifest
    seed: Callable[[], Manifest] | None = None
    wave: Wave = Wave.REST

    @property
    def child_id(self) -> ChildId:
        """Which child this is."""
        return ChildId(self.manifest["kind"], self.manifest["metadata"]["name"])
