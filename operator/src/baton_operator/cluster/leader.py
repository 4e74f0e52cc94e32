"""Leader election by Lease: at most one process writes.

The rules are client-go's. A candidate takes the Lease when nobody holds it, or when its record has
not changed for a whole lease duration by the candidate's own clock; clocks of machines are never
compared. A leader that cannot renew within its deadline raises, because work that goes on without
the Lease would have two writers. (`kubernetes.aio` 37.0.2 has an election of its own; its Lease
cannot be created, and an unreachable server ends it.)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec

from baton_operator.cluster.api import (
    LEASE,
    UNDECODABLE,
    AlreadyExists,
    ApiError,
    Conflict,
    Json,
    KubeApi,
)
from baton_operator.names import FIELD_MANAGER

log = logging.getLogger(__name__)

_RELEASE_ATTEMPTS = 3
"""A renewal that was given up on its way may still arrive, and change the Lease once."""


class LeadershipLost(RuntimeError):
    """The Lease could not be renewed in time: another process may lead by now."""


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """Seconds; `renew` must be below `duration`, so that a leader stops before another begins."""

    duration: float
    renew: float
    retry: float


class Leadership:
    """One candidacy: `led` is `acquire`, then `hold` beside the work, then `release`."""

    def __init__(
        self,
        kube: KubeApi,
        place: tuple[str, str],
        identity: str,
        times: LeaseTimes,
        *,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`place` is namespace and name of the Lease; `clock` gives monotonic seconds."""
        self._kube = kube
        self._namespace, self._name = place
        self._identity = identity
        self._times = times
        self._clock = clock
        self._sleep = sleep
        self._record: Json = {}
        self._record_since = self._renewed_at = 0.0
        self._held: Json | None = None

    async def acquire(self) -> None:
        """Return once this process leads."""
        log.info("waiting to lead", extra={"identity": self._identity})
        while not await self.attempt():
            await self._sleep(self._times.retry)
        log.info("leading", extra={"identity": self._identity})

    async def hold(self) -> None:
        """Renew until that fails.

        Raises:
            LeadershipLost: always, at the end.
        """
        while True:
            await self._sleep(self._times.retry)
            # If this process stood still, to ask first would let it write meanwhile.
            self._give_up_after(self._times.renew)
            left = self._renewed_at + self._times.renew - self._clock()
            if not await self.attempt(left):
                self._give_up_after(self._times.renew - self._times.retry)

    def _give_up_after(self, seconds: float) -> None:
        since = self._clock() - self._renewed_at
        if since >= seconds:
            raise LeadershipLost(f"not renewed for {since:.1f} s")

    @contextlib.asynccontextmanager
    async def led(self, group: asyncio.TaskGroup) -> AsyncIterator[None]:
        """Lead for the length of the block: acquire, renew in a task of `group`, release.

        Renewing ends before the Lease is released: a renewal beside it would make the release fail,
        or take the Lease again for a process that ends.
        """
        await self.acquire()
        holding = group.create_task(self.hold(), name="lease")
        try:
            yield
        finally:
            holding.cancel()
            await asyncio.wait([holding])
            await self.release()

    async def release(self) -> None:
        """Give the Lease up if it is still ours; a failure only makes a standby wait."""
        try:
            for _ in range(_RELEASE_ATTEMPTS):
                with contextlib.suppress(Conflict):
                    return await self._give_up()
            log.warning("lease not released", extra={"error": "it changed at each attempt"})
        except ApiError as error:
            log.warning("lease not released", extra={"error": str(error)})

    async def _give_up(self) -> None:
        lease = await self._kube.get(LEASE, self._namespace, self._name)
        if lease is not None and _holder(lease) == self._identity:
            await self._write(lease, {"holderIdentity": None})

    async def attempt(self, most_seconds: float = math.inf) -> bool:
        """Take or renew the Lease; False when another holds it or the server does not answer."""
        tried_at = self._clock()
        try:
            async with asyncio.timeout(min(self._times.retry, most_seconds)):
                has_it = await self._take()
        except (ApiError, TimeoutError, *UNDECODABLE) as error:
            log.warning("lease attempt failed", extra={"error": repr(error)})
            return False
        if has_it:  # since it asked, not since it knows: the others may count from that on
            self._renewed_at = tried_at
        return has_it

    async def _take(self) -> bool:
        if await self._renew_unread():
            return True
        lease = await self._kube.get(LEASE, self._namespace, self._name)
        if lease is None:
            return await self._create()
        self._observe(lease)
        holder = _holder(lease)
        if holder == self._identity:
            self._held = await self._write(lease, {"renewTime": _now()})
            return True
        if holder and self._clock() - self._record_since < self._times.duration:
            return False
        transitions = (lease.get("spec") or {}).get("leaseTransitions") or 0
        claim = self._claim() | {"leaseTransitions": transitions + 1}
        self._held = await self._write(lease, claim)
        return True

    async def _renew_unread(self) -> bool:
        """Renew the Lease as our last write left it: of an idle operator's work this is most.

        When that fails for any reason, the next attempt reads what is there.
        """
        held, self._held = self._held, None
        if held is None:
            return False
        try:
            self._held = await self._write(held, {"renewTime": _now()})
        except Conflict:
            return False
        return True

    def _observe(self, lease: Json) -> None:
        record = lease.get("spec") or {}
        if record != self._record:
            self._record, self._record_since = record, self._clock()

    async def _create(self) -> bool:
        manifest = {
            "apiVersion": LEASE.api_version,
            "kind": LEASE.kind,
            "metadata": {"name": self._name, "namespace": self._namespace},
            "spec": self._claim() | {"leaseTransitions": 0},
        }
        try:
            answer = await self._kube.create(LEASE, manifest, FIELD_MANAGER)
        except AlreadyExists:
            return False
        self._held = msgspec.json.decode(answer)
        return True

    def _claim(self) -> Json:
        now = _now()
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": max(1, round(self._times.duration)),
            "acquireTime": now,
            "renewTime": now,
        }

    async def _write(self, lease: Json, spec: Json) -> Json:
        """Change the Lease as it was read; raises Conflict when another was faster."""
        version = lease["metadata"]["resourceVersion"]
        patch = {"metadata": {"resourceVersion": version}, "spec": spec}
        return await self._kube.merge(LEASE, self._namespace, self._name, patch)


def _holder(lease: Json) -> str:
    return (lease.get("spec") or {}).get("holderIdentity") or ""


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
