"""Connections come and go faster than they are told of: libzmq must never wait for the reader.

It tells of each from the one thread that moves all bytes, and would wait there, while it holds what
closing the socket needs, for room in a queue that only this process' own thread can make.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import Counter
from collections.abc import Iterator

import pytest
import zmq

from baton_worker.link.sockets import Change, close, connection_events, monitor, router

PATIENCE_SECONDS = 60.0
MORE_THAN_A_QUEUE_HOLDS = 2500
"""libzmq's own bound is 1000 at each end."""


@pytest.fixture
def port_and_sockets() -> Iterator[tuple[int, zmq.Socket, zmq.Socket]]:
    context = zmq.Context(io_threads=1)
    listening = router(context)
    monitoring = monitor(listening)
    listening.bind("tcp://127.0.0.1:0")
    port = int(listening.last_endpoint.decode().rsplit(":", 1)[1])
    yield port, listening, monitoring
    closing = threading.Thread(
        target=lambda: (close(listening), monitoring.close(0), context.term()), daemon=True
    )
    closing.start()
    closing.join(PATIENCE_SECONDS)
    assert not closing.is_alive(), "the socket cannot be closed"


def come_and_go(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), PATIENCE_SECONDS) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        stranger.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(4096):
                pass  # until it is hung up on, which makes an event


def test_who_comes_after_them_is_served_and_the_socket_closes(port_and_sockets) -> None:
    port, listening, monitoring = port_and_sockets
    for _ in range(MORE_THAN_A_QUEUE_HOLDS):
        come_and_go(port)
    with listening.context.socket(zmq.DEALER) as friend:
        friend.connect(f"tcp://127.0.0.1:{port}")
        friend.send(b"hello")
        assert listening.poll(1000 * PATIENCE_SECONDS), "nothing arrives any more"
        assert listening.recv_multipart()[1:] == [b"hello"]
        told = Counter(event.change for event in connection_events(monitoring))
        assert told[Change.UP] == 1
        assert sum(told.values()) > MORE_THAN_A_QUEUE_HOLDS, told
        friend.close(linger=0)
