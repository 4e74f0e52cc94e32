"""What a peer sends, and how long it takes over it, is bounded before any route or key is asked."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from baton_worker.config import HttpLimits
from baton_worker.http_edge.gate import Gate, peer_of
from baton_worker.http_edge.metrics import HttpMetrics
from baton_worker.http_edge.protocol import MAX_PIPELINED
from baton_worker.http_edge.refusals import ALL
from baton_worker.metrics import MetricFactory
from baton_worker.roles.serving import ThreadServer

PATIENCE_SECONDS = 60.0
FOREVER = 600.0
TRIES = 50
"""A machine that holds us up by itself, before a peer has sent, says nothing: we try again."""
SMALL = HttpLimits(
    max_target_bytes=100,
    max_headers=10,
    max_header_bytes=2000,
    max_body_bytes=1000,
    header_seconds=FOREVER,
    body_seconds=FOREVER,
    idle_seconds=FOREVER,
)


@dataclass
class Listener:
    """A served application and what it saw."""

    port: int
    registry: CollectorRegistry
    asked: list[str]
    release: threading.Event

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_SECONDS)

    def talk(self, *sent: bytes) -> bytes:
        """Send all and return what is answered up to the end."""
        with self.connect() as peer:
            for data in sent:
                peer.sendall(data)
            return rest_of(peer)

    def count(self, reason: str) -> float:
        labels = {"model": "m", "role": "r", "listener": "api", "reason": reason}
        return self.registry.get_sample_value("baton_http_refused_total", labels) or 0.0

    def connections(self) -> float:
        labels = {"model": "m", "role": "r", "listener": "api"}
        value = self.registry.get_sample_value("baton_http_connections", labels)
        assert value is not None
        return value


def heard(peer: socket.socket, end: bytes) -> bytes:
    """Return what comes up to these bytes: a head and its body may come one by one."""
    found = b""
    while end not in found:
        data = peer.recv(65536)
        assert data, found
        found += data
    return found


def answer_of(peer: socket.socket) -> bytes:
    """Return one answer, head and body, of a length that it tells."""
    head, end, body = heard(peer, b"\r\n\r\n").partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
    assert length, head
    while len(body) < int(length[1]):
        body += peer.recv(65536)
    return head + end + body


def rest_of(peer: socket.socket) -> bytes:
    """Return all that comes until the connection ends, however that is."""
    found = b""
    try:
        while data := peer.recv(65536):
            found += data
    except ConnectionError:
        pass
    return found


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def code_of(answer: bytes) -> str:
    return str(json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"])


Serve = Callable[..., Listener]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """`serve(**limits)`: an echo, a route that reads nothing, and one that waits for `release`."""
    running: list[Callable[[], None]] = []

    def start(**changes: Any) -> Listener:
        asked: list[str] = []
        release = threading.Event()

        async def echo(request: Request) -> Response:
            asked.append("echo")
            try:
                body = await request.body()
            except ClientDisconnect:
                asked.append("gone")
                raise
            return PlainTextResponse(f"read {len(body)}")

        async def closed(request: Request) -> Response:
            asked.append("closed")
            return PlainTextResponse("no", 401)

        async def slow(request: Request) -> Response:
            async def parts() -> Any:
                yield b"begun "
                await asyncio.to_thread(release.wait, PATIENCE_SECONDS)
                yield b"done"

            return StreamingResponse(parts())

        routes = [
            Route("/echo", echo, methods=["GET", "POST"]),
            Route("/closed", closed, methods=["POST"]),
            Route("/slow", slow),
        ]
        registry = CollectorRegistry()
        fields = {name: getattr(SMALL, name) for name in SMALL.__struct_fields__}
        limits = HttpLimits(**(fields | changes))
        gate = Gate("api", limits, HttpMetrics(MetricFactory(registry, "m", "r")))
        listener = socket.create_server(("127.0.0.1", 0))
        app = Starlette(routes=routes)
        server = ThreadServer(app, listener, gate, "test")
        running.append(server.close)
        running.append(release.set)
        return Listener(listener.getsockname()[1], registry, asked, release)

    yield start
    for end in reversed(running):
        end()


GET = b"GET /echo HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


def post(path: bytes, head: bytes, body: bytes = b"") -> bytes:
    return b"POST " + path + b" HTTP/1.1\r\nhost: x\r\n" + head + b"\r\n\r\n" + body


def begun_in_time(
    serve: Serve, first: bytes, seconds: float, **limits: float
) -> tuple[Listener, socket.socket]:
    """Return a listener and its only peer, which sent this within so long of its connecting."""
    for _ in range(TRIES):
        server = serve(**limits)
        began = time.monotonic()
        peer = server.connect()
        with contextlib.suppress(ConnectionError):  # of one that is late already
            peer.sendall(first)
        if time.monotonic() - began < seconds:
            return server, peer
        peer.close()
    raise AssertionError(f"held up in each of {TRIES} tries")


def test_what_is_within_bounds_is_served(serve: Serve) -> None:
    server = serve()
    assert status_of(server.talk(GET)) == 200
    head = b"connection: close\r\ncontent-length: 1000"
    assert server.talk(post(b"/echo", head, b"x" * 1000)).endswith(b"read 1000")
    chunked = b"connection: close\r\ntransfer-encoding: chunked"
    pieces = b"".join(b"1\r\nx\r\n" for _ in range(1000)) + b"0\r\n\r\n"
    assert server.talk(post(b"/echo", chunked, pieces)).endswith(b"read 1000")
    assert all(server.count(each.reason) == 0 for each in ALL)


@pytest.mark.parametrize(
    ("code", "bound"),
    [
        ("target_too_long", "longer than 100 bytes"),
        ("headers_too_large", "more than 10, or than 2000 bytes"),
        ("body_too_large", "larger than 1000 bytes"),
        ("headers_timeout", "longer than 600 s"),
        ("body_timeout", "longer than 600 s"),
    ],
)
def test_who_is_refused_is_told_the_bound(code: str, bound: str) -> None:
    (refusal,) = [each for each in ALL if each.reason == code]
    assert bound.encode() in refusal.encode(SMALL)


def test_every_refusal_can_be_told() -> None:
    for each in ALL:
        answer = each.encode(SMALL)
        assert (status_of(answer), code_of(answer)) == (each.status, each.reason)


ENDLESS = b"x" * 400_000
TOO_MUCH = {
    "target": (b"GET /" + b"x" * 200, b" HTTP/1.1\r\n\r\n", 414, "target_too_long"),
    "endless target": (b"GET /" + ENDLESS, b"", 414, "target_too_long"),
    "many headers": (b"GET / HTTP/1.1\r\n", b"a: b\r\n" * 11 + b"\r\n", 431, "headers_too_large"),
    "long headers": (b"GET / HTTP/1.1\r\n", b"a: " + b"b" * 2001 + b"\r\n\r\n", 431,
                     "headers_too_large"),
    "a header without end": (b"GET / HTTP/1.1\r\na: ", ENDLESS, 431, "headers_too_large"),
    "a header's name without end": (b"GET / HTTP/1.1\r\n", ENDLESS, 431, "headers_too_large"),
    "a declared body": (post(b"/echo", b"content-length: 1001"), b"", 413, "body_too_large"),
    "a huge declared body": (post(b"/echo", b"content-length: 99999999999999999"), b"", 413,
                             "body_too_large"),
    "a chunked body": (post(b"/echo", b"transfer-encoding: chunked"),
                       b"3e9\r\n" + b"x" * 1001 + b"\r\n0\r\n\r\n", 413, "body_too_large"),
    "a trailer without end": (post(b"/echo", b"transfer-encoding: chunked", b"1\r\nx\r\n0\r\na: "),
                              ENDLESS, 431, "headers_too_large"),
    "a chunk's extension without end": (post(b"/echo", b"transfer-encoding: chunked", b"1;a="),
                                        ENDLESS, 431, "headers_too_large"),
    "no HTTP": (b"\x16\x03\x01\x02\x00", b"\x01" * 50, 400, "malformed"),
}  # fmt: skip


@pytest.mark.parametrize(("first", "then", "status", "code"), TOO_MUCH.values(), ids=TOO_MUCH)
def test_too_much_of_anything_is_refused_by_name_and_counted(
    serve: Serve, first: bytes, then: bytes, status: int, code: str
) -> None:
    server = serve()
    with server.connect() as peer:
        peer.sendall(first)
        for start in range(0, len(then), 20_000):
            try:
                peer.sendall(then[start : start + 20_000])
            except ConnectionError:
                break
        answer = answer_of(peer)
        peer.shutdown(socket.SHUT_WR)
    assert (status_of(answer), code_of(answer)) == (status, code)
    assert b"connection: close" in answer
    assert server.count(code) == 1
    assert "read" not in server.asked


def test_a_body_beyond_the_bound_ends_the_route_that_reads_it(serve: Serve) -> None:
    server = serve()
    with server.connect() as peer:
        peer.sendall(post(b"/echo", b"transfer-encoding: chunked", b"1\r\nx\r\n"))
        wait_for(lambda: server.asked == ["echo"])
        peer.sendall(b"3e8\r\n" + b"x" * 1000 + b"\r\n")
        assert status_of(answer_of(peer)) == 413
        wait_for(lambda: server.asked == ["echo", "gone"])


def wait_for(claim: Callable[[], bool]) -> None:
    for _ in range(int(PATIENCE_SECONDS * 100)):
        if claim():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it never came true")


TRICKLES = {
    "request line": (b"GET /", b"x", "headers_timeout"),
    "headers": (b"GET /echo HTTP/1.1\r\n", b"a: b\r\n", "headers_timeout"),
    "nothing but line ends": (b"\r\n", b"\r\n", "headers_timeout"),
    "body": (post(b"/echo", b"content-length: 90000"), b"x", "body_timeout"),
    "body of a refused request": (post(b"/closed", b"content-length: 90000"), b"x", ""),
}


@pytest.mark.parametrize(("first", "more", "code"), TRICKLES.values(), ids=TRICKLES)
def test_who_trickles_is_cut_off_however_often_a_byte_comes(
    serve: Serve, first: bytes, more: bytes, code: str
) -> None:
    server, peer = begun_in_time(
        serve, first, 0.3, header_seconds=0.3, body_seconds=0.3, max_headers=9000,
        max_target_bytes=9000, max_header_bytes=90_000, max_body_bytes=90_000,
    )  # fmt: skip
    with peer:
        peer.settimeout(0.01)
        answer = None
        for _ in range(3000):  # half a minute of a byte each 10 ms, if nobody cuts it off
            try:
                peer.sendall(more)
                answer = peer.recv(65536)
                break
            except TimeoutError:
                continue
            except ConnectionError:
                answer = b""
                break
        assert answer is not None, "the server still takes a byte now and then"
        if answer:
            assert status_of(answer) == (408 if code else 401)
    if code:
        assert server.count(code) == 1
    wait_for(lambda: server.connections() == 0)


def test_the_rest_of_an_answered_requests_body_is_thrown_away_and_the_next_is_served(
    serve: Serve,
) -> None:
    server = serve()
    with server.connect() as peer:
        for _ in range(3):
            peer.sendall(post(b"/closed", b"content-length: 900", b"x"))
            assert status_of(answer_of(peer)) == 401
            peer.sendall(b"x" * 899)
        peer.sendall(GET)
        assert status_of(rest_of(peer)) == 200
    assert all(server.count(each.reason) == 0 for each in ALL)


@pytest.mark.parametrize("more", [b"x", b"x" * 2000], ids=["too slow", "too much"])
def test_the_rest_of_an_answered_requests_body_is_bounded_too(serve: Serve, more: bytes) -> None:
    first = post(b"/closed", b"transfer-encoding: chunked")
    _, peer = begun_in_time(serve, first, 0.3, header_seconds=0.3)
    with peer:
        assert status_of(answer_of(peer)) == 401
        peer.settimeout(0.01)
        rest = None
        for _ in range(3000):
            try:
                peer.sendall(b"%x\r\n%b\r\n" % (len(more), more))
                rest = peer.recv(65536)
                break
            except TimeoutError:
                continue
            except ConnectionError:
                rest = b""
                break
        assert rest == b"", "it is ended without a second answer"


def test_an_answered_requests_connection_is_idle_once_its_body_has_come(serve: Serve) -> None:
    server = serve(idle_seconds=0.2)
    with server.connect() as peer:
        peer.sendall(post(b"/closed", b"content-length: 900", b"x"))
        assert status_of(answer_of(peer)) == 401
        peer.sendall(b"x" * 899)
        assert rest_of(peer) == b""
    assert all(server.count(each.reason) == 0 for each in ALL)


def test_who_says_nothing_is_cut_off_and_so_is_who_is_idle_too_long(serve: Serve) -> None:
    server = serve(header_seconds=0.2, idle_seconds=0.2)
    assert server.talk() == b"", "no request, no answer"
    assert server.count("headers_timeout") == 1
    get = b"GET /echo HTTP/1.1\r\nhost: x\r\n\r\n"
    server, peer = begun_in_time(serve, get, 0.2, header_seconds=0.2, idle_seconds=0.2)
    with peer:
        assert rest_of(peer).endswith(b"read 0")
    assert server.count("headers_timeout") == 0, "idling after an answer is no fault"


def test_line_ends_do_not_keep_an_idle_connection(serve: Serve) -> None:
    get = b"GET /echo HTTP/1.1\r\nhost: x\r\n\r\n"
    _, peer = begun_in_time(serve, get, 0.2, header_seconds=0.2)
    with peer:
        heard(peer, b"read 0")
        peer.settimeout(0.02)
        ended = False
        for _ in range(400):
            try:
                peer.sendall(b"\r\n")
                ended = peer.recv(100) == b""
            except TimeoutError:
                continue
            except ConnectionError:
                ended = True
            break
        assert ended


def test_a_slow_route_is_not_the_peers_fault(serve: Serve) -> None:
    get = b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n"
    limits = {"header_seconds": 0.1, "body_seconds": 0.1, "idle_seconds": 0.1}
    server, peer = begun_in_time(serve, get, 0.1, **limits)
    with peer:
        heard(peer, b"begun")
        threading.Event().wait(0.5)
        server.release.set()
        assert b"done" in rest_of(peer)


def test_a_refused_request_behind_another_does_not_spoil_that_ones_answer(serve: Serve) -> None:
    server = serve()
    with server.connect() as peer:
        peer.sendall(b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n")
        heard(peer, b"begun")
        peer.sendall(b"GET /" + b"x" * 200)
        wait_for(lambda: server.count("target_too_long") == 1)
        server.release.set()
        rest = rest_of(peer)
    assert b"done" in rest
    assert b"414" not in rest


def test_a_client_of_http_1_0_gets_no_chunks_and_the_end_of_the_connection(serve: Serve) -> None:
    server = serve()
    server.release.set()
    for head in (b"", b"connection: keep-alive\r\n"):
        answer = server.talk(b"GET /slow HTTP/1.0\r\n" + head + b"\r\n")
        found, _, body = answer.partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in found
        assert b"connection: close" in found
        assert body == b"begun done"
    head, _, body = server.talk(b"GET /echo HTTP/1.0\r\n\r\n").partition(b"\r\n\r\n")
    assert (b"content-length: 6" in head, body) == (True, b"read 0")
    chunked = server.talk(b"GET /slow HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert chunked.endswith(b"4\r\ndone\r\n0\r\n\r\n")


@pytest.mark.parametrize("value", [b"100-continue", b"100-Continue", b" 100-continue , "])
def test_who_wants_to_be_told_that_its_body_may_come_is_told(serve: Serve, value: bytes) -> None:
    server = serve()
    head = b"connection: close\r\ncontent-length: 4\r\nexpect: " + value
    with server.connect() as peer:
        peer.sendall(post(b"/echo", head))
        assert peer.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        peer.sendall(b"body")
        assert rest_of(peer).endswith(b"read 4")


def test_a_client_of_http_1_0_is_told_nothing_before_its_answer(serve: Serve) -> None:
    head = b"POST /echo HTTP/1.0\r\ncontent-length: 4\r\nexpect: 100-continue\r\n\r\n"
    assert serve().talk(head, b"body").startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("value", [b"200-ok", b"100-continue, x-more"])
def test_an_unknown_expectation_is_refused_by_name(serve: Serve, value: bytes) -> None:
    server = serve()
    answer = server.talk(post(b"/echo", b"content-length: 4\r\nexpect: " + value))
    assert (status_of(answer), code_of(answer)) == (417, "unknown_expectation")
    assert server.count("unknown_expectation") == 1
    assert server.asked == []


@pytest.mark.parametrize("value", [b"gzip", b"identity, br", b"deflate"])
def test_a_body_in_another_encoding_is_refused_by_name(serve: Serve, value: bytes) -> None:
    server = serve()
    answer = server.talk(post(b"/echo", b"content-length: 4\r\ncontent-encoding: " + value))
    assert (status_of(answer), code_of(answer)) == (415, "content_encoding")
    assert server.count("content_encoding") == 1
    assert server.asked == []


@pytest.mark.parametrize("value", [b"gzip, chunked", b"Deflate,chunked"])
def test_a_transfer_in_another_coding_is_refused_by_name(serve: Serve, value: bytes) -> None:
    server = serve()
    head = b"transfer-encoding: " + value
    answer = server.talk(post(b"/echo", head, b"4\r\nbody\r\n0\r\n\r\n"))
    assert (status_of(answer), code_of(answer)) == (415, "content_encoding")
    assert server.asked == []


@pytest.mark.parametrize("value", [b"identity", b"Identity", b""])
def test_a_body_that_says_it_is_not_encoded_is_taken(serve: Serve, value: bytes) -> None:
    head = b"connection: close\r\ncontent-length: 4\r\ncontent-encoding: " + value
    assert serve().talk(post(b"/echo", head, b"body")).endswith(b"read 4")


def test_requests_ahead_of_their_answers_are_few(serve: Serve) -> None:
    server = serve()
    request = b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n"
    with server.connect() as peer:
        peer.sendall(request * (MAX_PIPELINED + 10))
        wait_for(lambda: server.count("too_many_pipelined") == 1)
        server.release.set()
        assert rest_of(peer).count(b"done") == 1
    server.release.set()
    few = serve()
    few.release.set()
    last = request.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
    assert few.talk(request * (MAX_PIPELINED - 1) + last).count(b"done") == MAX_PIPELINED


def test_connections_are_few_in_all_and_for_each_peer(serve: Serve) -> None:
    for limits, code in (
        ({"max_connections": 3}, "too_many_connections"),
        ({"max_connections_per_address": 3}, "too_many_of_address"),
    ):
        server = serve(**limits)
        held = [server.connect() for _ in range(3)]
        wait_for(lambda: server.connections() == 3)  # noqa: B023 - called at once
        answer = server.talk()
        assert (status_of(answer), code_of(answer)) == (503, code)
        assert b"retry-after" in answer
        assert server.count(code) == 1
        held.pop().close()
        wait_for(lambda: server.connections() == 2)  # noqa: B023
        assert status_of(server.talk(GET)) == 200
        for peer in held:
            peer.close()
        wait_for(lambda: server.connections() == 0)  # noqa: B023


def test_bodies_that_are_received_at_once_share_a_bound(serve: Serve) -> None:
    server = serve(max_receiving_bytes=1500)
    half = post(b"/echo", b"content-length: 1000", b"x" * 900)
    with server.connect() as first:
        first.sendall(half)
        wait_for(lambda: server.asked == ["echo"])
        answer = server.talk(half)
        assert (status_of(answer), code_of(answer)) == (503, "receiving_too_much")
        first.sendall(b"x" * 100)
        heard(first, b"read 1000")
        answer = server.talk(
            post(b"/echo", b"connection: close\r\ncontent-length: 900", b"x" * 900)
        )
        assert answer.endswith(b"read 900"), "what was received or refused counts no more"


@pytest.mark.parametrize(
    ("address", "peer"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:aaaa::1", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:bbbb::9", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_an_ipv6_peer_is_its_network(address: str, peer: str) -> None:
    assert peer_of(address) == peer


def test_a_flood_of_refusals_is_counted_whole_and_logged_now_and_then(
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry, now = CollectorRegistry(), [0.0]
    metrics = HttpMetrics(MetricFactory(registry, "m", "r"))
    gate = Gate("api", HttpLimits(), metrics, clock=lambda: now[0])
    for _ in range(1000):
        gate.refused(ALL[0], "10.0.0.1")
        now[0] += 0.02
    labels = {"model": "m", "role": "r", "listener": "api", "reason": ALL[0].reason}
    assert registry.get_sample_value("baton_http_refused_total", labels) == 1000
    assert len(caplog.records) == 2


def test_an_upgrade_without_a_body_is_answered_in_this_protocol(serve: Serve) -> None:
    listener = serve()
    upgrade = b"connection: upgrade, close\r\nupgrade: h2c\r\n"
    answer = listener.talk(b"GET /echo HTTP/1.1\r\nhost: x\r\n" + upgrade + b"\r\n")
    assert status_of(answer) == 200
