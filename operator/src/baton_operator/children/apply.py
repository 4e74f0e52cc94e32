"""Writes of children: ownership first, then only what differs, all at once.

A child is ours when its controller is the PDDeployment's uid. A foreign object under one of our
names is reported and left alone; nothing is adopted. Nothing is read for that: every write names
the object that it is for, and the server refuses it for another. What the store has verified to
equal the rendered manifest is not written again.

A new child is created by a plain POST, and applied from its first change on: an apply costs the
server half as much again, and a new object is waited for. Before the first apply the fields of the
creation are handed over to it, or what a later manifest drops would stay.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from baton_operator.children.resources.meta import Manifest
from baton_operator.children.revision import semantic_hash
from baton_operator.children.wish import Wave, Wish
from baton_operator.cluster.api import (
    DISRUPTION_BUDGET,
    NETWORK_POLICY,
    POD_MONITOR,
    SCALER,
    AlreadyExists,
    ApiError,
    Conflict,
    Created,
    Kind,
    KubeApi,
    kind_of,
)
from baton_operator.cluster.partial_objects import Child, child_of, decode_partial, partial_of
from baton_operator.cluster.store import ChildId, ChildStore
from baton_operator.models import ObjectKey
from baton_operator.names import ANNOTATION_APPLIED, FIELD_MANAGER, SEED_MANAGER

log = logging.getLogger(__name__)

_SWITCHED = {k.kind: k for k in (DISRUPTION_BUDGET, NETWORK_POLICY, SCALER, POD_MONITOR)}
"""Kinds that a spec switches on and off. The keys' Secret is none of them: pods of an older
revision may still need it."""


class Outcome(StrEnum):
    """What became of one child."""

    UNCHANGED = "unchanged"
    APPLIED = "applied"
    CREATED = "created"
    FOREIGN = "foreign"
    LEAVING = "leaving"
    FAILED = "failed"
    HELD = "held"


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one child; `error` when it failed."""

    child: ChildId
    outcome: Outcome
    error: ApiError | None = None


class Unwanted(NamedTuple):
    """A child that shall not exist."""

    kind: Kind
    child: Child


class Applier:
    """Writes children with bounded concurrency."""

    def __init__(
        self,
        kube: KubeApi,
        store: ChildStore,
        limit: int,
        count: Callable[[str, Outcome], None],
    ) -> None:
        """`count` is called with kind and outcome of every child that was looked at."""
        self._kube = kube
        self._store = store
        self._slots = asyncio.Semaphore(limit)
        self._count = count

    def is_settled(self, owner: ObjectKey, uid: str, wish: Wish, wanted_hash: str) -> bool:
        """Whether the child is verified to be what is wished."""
        entry = self._store.entry(owner, wish.child_id)
        return (
            entry is not None
            and entry.is_verified
            and entry.child.applied_hash == wanted_hash
            and entry.child.controller_uid == uid
            and not entry.child.is_deleting
        )

    def are_settled(self, owner: ObjectKey, uid: str, wishes: Iterable[Wish]) -> bool:
        """Whether nothing would be written."""
        return all(
            self.is_settled(owner, uid, wish, semantic_hash(wish.manifest)) for wish in wishes
        )

    def unwished(self, owner: ObjectKey, uid: str, wishes: Iterable[Wish]) -> list[Unwanted]:
        """Return our children that the spec switched off: nothing wishes them any more."""
        wished = {wish.child_id for wish in wishes}
        return [
            Unwanted(_SWITCHED[key.kind], entry.child)
            for key, entry in self._store.children(owner)
            if key.kind in _SWITCHED
            and key not in wished
            and entry.child.is_of(uid)
            and not entry.child.is_deleting
        ]

    async def apply_all(self, owner: ObjectKey, uid: str, wishes: Iterable[Wish]) -> list[Result]:
        """Bring every child to its wish, wave after wave; one that fails does not stop the others.

        New workloads are held back, though, while one of their guards cannot be written: pods may
        start late, and never open.
        """
        results: list[Result] = []
        wanted = list(wishes)
        for wave in Wave:
            batch = [wish for wish in wanted if wish.wave is wave]
            is_open = any(result.outcome is Outcome.FAILED for result in results)
            if wave is Wave.WORKLOADS and is_open:
                new = [w for w in batch if self._store.entry(owner, w.child_id) is None]
                batch = [wish for wish in batch if wish not in new]
                results += [Result(wish.child_id, Outcome.HELD) for wish in new]
                log.warning("unguarded pods held back", extra={"object": str(owner)})
            results += await asyncio.gather(*(self._one(owner, uid, wish) for wish in batch))
        for result in results:
            self._count(result.child.kind, result.outcome)
        return results

    async def remove_all(self, owner: ObjectKey, extras: Iterable[Unwanted]) -> None:
        """Delete children; the watch reports when they are gone."""
        await asyncio.gather(
            *(self._kube.delete(e.kind, owner.namespace, e.child.name, e.child.uid) for e in extras)
        )

    async def _one(self, owner: ObjectKey, uid: str, wish: Wish) -> Result:
        wanted_hash = semantic_hash(wish.manifest)
        if self.is_settled(owner, uid, wish, wanted_hash):
            return Result(wish.child_id, Outcome.UNCHANGED)
        try:
            async with self._slots:
                with self._store.in_writing(owner, wish.child_id):
                    outcome = await self._write(owner, uid, wish, wanted_hash)
        except ApiError as error:
            log.warning(
                "apply failed",
                extra={"object": str(owner), "child": wish.child_id, "error": str(error)},
            )
            return Result(wish.child_id, Outcome.FAILED, error)
        return Result(wish.child_id, outcome)

    async def _write(self, owner: ObjectKey, uid: str, wish: Wish, wanted_hash: str) -> Outcome:
        entry = self._store.entry(owner, wish.child_id)
        child = None if entry is None else entry.child
        try:
            return await self._attempt(owner, uid, wish, wanted_hash, child)
        except (AlreadyExists, Conflict):
            # What has this name is not what we know. The store hears of ours only, so ask.
            kind = kind_of(wish.manifest)
            child = await self._look(owner, kind, wish.child_id.name)
            return await self._attempt(owner, uid, wish, wanted_hash, child)

    async def _attempt(
        self, owner: ObjectKey, uid: str, wish: Wish, wanted_hash: str, child: Child | None
    ) -> Outcome:
        """Write over `child`, or where there is none, and over nothing else.

        Raises:
            Conflict: another object has the name, or the child is gone.
            AlreadyExists: an object has the name of a child that is created.
        """
        if child is not None and not child.is_of(uid):
            return Outcome.FOREIGN
        if child is not None and child.is_deleting:
            return Outcome.LEAVING
        kind = kind_of(wish.manifest)
        if child is None:
            answer = await self._create(kind, wish, wanted_hash)
        else:
            answer = await self._apply(kind, owner, _stamped(wish.manifest, wanted_hash), child)
        self._store.wrote(owner, kind, child_of(decode_partial(answer), kind.kind))
        return Outcome.CREATED if child is None else Outcome.APPLIED

    async def _create(self, kind: Kind, wish: Wish, wanted_hash: str) -> bytes:
        if wish.seed is None:
            manifest, manager = wish.manifest, FIELD_MANAGER
        else:
            manifest, manager = wish.seed(), SEED_MANAGER
        return await self._kube.create(kind, _stamped(manifest, wanted_hash), manager)

    async def _apply(self, kind: Kind, owner: ObjectKey, manifest: Manifest, child: Child) -> bytes:
        if child.created_entry is not None:
            place = Created(owner.namespace, child.name, child.uid, child.created_entry)
            await self._kube.hand_over(kind, place, FIELD_MANAGER)
        return await self._kube.apply(kind, manifest, FIELD_MANAGER, uid=child.uid)

    async def _look(self, owner: ObjectKey, kind: Kind, name: str) -> Child | None:
        body = await self._kube.get(kind, owner.namespace, name, is_metadata_only=True)
        return None if body is None else child_of(partial_of(body), kind.kind)


def _stamped(manifest: Manifest, wanted_hash: str) -> Manifest:
    metadata = manifest["metadata"]
    annotations = {**metadata.get("annotations", {}), ANNOTATION_APPLIED: wanted_hash}
    return {**manifest, "metadata": {**metadata, "annotations": annotations}}
