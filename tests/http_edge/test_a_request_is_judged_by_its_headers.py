"""Nothing but a request's own head and its connection say what it is, whose, and where it goes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from uvicorn.server import ServerState

from baton_worker.config import HttpLimits
from baton_worker.http_edge.gate import Gate
from baton_worker.http_edge.metrics import HttpMetrics
from baton_worker.http_edge.server import application, server_config
from baton_worker.metrics import MetricFactory

CHUNKED = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n"


class Wire(asyncio.Transport):
    """A transport in memory, from loopback; says what was written and whether it was closed."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.said = b""
        self.is_closed = self.has_written_eof = False

    def write(self, data: Any) -> None:
        assert not self.is_closed
        assert not self.has_written_eof
        self.said += bytes(data)

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.has_written_eof = True

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True

    abort = close


async def tell(request: Request) -> Response:
    """Answer with what the request is taken for."""
    body = await request.body()
    names = sorted(name for name, _ in request.headers.items())
    who = request.client.host if request.client else ""
    return JSONResponse({"n": len(body), "names": names, "who": who, "url": str(request.url)})


APP = application([Route("/", tell, methods=["GET", "POST"]), Route("/more", tell)])


def said_to(*pieces: bytes) -> bytes:
    """Return what a listener on loopback answers to a connection's bytes, that come in pieces."""

    async def talk() -> bytes:
        gate = Gate("api", HttpLimits(), HttpMetrics(MetricFactory(CollectorRegistry(), "m", "r")))
        config = server_config(APP, gate)
        config.load()
        loop, make, wire = asyncio.get_running_loop(), config.http_protocol_class, Wire()
        protocol: Any = make(config=config, server_state=ServerState(), app_state={}, _loop=loop)  # type: ignore[operator]
        protocol.connection_made(wire)
        for piece in pieces:
            protocol.data_received(piece)
        for _ in range(20):
            await asyncio.sleep(0)
        protocol.connection_lost(None)
        return wire.said

    return asyncio.run(talk())


@pytest.mark.parametrize("trailer", [b"authorization: Bearer key", b"x-forwarded-for: 9.9.9.9"])
def test_what_stands_behind_a_body_is_no_header(trailer: bytes) -> None:
    answer = said_to(CHUNKED + trailer + b"\r\n\r\n")
    assert b'"n":2,"names":["host","transfer-encoding"]' in answer


def test_trailers_without_end_are_refused_all_the_same() -> None:
    trailers = b"".join(b"x-%d: %b\r\n" % (i, b"y" * 1000) for i in range(40))
    assert said_to(CHUNKED + trailers + b"\r\n").startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("allowed", [None, "*"])
def test_no_header_says_whose_a_request_is(
    monkeypatch: pytest.MonkeyPatch, allowed: str | None
) -> None:
    if allowed is not None:
        monkeypatch.setenv("FORWARDED_ALLOW_IPS", allowed)
    head = b"GET / HTTP/1.1\r\nhost: x\r\nx-forwarded-for: 9.9.9.9\r\nx-forwarded-proto: https\r\n"
    answer = said_to(head + b"\r\n")
    assert b'"who":"127.0.0.1","url":"http://x/"' in answer


def test_a_path_with_a_slash_too_many_is_sent_nowhere() -> None:
    answer = said_to(b"GET /more/ HTTP/1.1\r\nhost: elsewhere\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 404 ")
    assert b"elsewhere" not in answer


@pytest.mark.parametrize(
    ("version", "hosts"),
    [(b"1.1", []), (b"1.1", [b"x", b"y"]), (b"1.1", [b"x", b"x"]), (b"1.0", [b"x", b"y"])],
)
def test_a_request_that_names_no_one_host_is_refused(version: bytes, hosts: list[bytes]) -> None:
    head = b"GET / HTTP/" + version + b"\r\n" + b"".join(b"Host: %b\r\n" % host for host in hosts)
    answer = said_to(head + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b'"code":"host"' in answer


@pytest.mark.parametrize("head", [b"1.0\r\n", b"1.0\r\nhost: x\r\n", b"1.1\r\nhost:\r\n"])
def test_one_host_is_enough_and_http_1_0_needs_none(head: bytes) -> None:
    assert said_to(b"GET / HTTP/" + head + b"\r\n").startswith(b"HTTP/1.1 200 ")


NO_TARGETS = [b"http://x", b"http://x?y", b"x:443", "/\u00e9".encode()]


@pytest.mark.parametrize("method", [b"GET", b"CONNECT"])
@pytest.mark.parametrize("target", NO_TARGETS, ids=ascii)
def test_a_target_that_is_none_is_answered(method: bytes, target: bytes) -> None:
    answer = said_to(method + b" " + target + b" HTTP/1.1\r\nhost: x\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    code = b"tunnel" if method == b"CONNECT" and target.isascii() else b"malformed"
    assert b'"code":"%b"' % code in answer


@pytest.mark.parametrize("target", NO_TARGETS, ids=ascii)
def test_a_target_that_is_none_spoils_no_answer_before_it(target: bytes) -> None:
    before = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
    answer = said_to(before + b"GET " + target + b" HTTP/1.1\r\nhost: x\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b'"who":"127.0.0.1"' in answer
    assert answer.count(b"HTTP/1.1") == 1


UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
"""As Java's HttpClient writes it into each request, and into its body's head alone."""
BODIES = [
    b"content-length: 4\r\n\r\nabcd",
    b"transfer-encoding: chunked\r\n\r\n1\r\na\r\n3\r\nbcd\r\n0\r\n\r\n",
]


@pytest.mark.parametrize("body", BODIES, ids=["length", "chunks"])
@pytest.mark.parametrize("protocol", [b"h2c", b"websocket", b"TLS/1.0"])
def test_who_asks_for_another_protocol_is_answered_in_this_one(
    protocol: bytes, body: bytes
) -> None:
    asks = UPGRADE.replace(b"h2c", protocol)
    whole = b"POST / HTTP/1.1\r\nHost: x\r\n" + asks + body
    plain = said_to(whole.replace(b"Upgrade: " + protocol + b"\r\n", b""))
    assert plain.startswith(b"HTTP/1.1 200 ")
    assert b'"n":4' in plain
    assert without_date(said_to(whole)) == without_date(plain)
    singly = [whole[i : i + 1] for i in range(len(whole))]
    assert without_date(said_to(*singly)) == without_date(plain)


def test_requests_behind_one_that_asks_for_another_protocol_are_answered_too() -> None:
    asks = b"GET /more HTTP/1.1\r\nHost: x\r\n" + UPGRADE + b"\r\n"
    posts = b"POST / HTTP/1.1\r\nHost: x\r\n" + UPGRADE + BODIES[0]
    plain = b"GET /more HTTP/1.1\r\nHost: x\r\n\r\n"
    assert said_to(asks + posts + plain + asks).count(b"HTTP/1.1 200 ") == 4


@pytest.mark.parametrize("body", BODIES, ids=["length", "chunks"])
def test_a_body_in_another_protocols_name_is_bounded_as_any(body: bytes) -> None:
    head = b"POST / HTTP/1.1\r\nHost: x\r\n" + UPGRADE
    for wrong, told in (
        (b"content-length: 99999999999\r\n\r\n", b"body_too_large"),
        (b"content-encoding: gzip\r\n" + body, b"content_encoding"),
        (b"host: y\r\n" + body, b"host"),
        (b"content-length: 1\r\n" + body, b"malformed"),
        (b"transfer-encoding: chunked\r\n\r\nz\r\n", b"malformed"),
        (body.replace(b"\r\n\r\n", b"\r\nexpect: what\r\n\r\n", 1), b"unknown_expectation"),
    ):
        assert b'"code":"' + told + b'"' in said_to(head + wrong), told


def test_a_wish_for_a_tunnel_is_refused_by_name() -> None:
    answer = said_to(b"CONNECT /x HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nabcd")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b'"code":"tunnel"' in answer


def without_date(answer: bytes) -> bytes:
    """Return an answer that two moments give alike."""
    return b"\r\n".join(line for line in answer.split(b"\r\n") if not line.startswith(b"date:"))
