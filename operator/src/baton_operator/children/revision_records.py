"""Revision records at hand: read once, then kept, because they never change."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import msgspec

from baton_operator.children.revision import RevisionRecord, read_record
from baton_operator.cluster.api import CONFIG_MAP, KubeApi
from baton_operator.cluster.partial_objects import child_of, partial_of
from baton_operator.cluster.store import ChildId, ChildStore
from baton_operator.models import ObjectKey
from baton_operator.names import revision_record

log = logging.getLogger(__name__)

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(RevisionRecord).decode


class RevisionRecords:
    """Records by owner and revision, packed: hundreds of them are held for hours."""

    def __init__(self, kube: KubeApi, children: ChildStore) -> None:
        self._kube = kube
        self._children = children
        self._packed: dict[ObjectKey, dict[str, bytes]] = {}

    async def has(self, owner: ObjectKey, uid: str, revision: str) -> bool:
        """Whether there is a record, which is at hand then; one of another owner does not count.

        What the store does not know is not asked for: a new revision has no record yet.
        """
        if revision in self._packed.get(owner, {}):
            return True
        name = revision_record(owner.name, revision)
        if self._children.entry(owner, ChildId(CONFIG_MAP.kind, name)) is None:
            return False
        body = await self._kube.get(CONFIG_MAP, owner.namespace, name)
        if body is None or not child_of(partial_of(body), CONFIG_MAP.kind).belongs_to(uid):
            return False
        try:
            record = read_record(body, revision)
        except ValueError as error:
            log.warning("record unreadable", extra={"object": str(owner), "error": str(error)})
            return False
        self.keep(owner, record)
        return True

    def unpacked(self, owner: ObjectKey, revisions: Iterable[str]) -> dict[str, RevisionRecord]:
        """Return records at hand; an object may have none, as one that was made suspended."""
        packed = self._packed.get(owner, {})
        return {revision: _decode(packed[revision]) for revision in revisions}

    def keep(self, owner: ObjectKey, record: RevisionRecord) -> None:
        """Enter a record."""
        self._packed.setdefault(owner, {})[record.name] = _encode(record)

    def drop(self, owner: ObjectKey, revisions: set[str]) -> None:
        """Forget records of revisions that are gone."""
        held = self._packed.get(owner, {})
        for revision in revisions & held.keys():
            del held[revision]

    def forget(self, owner: ObjectKey) -> None:
        """Forget every record of an owner."""
        self._packed.pop(owner, None)
