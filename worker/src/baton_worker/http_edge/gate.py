"""The doorkeeper of one listener: how many connections, of whom, and how many bytes of bodies.

Pure but for the counters; lives on its listener's event loop.
"""

from __future__ import annotations

import ipaddress
import logging
import time
from collections import Counter
from collections.abc import Callable

from baton_worker.config import HttpLimits
from baton_worker.http_edge.metrics import HttpMetrics
from baton_worker.http_edge.refusals import ALL, CONNECTIONS, OF_ADDRESS, Refusal
from baton_worker.logs import Seldom

log = logging.getLogger(__name__)

_IPV6_SITE_BITS = 64
"""Of an IPv6 address, what one peer cannot choose as it likes."""


class Gate:
    """Counts a listener's connections against its limits.

    Attributes:
        limits: these.
        faults: what breaks on the listener's event loop.
    """

    def __init__(
        self,
        listener: str,
        limits: HttpLimits,
        metrics: HttpMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self.faults = metrics.faults
        self._listener = listener
        self._seldom = Seldom(clock)
        self._connections = 0
        self._of_address: Counter[str] = Counter()
        self._receiving_bytes = 0
        self._open = metrics.connections(listener)
        self._refused = {each.reason: metrics.refused(listener, each.reason) for each in ALL}

    def enter(self, address: str) -> Refusal | None:
        """Count a connection; return why it may not stay. It leaves all the same."""
        peer = peer_of(address)
        self._connections += 1
        self._of_address[peer] += 1
        self._open.set(self._connections)
        if self._connections > self.limits.max_connections:
            return CONNECTIONS
        if peer and self._of_address[peer] > self.limits.max_connections_per_address:
            return OF_ADDRESS
        return None

    def leave(self, address: str) -> None:
        """Forget a connection that entered."""
        peer = peer_of(address)
        self._connections -= 1
        self._of_address[peer] -= 1
        if not self._of_address[peer]:
            del self._of_address[peer]
        self._open.set(self._connections)

    def receive(self, n_bytes: int) -> bool:
        """Account bytes of a body (negative: let go of them); False if it is too much for all."""
        self._receiving_bytes += n_bytes
        return self._receiving_bytes <= self.limits.max_receiving_bytes

    def refused(self, refusal: Refusal, address: str) -> None:
        """Count and log a refusal."""
        self._refused[refusal.reason].inc()
        if self._seldom.is_due(refusal.reason):
            facts = {"listener": self._listener, "why": refusal.reason, "peer": address}
            log.warning("HTTP refused (the counter knows how many more)", extra=facts)


def peer_of(address: str) -> str:
    """Return whom an address is counted for: itself, or its network of 64 bits for IPv6.

    Empty for a Unix socket's peer, who is nobody in particular.
    """
    if ":" not in address:
        return address
    known = ipaddress.IPv6Address(address.partition("%")[0])
    if known.ipv4_mapped is not None:
        return str(known.ipv4_mapped)
    return str(ipaddress.IPv6Network((known, _IPV6_SITE_BITS), strict=False))
