"""A socket of the link, or of the KV channel, that nobody reads while its peer floods it and goes.

    program_unread_peer.py router|kv_router|dealer|kv_dealer

is what a process looks like to libzmq that stands still for a while. ROUTERs, which anybody can
reach, hear somebody who pings between messages, as every worker of this and of other versions may.
Prints how many messages were there to be read after all; libzmq ends the process where it cannot
stand this.
"""

from __future__ import annotations

import socket
import struct
import sys
import time

import zmq
from prometheus_client import CollectorRegistry

from baton_worker.config import CurveConfig, HandoffConfig
from baton_worker.handoff.dealers import Dealers
from baton_worker.handoff.metrics import HandoffMetrics
from baton_worker.handoff.offers import Address
from baton_worker.handoff.places import PlaceLimits
from baton_worker.handoff.security import kv_security
from baton_worker.handoff.zmq_transport import ZmqKvTransport
from baton_worker.link import sockets
from baton_worker.metrics import MetricFactory

HEARTBEAT_SECONDS, DEAD_SECONDS = 0.05, 5.0
N_MESSAGES, SIZE = 4000, 20_000
N_ROUNDS, N_BETWEEN_PINGS = 100, 50
UNREAD_SECONDS = 0.5
KV_UNREAD_SECONDS = 2.5
_COMMAND = 4


def framed(body: bytes, flags: int = 0) -> bytes:
    """Return a short frame of ZMTP 3.1."""
    return bytes([flags, len(body)]) + body


def pinged(port: int) -> None:
    """Greet as a DEALER without keys, send many small messages and pings, and hang up."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
    name = b"Socket-Type"
    ready = b"\x05READY" + bytes([len(name)]) + name + struct.pack(">I", 6) + b"DEALER"
    ping = framed(b"\x04PING" + struct.pack(">H", 100), _COMMAND)
    with socket.create_connection(("127.0.0.1", port)) as peer:
        peer.sendall(greeting)
        answered = b""
        while len(answered) < len(greeting):
            answered += peer.recv(len(greeting) - len(answered))
        peer.sendall(framed(ready, _COMMAND))
        peer.sendall((framed(b"x" * 10) * N_BETWEEN_PINGS + ping) * N_ROUNDS)
        peer.shutdown(socket.SHUT_WR)
        peer.settimeout(UNREAD_SECONDS)
        try:
            while peer.recv(4096):  # pongs that stay unread would reset the connection
                pass
        except TimeoutError:
            return


def fill_router(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    """Return the link's ROUTER to which a peer sent what nobody read, and left."""
    ours = sockets.router(context)
    pinged(ours.bind_to_random_port("tcp://127.0.0.1"))
    return ours


def fill_kv_router(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    """Return decode's ROUTER to which a peer sent what nobody read, and left."""
    transport = ZmqKvTransport(
        HandoffConfig(),
        HandoffMetrics(MetricFactory(CollectorRegistry(), "m", "decode")),
        context=context,
        security=kv_security(CurveConfig(enabled=False), context, str, takes_offers=True),
        places=PlaceLimits(16, 1 << 30, 1 << 20, 64, 600.0),
    )
    pinged(int(transport.endpoint.rpartition(":")[2]))
    return transport._receiver.router  # its thread, which would read it, was never started


def fill_dealer(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    """Return a DEALER to which a gateway sent what nobody read, and left."""

    def connected(endpoint: str) -> zmq.Socket[bytes]:
        ours = sockets.dealer(context, HEARTBEAT_SECONDS, DEAD_SECONDS)
        ours.connect(endpoint)
        return ours

    return flooded(connected)


def fill_kv_dealer(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    """Return prefill's DEALER to a decode worker that sent what nobody read, and left."""
    dealers = Dealers(
        context, lambda its: its.socket(zmq.DEALER), lambda socket, key: None, zmq.Poller()
    )

    def connected(endpoint: str) -> zmq.Socket[bytes]:
        ours = dealers.to(Address(endpoint, ""), 0.0)
        ours.poll(10_000, zmq.POLLOUT)  # it takes nothing before its connection stands
        return ours

    return flooded(connected)


def flooded(connected) -> zmq.Socket[bytes]:
    """Return the socket that `connected` made, after its peer sent without end and left."""
    theirs = zmq.Context()
    peer = theirs.socket(zmq.ROUTER)
    peer.router_mandatory = True
    peer.sndtimeo = 300
    peer.linger = 0
    port = peer.bind_to_random_port("tcp://127.0.0.1")
    ours = connected(f"tcp://127.0.0.1:{port}")
    ours.send(b"hello")
    route, _ = peer.recv_multipart()
    send_until_full(lambda: peer.send_multipart([route, b"x" * SIZE]))
    peer.close()
    theirs.term()
    return ours


def send_until_full(send) -> None:
    """Send until all is said or nothing more is taken."""
    for _ in range(N_MESSAGES):
        try:
            send()
        except zmq.Again:
            return


def main(kind: str) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    fill = {
        "router": fill_router,
        "kv_router": fill_kv_router,
        "dealer": fill_dealer,
        "kv_dealer": fill_kv_dealer,
    }[kind]
    ours = fill(context)
    time.sleep(KV_UNREAD_SECONDS if kind == "kv_dealer" else UNREAD_SECONDS)
    is_router = kind.endswith("router")
    wanted, patience_ms = (N_ROUNDS * N_BETWEEN_PINGS, 60_000) if is_router else (N_MESSAGES, 300)
    n_read = 0
    while n_read < wanted and ours.poll(patience_ms):
        ours.recv_multipart()
        n_read += 1
    sys.stdout.write(f"{n_read}\n")
    context.destroy(linger=0)


if __name__ == "__main__":
    main(sys.argv[1])
