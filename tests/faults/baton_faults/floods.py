"""Clients that send without end, hardly at all, or read nothing, as a program of its own.

    python -m baton_faults.floods KIND URL

goes on until its input is closed, then prints how many connections it made and how many bytes they
took, as JSON. `sink` instead of a URL floods a program that is none of ours, which costs the
machine the same.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from baton_faults.load import Ask

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
PATIENCE_SECONDS = 600.0
SINK = "sink"
_ENOUGH_BYTES = 64 << 10
N_POURING, N_TRICKLING, N_READING = 4, 60, 40
_OPEN_SECONDS = 10.0
_LOOK_SECONDS = 0.05
_TOKENS = 900

FLOODS = {
    "headers": (HEAD, b"x-flood: " + b"a" * 8000 + b"\r\n", {0, 400, 431}),
    "one header": (HEAD + b"x-flood: ", b"a" * 65536, {0, 400, 431}),
    "a request line": (b"POST /", b"a" * 65536, {0, 400, 414}),
    "a body": (HEAD + b"content-length: 1073741824\r\n\r\n", b" " * 65536, {0, 413}),
    "chunks": (HEAD + b"transfer-encoding: chunked\r\n\r\n", b"1000\r\n" + b" " * 4096 + b"\r\n",
               {0, 413}),
}  # fmt: skip
"""What comes first, what comes again and again, and what may be answered; 0 for nothing."""

BEGINNINGS = {
    "nothing": b"",
    "a request line": b"POST /v1/comp",
    "headers": HEAD,
    "a body": HEAD + b"content-length: 99\r\n\r\n{",
}
"""How requests begin that never end."""


def connect(url: str, receive_bytes: int = 0) -> socket.socket:
    """Return a connection, which takes hardly more than `receive_bytes` unread."""
    where = urlsplit(url)
    found = socket.socket()
    if receive_bytes:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    found.settimeout(PATIENCE_SECONDS)
    found.connect((where.hostname, where.port))
    return found


def pour(connection: socket.socket, head: bytes, piece: bytes, most_bytes: int) -> int:
    """Send pieces until the other side has had enough; return how many bytes it took."""
    sent = 0
    with contextlib.suppress(ConnectionError):
        connection.sendall(head)
        while sent < most_bytes:
            connection.sendall(piece)
            sent += len(piece)
    return sent


def long_ask(connection: socket.socket, model: str, number: int) -> None:
    """Ask for a long stream with all alternatives."""
    ask = Ask((9, 10 + number, 11), _TOKENS, extra=(("logprobs", 20),))
    body = json.dumps(ask.body(model)).encode()
    connection.sendall(HEAD + f"content-length: {len(body)}\r\n\r\n".encode() + body)


@dataclass
class Flood:
    """Threads that do one thing over and over until they are told to stop."""

    url: str
    model: str
    is_over: threading.Event
    connections: int = 0
    sent_bytes: int = 0

    def pouring(self, kinds: tuple[str, ...]) -> None:
        """Send what never ends, over new connections as each is refused."""
        while not self.is_over.is_set():
            for kind in kinds:
                head, piece, _ = FLOODS[kind]
                with contextlib.suppress(ConnectionError), connect(self.url) as connection:
                    self.connections += 1
                    self.sent_bytes += pour(connection, head, piece, 8 << 20)

    def trickling(self) -> None:
        """Send a byte of a header's value a second, over new connections as each is ended."""
        while not self.is_over.is_set():
            with contextlib.suppress(ConnectionError), connect(self.url) as connection:
                self.connections += 1
                connection.sendall(HEAD + b"x-slow: ")
                while not self.is_over.wait(1.0):
                    connection.sendall(b"a")
                    self.sent_bytes += 1

    def deaf(self, number: int) -> None:
        """Ask for a stream and read nothing of it; leave, and ask again."""
        while not self.is_over.is_set():
            with contextlib.suppress(ConnectionError), connect(self.url, 4096) as connection:
                self.connections += 1
                long_ask(connection, self.model, number)
                self.is_over.wait(_OPEN_SECONDS)

    def reading(self, number: int) -> None:
        """Ask for such a stream and read it; leave as soon, and ask again."""
        while not self.is_over.is_set():
            until = time.monotonic() + _OPEN_SECONDS
            with contextlib.suppress(ConnectionError), connect(self.url) as connection:
                self.connections += 1
                long_ask(connection, self.model, number)
                while time.monotonic() < until and not self.is_over.is_set():
                    if not connection.recv(1 << 18):
                        break


def threads_of(flood: Flood, kind: str) -> list[threading.Thread]:
    """Return what a kind of flood consists of."""
    work: dict[str, tuple[int, Callable[[int], None]]] = {
        "headers": (N_POURING, lambda n: flood.pouring(("headers", "one header"))),
        "bodies": (N_POURING, lambda n: flood.pouring(("a body", "chunks"))),
        "slowloris": (N_TRICKLING, lambda n: flood.trickling()),
        "deaf": (N_READING, flood.deaf),
        "reading": (N_READING, flood.reading),
    }
    count, target = work[kind]
    return [threading.Thread(target=target, args=(n,), daemon=True) for n in range(count)]


def _sink(listener: socket.socket) -> None:
    """Take what a gateway takes before it has had enough, refuse it, and close."""

    def serve(connection: socket.socket) -> None:
        with contextlib.suppress(ConnectionError), connection:
            taken = 0
            while taken < _ENOUGH_BYTES and (piece := connection.recv(1 << 16)):
                taken += len(piece)
            connection.sendall(b"HTTP/1.1 431 x\r\nconnection: close\r\n\r\n")

    while True:
        connection, _ = listener.accept()
        threading.Thread(target=serve, args=(connection,), daemon=True).start()


def main(kind: str, url: str, model: str) -> int:
    """Flood until the input is closed."""
    if url == SINK:
        listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        multiprocessing.get_context("fork").Process(
            target=_sink, args=(listener,), daemon=True
        ).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    flood = Flood(url, model, threading.Event())
    threads = threads_of(flood, kind)
    for thread in threads:
        thread.start()
    sys.stdin.read()
    flood.is_over.set()
    json.dump({"connections": flood.connections, "bytes": flood.sent_bytes}, sys.stdout)
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:4]))
