"""A child that shall exist: its manifest, and how it begins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from baton_operator.resources.meta import Manifest
from baton_operator.store import ChildId


@dataclass(frozen=True, slots=True)
class Wish:
    """A child that shall exist.

    Seeded children (a Secret's keys, a scaler's replicas) are created once from `seed()` and
    afterwards applied without what was seeded. Urgent ones are written before the others: a server
    that has everything at once answers everything late.
    """

    manifest: Manifest
    seed: Callable[[], Manifest] | None = None
    is_urgent: bool = False

    @property
    def child_id(self) -> ChildId:
        """Which child this is."""
        return ChildId(self.manifest["kind"], self.manifest["metadata"]["name"])
