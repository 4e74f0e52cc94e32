"""When objects appear, as a watch tells: the clock of the operator benchmark.

One watch for each kind of child. A time is the arrival of the event in this process, so it holds
the API server's delay and ours: what is reported is never better than what a client sees.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp

KINDS = {
    "Deployment": "/apis/apps/v1/deployments",
    "Service": "/api/v1/services",
    "ConfigMap": "/api/v1/configmaps",
    "Secret": "/api/v1/secrets",
    "ServiceAccount": "/api/v1/serviceaccounts",
    "PodDisruptionBudget": "/apis/policy/v1/poddisruptionbudgets",
    "NetworkPolicy": "/apis/networking.k8s.io/v1/networkpolicies",
}
_METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"


@dataclass(frozen=True, slots=True)
class Server:
    """Where the API server is and how to ask it as the admin."""

    url: str
    authority: str
    token: str


class Client:
    """The few calls that the benchmark needs; `writes` counts its own."""

    def __init__(self, server: Server) -> None:
        """Open connections lazily."""
        context = ssl.create_default_context(cafile=server.authority)
        self._session = aiohttp.ClientSession(
            server.url,
            connector=aiohttp.TCPConnector(ssl=context, limit=64),
            headers={"Authorization": f"Bearer {server.token}"},
            timeout=aiohttp.ClientTimeout(total=None, connect=10),
            read_bufsize=1 << 22,
        )
        self.writes = 0

    async def close(self) -> None:
        """Close every connection."""
        await self._session.close()

    async def send(self, method: str, path: str, body: dict[str, Any] | None = None) -> float:
        """Send a write and return when it was answered, on the monotonic clock."""
        self.writes += 1
        async with self._session.request(method, path, json=body) as answer:
            text = await answer.text()
            if answer.status >= 300:
                raise RuntimeError(f"{method} {path}: {answer.status} {text[:300]}")
        return time.monotonic()

    async def text(self, path: str) -> str:
        """Return the answer to a read."""
        async with self._session.get(path) as answer:
            answer.raise_for_status()
            return await answer.text()

    async def watch(
        self, path: str, selector: str, seen: Callable[[str, dict[str, Any]], None]
    ) -> None:
        """Call `seen` with type and metadata of every event until cancelled."""
        query = {"watch": "true", "labelSelector": selector, "resourceVersion": "0"}
        headers = {"Accept": _METADATA}
        async with self._session.get(path, params=query, headers=headers) as answer:
            answer.raise_for_status()
            async for line in answer.content:
                event = json.loads(line)
                if event["type"] in ("ADDED", "DELETED"):
                    seen(event["type"], event["object"]["metadata"])


class Arrivals:
    """First sight of each child, by the PDDeployment that it belongs to."""

    def __init__(self) -> None:
        """Know nothing yet."""
        self.added: dict[str, dict[tuple[str, str], float]] = defaultdict(dict)
        self._changed = asyncio.Event()

    def watch_all(self, client: Client, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        """Start one watch for each kind."""
        selector = "app.kubernetes.io/managed-by=baton-operator"
        return [
            group.create_task(client.watch(path, selector, self._sight(kind)))
            for kind, path in KINDS.items()
        ]

    async def until(self, is_true: Callable[[], bool], seconds: float) -> None:
        """Wait for arrivals until `is_true`.

        Raises:
            TimeoutError: it never was.
        """
        async with asyncio.timeout(seconds):
            while not is_true():
                self._changed.clear()
                await self._changed.wait()

    def _sight(self, kind: str) -> Callable[[str, dict[str, Any]], None]:
        def seen(event: str, metadata: dict[str, Any]) -> None:
            owner = metadata["labels"]["baton.dev/name"]
            if event == "ADDED":
                self.added[owner][kind, metadata["name"]] = time.monotonic()
            else:
                self.added[owner].pop((kind, metadata["name"]), None)
            self._changed.set()

        return seen
