"""List and watch of one kind into the child store: a small informer.

kopf watches the PDDeployments; children are watched here, because they are ten times as many and
need less: partial objects decoded from the wire instead of whole bodies, metadata alone for kinds
whose content we only ever write, and - what kopf's own watch does not do - a deletion for every
child that a fresh list no longer has.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

import msgspec

from baton_operator.cluster.api import (
    UNDECODABLE,
    UNREADABLE,
    ApiError,
    Expired,
    Kind,
    KubeApi,
    Throttled,
)
from baton_operator.cluster.partial_objects import (
    PartialObject,
    child_of,
    decode_event,
    decode_partial,
    owner_name,
)
from baton_operator.cluster.store import Change, ChildStore
from baton_operator.models import ObjectKey
from baton_operator.names import CHILD_SELECTOR

log = logging.getLogger(__name__)

_BACKOFF_CAP_SECONDS = 30.0

OnChange = Callable[[ObjectKey, Change], None]


@dataclass(frozen=True, slots=True)
class Pace:
    """The clock of a reflector, its pause, and the jitter of that; tests replace them."""

    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    jitter: Callable[[float, float], float] = random.uniform


def _uncounted(_kind: str, _why: str) -> None:
    return None


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
        count: Callable[[str, str], None] = _uncounted,
        pace: Pace | None = None,
    ) -> None:
        """`count` is called with kind and reason of every list or watch that did not last."""
        self._kube = kube
        self._kind = kind
        self._store = store
        self._on_change = on_change
        self._namespace = namespace
        self._is_metadata_only = is_metadata_only
        self._count = count
        self._pace = pace or Pace()
        self._news = 0
        self._owners: dict[tuple[str, str], ObjectKey] = {}
        """Whom each object was last told of to belong to, by namespace and name."""
        self.health = WatchHealth()

    @property
    def kind(self) -> Kind:
        """The kind that is watched."""
        return self._kind

    async def run(self) -> None:
        """List, then watch; list again only when the server lost our place.

        A stream that brought news may end whenever it likes. Whatever else ends early is tried
        again with a growing pause: a server that answers at once and says nothing, or that expires
        every place that it gives, would be asked as fast as it can answer.
        """
        version, failures = "", 0
        while True:
            started, news, error = self._pace.clock(), self._news, None
            try:
                if not version:
                    version = await self.list_all()
                version = await self.watch_once(version)
            except ApiError as caught:
                error = caught
                if _loses_place(error):
                    version = ""
            has_news = self._news > news
            failures = 0 if has_news and error is None else 1 if has_news else failures + 1
            await self._rest(failures, self._pace.clock() - started, error)

    async def _rest(self, failures: int, lived_seconds: float, error: ApiError | None) -> None:
        """Pause for what the last attempt fell short of its back-off; count what was short."""
        pause = min(_BACKOFF_CAP_SECONDS, 0.1 * 2.0 ** min(failures, 10)) if failures else 0.0
        if isinstance(error, Throttled):
            pause = max(pause, error.retry_after_seconds)
        pause = pause * self._pace.jitter(0.5, 1.5) - lived_seconds
        if error is None and pause <= 0:
            return
        why = "empty" if error is None else "expired" if isinstance(error, Expired) else "error"
        self.health.restarts += 1
        self._count(self._kind.kind, why)
        extra = {"kind": self._kind.kind, "why": why, "error": str(error or "")}
        log.warning("watch broke", extra={**extra, "pause_seconds": round(max(0.0, pause), 3)})
        if pause > 0:
            await self._pace.sleep(pause)

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
                with _reading():
                    partial = decode_partial(item)
                place = self._observe(partial)
                if place is not None:
                    seen.add(place)
            version, token = page.resource_version, page.token
            if not token:
                break
        for (owner, name), uid in before.items():
            if (owner, name) not in seen:
                if self._owners.get((owner.namespace, name)) == owner:
                    del self._owners[owner.namespace, name]
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
        async with contextlib.aclosing(stream):  # or it stays open through the pause behind it
            async for line in stream:
                self.health.heard_at = time.monotonic()
                with _reading():
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
        partial = decode_partial(event.object)
        self._news += 1
        if event.type == "DELETED":
            self._forget(partial)
        else:
            self._observe(partial)
        return partial.metadata.resource_version

    def _observe(self, partial: PartialObject) -> tuple[ObjectKey, str] | None:
        meta, name = partial.metadata, owner_name(partial)
        owner = ObjectKey(meta.namespace, name)
        before = self._owners.get((meta.namespace, meta.name), owner)
        if before != owner:  # its label was edited: who had it must look, and make it right
            self._notify(before, self._store.gone(before, self._kind, meta.name, meta.uid))
            del self._owners[meta.namespace, meta.name]
        if not name:
            return None
        self._owners[meta.namespace, meta.name] = owner
        child = child_of(partial, self._kind.kind)
        self._notify(owner, self._store.observed(owner, self._kind, child))
        return owner, child.name

    def _forget(self, partial: PartialObject) -> None:
        meta = partial.metadata
        named = ObjectKey(meta.namespace, owner_name(partial))
        owner = self._owners.pop((meta.namespace, meta.name), named)
        change = self._store.gone(owner, self._kind, meta.name, meta.uid)
        self._notify(owner, change)

    def _notify(self, owner: ObjectKey, change: Change) -> None:
        if change is not Change.NONE:
            self._on_change(owner, change)


def _loses_place(error: ApiError) -> bool:
    """Whether to list again before the next watch: not for a server that has too much to do, which
    a list would cost most.
    """
    is_refusal = 400 <= error.status < 500 and not isinstance(error, Throttled)
    return isinstance(error, Expired) or is_refusal


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    """Let what cannot be read be a failure of the server: a stream that breaks may cut a line."""
    try:
        yield
    except UNDECODABLE as error:
        raise ApiError(0, UNREADABLE, str(error)) from error
