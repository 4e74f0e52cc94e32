"""Asking pods over HTTP: the operator's only way into the data plane, and only to read."""

from __future__ import annotations

import aiohttp
import msgspec

from baton_operator.names import PORT_HEALTH


class _Drain(msgspec.Struct):
    remaining: int


class HttpPodProbe:
    """See `scalein.PodProbe`."""

    def __init__(
        self, session: aiohttp.ClientSession, wait_seconds: float, port: int = PORT_HEALTH
    ) -> None:
        self._session = session
        self._limits = aiohttp.ClientTimeout(total=wait_seconds)
        self._port = port

    async def remaining(self, ip: str) -> int | None:
        """See `PodProbe`; a pod that answers something else counts as silent."""
        if not ip:
            return None
        host = f"[{ip}]" if ":" in ip else ip
        try:
            async with self._session.get(
                f"http://{host}:{self._port}/drain", timeout=self._limits
            ) as response:
                return msgspec.json.decode(await response.read(), type=_Drain).remaining
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError):
            return None

    async def metrics(self, ip: str) -> str | None:
        """See `telemetry.MetricsProbe`."""
        host = f"[{ip}]" if ":" in ip else ip
        try:
            async with self._session.get(
                f"http://{host}:{self._port}/metrics", timeout=self._limits
            ) as response:
                return await response.text() if response.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, UnicodeDecodeError):
            return None
