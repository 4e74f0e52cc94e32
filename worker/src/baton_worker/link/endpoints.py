"""Where the gateways are: a fixed list, or every address of a headless service's name.

Owns name resolution, on its own thread because a resolver may wait for seconds. Knows nothing of
sockets.
"""

from __future__ import annotations

import logging
import re
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

from baton_worker.addresses import may_be_host, tcp_endpoint
from baton_worker.config import ConfigError, LinkConfig

log = logging.getLogger(__name__)

RESOLVE_SECONDS = 5.0

_ADDRESS = re.compile(
    r"tcp://(?P<host>[^:/\[\]\s]+|\[[0-9a-fA-F:.]+(%\w+)?\]):(?P<port>[0-9]{1,5})"
)
_MAX_PORT = 65535


def static_endpoints(config: LinkConfig) -> tuple[str, ...]:
    """Return the configured list, each address once.

    Raises:
        ConfigError: neither or both of `link.gateways` and `link.dns` are set, or an address is
            not `tcp://host:port`, or no host can have the name.
    """
    if bool(config.gateways) == bool(config.dns):
        raise ConfigError("link.gateways: set either it or link.dns, so that gateways can be found")
    if config.dns and not may_be_host(config.dns):
        raise ConfigError(
            f"link.dns is {config.dns!r}, which no host can be called: each part between dots has "
            "1 to 63 characters, and none is a blank"
        )
    for endpoint in config.gateways:
        if not is_endpoint(endpoint):
            raise ConfigError(f"link.gateways: {endpoint!r} is not tcp://host:port")
    return tuple(dict.fromkeys(config.gateways))


def is_endpoint(text: str) -> bool:
    """Whether `text` is `tcp://host:port`, an IPv6 address in brackets."""
    found = _ADDRESS.fullmatch(text)
    return found is not None and 0 < int(found["port"]) <= _MAX_PORT and may_be_host(found["host"])


def resolve(name: str, port: int) -> frozenset[str]:
    """Return the endpoints behind a name, of one address family only.

    A pod with an IPv4 and an IPv6 address is one gateway, and must be called once.

    Raises:
        OSError: the name does not resolve.
    """
    found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    family = found[0][0]
    hosts = {str(address[0]) for kind, _, _, _, address in found if kind == family}
    return frozenset(tcp_endpoint(host, port) for host in hosts)


def has_only_ipv6(endpoint: str) -> bool:
    """Whether an endpoint's host is a name with IPv6 addresses and no other. May wait for seconds.

    A socket speaks one family. Where there is a choice it is IPv4, as for a name that does not
    resolve yet.
    """
    host = urlsplit(endpoint).hostname or ""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        log.warning("gateway not resolved", extra={"endpoint": endpoint, "error": str(error)})
        return False
    return {family for family, *_ in found} == {socket.AF_INET6}


def over_ipv6(endpoints: Sequence[str]) -> frozenset[str]:
    """Return those that `has_only_ipv6`; all are looked up at once, so the slowest is waited for.

    It is waited for once, at the start, and not once for each.
    """
    if not endpoints:
        return frozenset()
    with ThreadPoolExecutor(len(endpoints), "baton-resolver") as pool:
        found = pool.map(has_only_ipv6, endpoints)
        return frozenset(endpoint for endpoint, only in zip(endpoints, found, strict=True) if only)


class Resolver:
    """Resolves a name again and again and reports each answer that differs from the last."""

    def __init__(
        self,
        name: str,
        port: int,
        on_change: Callable[[frozenset[str]], None],
        resolve_seconds: float,
    ) -> None:
        """Report to `on_change`, on the resolver's thread, once started."""
        self._name = name
        self._port = port
        self._on_change = on_change
        self._resolve_seconds = resolve_seconds
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="baton-resolver", daemon=True)

    def start(self) -> None:
        """Begin resolving."""
        self._thread.start()

    def close(self) -> None:
        """Stop; an answer on its way is dropped. Does not wait for the resolver."""
        self._closing.set()

    def _run(self) -> None:
        last: frozenset[str] | None = None
        while not self._closing.is_set():
            try:
                found = resolve(self._name, self._port)
            except OSError as error:
                # Keep what was found before: a name server's outage is not the gateways'.
                log.warning("gateways not resolved", extra={"dns": self._name, "error": str(error)})
            else:
                if found != last and not self._closing.is_set():
                    last = found
                    self._on_change(found)
            self._closing.wait(self._resolve_seconds)
