"""Asking pods over HTTP: the operator's only way into the data plane, and only to read.

What a pod says is not believed: one that somebody took over must not fill this process's memory,
nor send it anywhere.
"""

from __future__ import annotations

from http import HTTPStatus

import aiohttp
import msgspec

MAX_ANSWER_BYTES = 1 << 20
"""A worker's page of metrics has a tenth of that."""


class _Drain(msgspec.Struct):
    remaining: int


class HttpPodProbe:
    """See `scale_in.PodProbe`."""

    def __init__(self, session: aiohttp.ClientSession, wait_seconds: float) -> None:
        self._session = session
        self._limits = aiohttp.ClientTimeout(total=wait_seconds)

    async def remaining(self, ip: str, port: int) -> int | None:
        """See `PodProbe`; a pod that answers something else counts as silent."""
        answer = await self._ask(ip, port, "/drain") if ip else None
        try:
            return None if answer is None else msgspec.json.decode(answer, type=_Drain).remaining
        except (msgspec.MsgspecError, RecursionError):
            return None

    async def metrics(self, ip: str, port: int) -> str | None:
        """See `telemetry.MetricsProbe`."""
        answer = await self._ask(ip, port, "/metrics")
        return None if answer is None else answer.decode(errors="replace")

    async def readiness(self, ip: str, port: int) -> bytes | None:
        """See `telemetry.MetricsProbe`."""
        return await self._ask(ip, port, "/readyz")

    async def _ask(self, ip: str, port: int, path: str) -> bytes | None:
        """Return what a pod says; None when it says nothing, too much, or that somebody else knows.

        It is taken as it comes: packed, a little could become more than there is memory.
        """
        host = f"[{ip}]" if ":" in ip else ip
        try:
            async with self._session.get(
                f"http://{host}:{port}{path}",
                timeout=self._limits,
                allow_redirects=False,
                auto_decompress=False,
                headers={"Accept-Encoding": "identity"},
            ) as response:
                return (
                    await _bounded(response.content) if response.status == HTTPStatus.OK else None
                )
        except (aiohttp.ClientError, TimeoutError):
            return None


async def _bounded(content: aiohttp.StreamReader) -> bytes | None:
    found = bytearray()
    while piece := await content.readany():
        found += piece
        if len(found) > MAX_ANSWER_BYTES:
            return None
    return bytes(found)
