"""Addresses as text and as listening sockets, IPv4 and IPv6 alike.

Owns how a host is written before a port, and what `*` means: every address that this machine has,
of both families where it has both. A pod's IP comes without brackets; an endpoint needs them.
"""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit

EVERY = "*"
_EVERY_HOST = frozenset({EVERY, "0.0.0.0", "::"})  # noqa: S104 - compared, not bound
_DUAL = "::"
_IPV4_ONLY = "0.0.0.0"  # noqa: S104 - what * means on a machine without IPv6
_MOST_NAME_BYTES = 253
_MOST_PORT = 65535


def bracketed(host: str) -> str:
    """Return `host` as it stands before `:port`: an IPv6 address in brackets, all else as it is."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def tcp_endpoint(host: str, port: int) -> str:
    """Return `tcp://host:port`."""
    return f"tcp://{bracketed(host)}:{port}"


def http_url(host: str, port: int) -> str:
    """Return `http://host:port`."""
    return f"http://{bracketed(host)}:{port}"


def host_of_bind(bind: str) -> str:
    """Return the host of `tcp://host:port`, `*` for either, without brackets; "" if `bind` is no
    such endpoint.
    """
    at, host = bind.removeprefix("tcp://"), ""
    if at != bind:
        host, _, port = at.rpartition(":")
        if not _is_port(port) and port != EVERY:
            host = ""
    is_bare_ipv6 = ":" in host and not host.startswith("[")
    return "" if is_bare_ipv6 else host.strip("[]")


def _is_port(text: str) -> bool:
    """ZeroMQ takes larger ones too, and listens on what is left of them by 65536."""
    is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(_MOST_PORT))
    return is_number and int(text) <= _MOST_PORT


def is_every_host(host: str) -> bool:
    """Whether `host` means every address: fit for listening, not for being called."""
    return host.strip("[]") in _EVERY_HOST


def callable_host(listening: str, advertised: str) -> str:
    """Return the host that others call: `advertised` if there is one, else where it listens.

    Who listens on every address and was not told a name can be called on loopback only.
    """
    if advertised:
        return advertised.strip("[]")
    host = listening.strip("[]")
    return host if not is_every_host(host) else "127.0.0.1"


def may_be_host(host: str) -> bool:
    """Whether `host` is an address, or may be a name: each part between dots has 1 to 63 bytes, all
    of it 253 at most, and no blanks. What is looked up and is neither is no miss of the resolver's
    but a `UnicodeError`.
    """
    try:
        encoded = host.encode("idna")
    except UnicodeError:
        return False
    is_one_word = host != "" and host.isprintable() and " " not in host
    return is_one_word and len(encoded.removesuffix(b".")) <= _MOST_NAME_BYTES


def is_ipv6(host: str) -> bool:
    """Whether `host` is an IPv6 address, with or without brackets or a zone."""
    try:
        return ipaddress.ip_address(host.strip("[]")).version == 6
    except ValueError:
        return False


def has_ipv6() -> bool:
    """Whether this machine can listen on IPv6: a kernel may have it turned off."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind((_DUAL, 0))
    except OSError:
        return False
    return True


def bindable_host(host: str) -> str:
    """Return a host that can be bound, without brackets, `*` replaced by what it means here."""
    if host == EVERY:
        return _DUAL if has_ipv6() else _IPV4_ONLY
    return host.strip("[]")


def bindable(endpoint: str) -> str:
    """Return a `tcp://` endpoint that can be bound, `*` replaced by what it means here."""
    parts = urlsplit(endpoint)
    if parts.scheme != "tcp" or not parts.netloc.startswith(f"{EVERY}:"):
        return endpoint
    port = parts.netloc.removeprefix(f"{EVERY}:")
    return f"tcp://{bracketed(bindable_host(EVERY))}:{port}"


def listen(host: str, port: int, backlog: int) -> socket.socket:
    """Return a listening socket; on `*` and `::` it takes both families.

    Raises:
        OSError: the address cannot be listened on.
    """
    host = bindable_host(host)
    if ":" not in host:
        return socket.create_server((host, port), backlog=backlog)
    return socket.create_server(
        (host, port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=host == _DUAL
    )


def join_port(host: str, port: int) -> socket.socket:
    """Return a socket as `listen` does, on a port where others listen too that took it so. It does
    not listen yet: the kernel gives connections to whoever does, and refuses them where nobody
    does.

    Raises:
        OSError: the address cannot be listened on, or somebody has it alone.
    """
    host = bindable_host(host)
    is_v6 = ":" in host
    joined = socket.socket(socket.AF_INET6 if is_v6 else socket.AF_INET)
    try:
        joined.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        joined.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if is_v6:
            joined.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(host != _DUAL))
        joined.bind((host, port))
        # Needed for the bind alone, beside who keeps the port and what an earlier listener left:
        # from here on whoever comes without SO_REUSEPORT is refused, though nobody listens yet.
        joined.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError:
        joined.close()
        raise
    return joined
