"""Whether kopf's watch of PDDeployments still tells what happens: asked of the server now and then.

That watch is kopf's own, and it may end without a word: its task waits for ever, its list is
refused again and again, a proxy holds a dead connection open. Silence proves nothing where nobody
changes anything, so the proof is news that others can see and we were never told.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from baton_operator.cluster.api import PD_DEPLOYMENT, ApiError, KubeApi
from baton_operator.cluster.parents import ParentStore
from baton_operator.cluster.partial_objects import decode_partial
from baton_operator.models import ObjectKey

log = logging.getLogger(__name__)

INTERVAL_SECONDS = 60.0
LATE_SECONDS = 120.0
"""Age of news that we were not told, from which on the watch counts as dead."""


class _Missed(NamedTuple):
    """A version that was listed and is not known; 0 for the end of an object."""

    version: int
    since: float


class ParentAudit:
    """Compares the server's list with what events told."""

    def __init__(
        self,
        kube: KubeApi,
        parents: ParentStore,
        namespace: str = "",
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._kube = kube
        self._parents = parents
        self._namespace = namespace
        self._clock = clock
        self._sleep = sleep
        self._missed: dict[ObjectKey, _Missed] = {}

    async def run(self) -> None:
        """Look for ever; a server that does not answer proves nothing either way."""
        while True:
            await self._sleep(INTERVAL_SECONDS)
            try:
                await self.look()
            except ApiError as error:
                log.warning("list of PDDeployments failed", extra={"error": str(error)})

    async def look(self) -> None:
        """List once and note what is not known yet; what was told since is forgotten.

        Raises:
            ApiError: the server refused or did not answer.
        """
        before = set(self._parents.keys())
        listed = await self._list()
        news = {k: v for k, v in listed.items() if v > self._parents.version(k)}
        ends = dict.fromkeys(before.intersection(self._parents.keys()) - listed.keys(), 0)
        now = self._clock()
        self._missed = {
            key: held if (held := self._still_missed(key)) else _Missed(version, now)
            for key, version in (news | ends).items()
        }

    def problems(self) -> list[str]:
        """Return what the watch should have told long ago, in words for `/healthz`."""
        now = self._clock()
        late = [now - m.since for k in self._missed if (m := self._still_missed(k))]
        oldest = max(late, default=0.0)
        if oldest < LATE_SECONDS:
            return []
        return [f"the watch of PDDeployment told nothing of {len(late)} changes for {oldest:.0f} s"]

    def _still_missed(self, key: ObjectKey) -> _Missed | None:
        missed = self._missed.get(key)
        if missed is None:
            return None
        known = self._parents.version(key)
        is_told = known >= missed.version if missed.version else not known
        return None if is_told else missed

    async def _list(self) -> dict[ObjectKey, int]:
        found: dict[ObjectKey, int] = {}
        token = ""
        while True:
            page = await self._kube.list_page(
                PD_DEPLOYMENT, self._namespace, "", is_metadata_only=True, token=token
            )
            for item in page.items:
                meta = decode_partial(item).metadata
                found[ObjectKey(meta.namespace, meta.name)] = int(meta.resource_version)
            token = page.token
            if not token:
                return found
