"""Writes of children: ownership first, then only what differs, all at once.

A child is ours when its controller is the PDDeployment's uid. A foreign object under one of our
names is reported and left alone; nothing is adopted. What an earlier PDDeployment of the same name
left is waited for: it goes by itself. Nothing is read for that: every write names the object that
it is for, and the server refuses it for another. What the store has verified to equal the rendered
manifest is not written again.

A new child is created by a plain POST, and applied from its first change on: an apply costs the
server half as much again, and a new object is waited for. Before the first apply the fields of the
creation are handed over to it, or what a later manifest drops would stay.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from http import HTTPStatus
from typing import NamedTuple

from baton_operator.children.desired import DesiredChild, Mark, Wave
from baton_operator.children.resources.meta import Manifest
from baton_operator.cluster.api import (
    DEPLOYMENT,
    DISRUPTION_BUDGET,
    NETWORK_POLICY,
    POD_MONITOR,
    SCALER,
    AlreadyExists,
    ApiError,
    Conflict,
    Created,
    Json,
    Kind,
    KubeApi,
    NamespaceEnds,
    Throttled,
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


_OPENING = (Outcome.FAILED, Outcome.LEAVING)
"""What of a guard leaves new pods without it, now or soon."""


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one child; `error` when it failed."""

    child: ChildId
    outcome: Outcome
    error: ApiError | None = None


class WriteFailed(Exception):
    """Some children could not be written; status says which. The pass is worth repeating.

    `look_in` is in how many seconds the pass would have to be repeated without that; None if never.
    """

    def __init__(self, message: str, look_in: float | None = None) -> None:
        super().__init__(message)
        self.look_in = look_in


class Unwanted(NamedTuple):
    """A child that shall not exist."""

    kind: Kind
    child: Child


class Difference(NamedTuple):
    """What must be done that children are as they shall be."""

    unsettled: frozenset[ChildId]
    settled: tuple[ChildId, ...]
    unwanted: tuple[Unwanted, ...]

    @property
    def is_none(self) -> bool:
        """Whether nothing would be written."""
        return not (self.unsettled or self.unwanted)


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

    def difference(self, owner: ObjectKey, uid: str, marks: Mapping[ChildId, Mark]) -> Difference:
        """Return what is otherwise than the children that shall be, which are known by mark.

        Unwanted are those of ours that the spec switched off: nothing names them any more.
        """
        is_settled = {c: self._is_settled(owner, uid, c, m) for c, m in marks.items()}
        unwanted = (
            Unwanted(_SWITCHED[key.kind], entry.child)
            for key, entry in self._store.children(owner)
            if key.kind in _SWITCHED
            and key not in marks
            and entry.child.belongs_to(uid)
            and not entry.child.is_deleting
        )
        return Difference(
            frozenset(child for child, is_so in is_settled.items() if not is_so),
            tuple(child for child, is_so in is_settled.items() if is_so),
            tuple(unwanted),
        )

    def _is_settled(self, owner: ObjectKey, uid: str, child: ChildId, wanted: Mark) -> bool:
        """Whether the child is verified to be what it shall be.

        Marks are compared until it is written: where somebody adds one, or a webhook insists on
        another, they never become equal, and each pass would write it again.
        """
        entry = self._store.entry(owner, child)
        return (
            entry is not None
            and entry.is_verified
            and entry.child.applied_hash == wanted.hash
            and (entry.is_written or entry.child.marks == wanted.marks)
            and entry.child.controller_uid == uid
            and not entry.child.is_deleting
        )

    async def apply_all(
        self, owner: ObjectKey, uid: str, difference: Difference, desired: Iterable[DesiredChild]
    ) -> list[Result]:
        """Bring every unsettled child to what is `desired` of it, wave after wave.

        One that fails does not stop the others, unless its namespace ends. New workloads are held
        back, though, while one of their guards cannot be written, or is on its way out: pods may
        start late, and never open, nor with keys that are about to go.
        """
        results = [Result(child, Outcome.UNCHANGED) for child in difference.settled]
        pending = [each for each in desired if each.child_id in difference.unsettled]
        for wave in Wave:
            batch = [each for each in pending if each.wave is wave]
            if any(isinstance(result.error, NamespaceEnds) for result in results):
                break
            is_open = any(result.outcome in _OPENING for result in results)
            if wave is Wave.WORKLOADS and is_open:
                new = [c.child_id for c in batch if self._store.entry(owner, c.child_id) is None]
                batch = [each for each in batch if each.child_id not in new]
                results += [Result(child, Outcome.HELD) for child in new]
                log.warning("unguarded pods held back", extra={"object": str(owner)})
            results += await asyncio.gather(*(self._one(owner, uid, each) for each in batch))
        for result in results:
            self._count(result.child.kind, result.outcome)
        return results

    async def remove_all(self, owner: ObjectKey, unwanted: Iterable[Unwanted]) -> list[Result]:
        """Delete children; the watch reports when they are gone. Return those that stay.

        One that fails does not stop the others.
        """
        done = await asyncio.gather(*(self._remove(owner, each) for each in unwanted))
        failed = [result for result in done if result is not None]
        for result in failed:
            self._count(result.child.kind, result.outcome)
        return failed

    async def _remove(self, owner: ObjectKey, unwanted: Unwanted) -> Result | None:
        kind, child = unwanted
        try:
            await self._kube.delete(kind, owner.namespace, child.name, child.uid)
        except ApiError as error:
            return _failed(owner, ChildId(kind.kind, child.name), "delete", error)
        return None

    async def scale(self, owner: ObjectKey, child: Child, replicas: int) -> list[Result]:
        """Give a Deployment whose manifest nobody knows other replicas; return it if that fails."""
        patch = {"metadata": {"uid": child.uid}, "spec": {"replicas": replicas}}
        return await self._patch(owner, "scale", DEPLOYMENT, child.name, patch)

    async def tell(self, owner: ObjectKey, name: str, status: Json) -> list[Result]:
        """Write the status of a scaler; return that if it fails."""
        return await self._patch(owner, "tell", SCALER, name, {"status": status}, "status")

    async def _patch(
        self,
        owner: ObjectKey,
        verb: str,
        kind: Kind,
        name: str,
        patch: Json,
        subresource: str = "",
    ) -> list[Result]:
        """Change a child that is there; one that is gone is no failure: the watch tells of it."""
        try:
            await self._kube.merge(kind, owner.namespace, name, patch, subresource)
        except ApiError as error:
            if error.status == HTTPStatus.NOT_FOUND:
                return []
            failed = _failed(owner, ChildId(kind.kind, name), verb, error)
            self._count(failed.child.kind, failed.outcome)
            return [failed]
        return []

    async def _one(self, owner: ObjectKey, uid: str, desired: DesiredChild) -> Result:
        try:
            async with self._slots:
                with self._store.in_writing(owner, desired.child_id):
                    outcome = await self._write(owner, uid, desired)
        except ApiError as error:
            return _failed(owner, desired.child_id, "apply", error)
        return Result(desired.child_id, outcome)

    async def _write(self, owner: ObjectKey, uid: str, desired: DesiredChild) -> Outcome:
        entry = self._store.entry(owner, desired.child_id)
        child = None if entry is None else entry.child
        try:
            return await self._attempt(owner, uid, desired, child)
        except (AlreadyExists, Conflict):
            # What has this name is not what we know. The store hears of ours only, so ask.
            kind = kind_of(desired.manifest)
            child = await self._look(owner, kind, desired.child_id.name)
            return await self._attempt(owner, uid, desired, child)

    async def _attempt(
        self, owner: ObjectKey, uid: str, desired: DesiredChild, child: Child | None
    ) -> Outcome:
        """Write over `child`, or where there is none, and over nothing else.

        Raises:
            Conflict: another object has the name, or the child is gone.
            AlreadyExists: an object has the name of a child that is created.
        """
        if child is not None and child.is_left_by(owner.name, uid):
            return Outcome.LEAVING
        if child is not None and not child.belongs_to(uid):
            return Outcome.FOREIGN
        if child is not None and child.is_deleting:
            return Outcome.LEAVING
        kind = kind_of(desired.manifest)
        if child is None:
            answer = await self._create(kind, desired)
        else:
            manifest = _stamped(desired.manifest, desired.manifest_hash)
            answer = await self._apply(kind, owner, manifest, child)
        self._store.wrote(owner, kind, child_of(decode_partial(answer), kind.kind))
        return Outcome.CREATED if child is None else Outcome.APPLIED

    async def _create(self, kind: Kind, desired: DesiredChild) -> bytes:
        if desired.seed is None:
            manifest, manager = desired.manifest, FIELD_MANAGER
        else:
            manifest, manager = desired.seed(), SEED_MANAGER
        return await self._kube.create(kind, _stamped(manifest, desired.manifest_hash), manager)

    async def _apply(self, kind: Kind, owner: ObjectKey, manifest: Manifest, child: Child) -> bytes:
        if child.created_entry is not None:
            place = Created(owner.namespace, child.name, child.uid, child.created_entry)
            await self._kube.hand_over(kind, place, FIELD_MANAGER)
        return await self._kube.apply(kind, manifest, FIELD_MANAGER, uid=child.uid)

    async def _look(self, owner: ObjectKey, kind: Kind, name: str) -> Child | None:
        body = await self._kube.get(kind, owner.namespace, name, is_metadata_only=True)
        return None if body is None else child_of(partial_of(body), kind.kind)


def pause_if_asked(results: Iterable[Result]) -> None:
    """Raise what ends all writes, or else the longest wait that the server asked for.

    Raises:
        NamespaceEnds: of the first result that has it.
        Throttled: that with the longest wait.
    """
    errors = [result.error for result in results]
    for error in errors:
        if isinstance(error, NamespaceEnds):
            raise error
    asked = [error for error in errors if isinstance(error, Throttled)]
    if asked:
        raise max(asked, key=lambda error: error.retry_after_seconds)


def _failed(owner: ObjectKey, child: ChildId, verb: str, error: ApiError) -> Result:
    if not isinstance(error, NamespaceEnds):  # of which the pass tells once
        extra = {"object": str(owner), "child": child, "error": str(error)}
        log.warning("%s failed", verb, extra=extra)
    return Result(child, Outcome.FAILED, error)


def _stamped(manifest: Manifest, wanted_hash: str) -> Manifest:
    metadata = manifest["metadata"]
    annotations = {**metadata.get("annotations", {}), ANNOTATION_APPLIED: wanted_hash}
    return {**manifest, "metadata": {**metadata, "annotations": annotations}}
