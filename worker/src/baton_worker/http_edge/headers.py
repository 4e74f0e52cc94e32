"""What a request's headers say of its body, before any of it has come. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

CONTINUE = b"100-continue"
"""The one expectation that there is: to be told that the body may come."""

Headers = Iterable[tuple[bytes, bytes]]


def announced_bytes(headers: Headers) -> int:
    """Return how long the body is going to be: at least 1 where nobody says, 0 without one."""
    found = 0
    for name, value in headers:
        if name == b"content-length" and value.isdigit():
            found = max(found, int(value[:20]))
        elif name == b"transfer-encoding":
            found = max(found, 1)
    return found


def expectations(headers: Headers) -> set[bytes]:
    """Return what the client wants to be told before it goes on."""
    return set(_members(headers, b"expect"))


def is_encoded(headers: Headers) -> bool:
    """Whether the body is not the bytes that it stands for."""
    codings = {*_members(headers, b"content-encoding")} - {b"identity"}
    return bool(codings or {*_members(headers, b"transfer-encoding")} - {b"chunked"})


def names_no_host(headers: Headers, version: str) -> bool:
    """Whether nobody can say whom a request is for: RFC 9112, 3.2 has a server refuse one with
    several hosts, among which everybody on its way takes another, and from HTTP/1.1 on one without.
    """
    n_hosts = sum(name == b"host" for name, _ in headers)
    return n_hosts > 1 or (n_hosts == 0 and version >= "1.1")


def head_without_upgrade(method: bytes, target: bytes, version: str, headers: Headers) -> bytes:
    """Return a request's head as it was, but that it asks for no other protocol, as Java's
    HttpClient does of each request in the clear. What `Connection` says of that means nothing then.
    """
    lines = [b"%b %b HTTP/%b" % (method, target, version.encode())]
    lines += [b"%b: %b" % (name, value) for name, value in headers if name != b"upgrade"]
    return b"\r\n".join([*lines, b"", b""])


def _members(headers: Headers, wanted: bytes) -> Iterator[bytes]:
    for name, value in headers:
        if name == wanted:
            yield from filter(None, (member.strip().lower() for member in value.split(b",")))
