"""List and watch of one kind into the child store: a small informer.

kopf watches the PDDeployments; children are watched here, because they are ten times as many and
need less: heads decoded from the wire instead of whole bodies, metadata alone for kinds whose
content we only ever write, and - what kopf's own watch does not do - a deletion for every child
that a fresh list no longer has.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from baton_operator.api import ApiError, Expired, Kind, KubeApi
from baton_operator.heads import Head, child_of, decode_event, decode_head, owner_name
from baton_operator.models import ObjectKey
from baton_operator.names import CHILD_SELECTOR
from baton_operator.store import Change, ChildStore

log = logging.getLogger(__name__)

_BACKOFF_CAP_SECONDS = 30.0

OnChange = Callable[[ObjectKey, Change], None]


class _Version(msgspec.Struct, rename="camel"):
    resource_version: str = ""


class _Bookmark(msgspec.Struct):
    metadata: _Version


class _Failure(msgspec.Struct):
    code: int = 0
    reason: str = ""
    message: str = ""


@dataclass(slots=True)
class WatchHealth:
    """When a kind was last heard of (monotonic seconds), and how often its watch broke."""

    heard_at: float = 0.0
    restarts: int = 0
    has_synced: asyncio.Event = field(default_factory=asyncio.Event)


class Reflector:
    """Keeps one kind current in the store. `run` never returns by itself."""

    def __init__(
        self,
        kube: KubeApi,
        kind: Kind,
        store: ChildStore,
        on_change: OnChange,
        *,
        namespace: str = "",
        is_metadata_only: bool,
    ) -> None:
        self._kube = kube
        self._kind = kind
        self._store = store
        self._on_change = on_change
        self._namespace = namespace
        self._is_metadata_only = is_metadata_only
        self.health = WatchHealth()

    @property
    def kind(self) -> Kind:
        """The kind that is watched."""
        return self._kind

    async def run(self) -> None:
        """List, then watch; list again only when the server lost our place."""
        version, failures = "", 0
        while True:
            try:
                if not version:
                    version = await self.list_all()
                version = await self.watch_once(version)
                failures = 0
            except Expired:
                version = ""
            except ApiError as error:
                failures += 1
                self.health.restarts += 1
                if 400 <= error.status < 500:
                    version = ""
                log.warning("watch broke", extra={"kind": self._kind.kind, "error": str(error)})
                pause = min(_BACKOFF_CAP_SECONDS, 0.1 * 2.0 ** min(failures, 10))
                await asyncio.sleep(pause * random.uniform(0.5, 1.5))  # noqa: S311 - jitter

    async def list_all(self) -> str:
        """Bring the store to what the server has now; return the version to watch from."""
        before = self._store.uids(self._kind)
        seen: set[tuple[ObjectKey, str]] = set()
        token, version = "", ""
        while True:
            page = await self._kube.list_page(
                self._kind,
                self._namespace,
                CHILD_SELECTOR,
                is_metadata_only=self._is_metadata_only,
                token=token,
            )
            for item in page.items:
                place = self._observe(decode_head(item))
                if place is not None:
                    seen.add(place)
            version, token = page.resource_version, page.token
            if not token:
                break
        for (owner, name), uid in before.items():
            if (owner, name) not in seen:
                self._notify(owner, self._store.gone(owner, self._kind, name, uid))
        self.health.heard_at = time.monotonic()
        self.health.has_synced.set()
        return version

    async def watch_once(self, version: str) -> str:
        """Follow one watch stream to its end; return the version to go on from."""
        stream = self._kube.watch(
            self._kind,
            self._namespace,
            CHILD_SELECTOR,
            version,
            is_metadata_only=self._is_metadata_only,
        )
        async for line in stream:
            self.health.heard_at = time.monotonic()
            version = self._handle(line) or version
        # It was open until now: a kind without objects has nothing else to say.
        self.health.heard_at = time.monotonic()
        return version

    def _handle(self, line: bytes) -> str:
        event = decode_event(line)
        if event.type == "ERROR":
            failure = msgspec.json.decode(event.object, type=_Failure)
            kind = Expired if failure.code == 410 else ApiError
            raise kind(failure.code, failure.reason, failure.message)
        if event.type == "BOOKMARK":
            return msgspec.json.decode(event.object, type=_Bookmark).metadata.resource_version
        head = decode_head(event.object)
        if event.type == "DELETED":
            self._forget(head)
        else:
            self._observe(head)
        return head.metadata.resource_version

    def _observe(self, head: Head) -> tuple[ObjectKey, str] | None:
        name = owner_name(head)
        if not name:
            return None
        owner = ObjectKey(head.metadata.namespace, name)
        child = child_of(head, self._kind.kind)
        self._notify(owner, self._store.observed(owner, self._kind, child))
        return owner, child.name

    def _forget(self, head: Head) -> None:
        owner = ObjectKey(head.metadata.namespace, owner_name(head))
        change = self._store.gone(owner, self._kind, head.metadata.name, head.metadata.uid)
        self._notify(owner, change)

    def _notify(self, owner: ObjectKey, change: Change) -> None:
        if change is not Change.NONE:
            self._on_change(owner, change)
