"""A socket of the link, or of the KV channel, that nobody reads while its peer floods it and goes.

    program_unread_peer.py router|dealer|kv

is what a process looks like to libzmq that stands still for a while. Prints how many messages were
there to be read after all; libzmq ends the process where it cannot stand this.
"""

from __future__ import annotations

import sys
import time

import zmq

from baton_worker.handoff.dealers import Dealers
from baton_worker.handoff.offers import Address
from baton_worker.link import sockets

HEARTBEAT_SECONDS, DEAD_SECONDS = 0.05, 5.0
N_MESSAGES, SIZE = 4000, 20_000
UNREAD_SECONDS = {"router": 0.5, "dealer": 0.5, "kv": 2.5}


def fill_router(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    """Return a ROUTER to which a worker sent what nobody read, and left."""
    ours = sockets.router(context)
    port = ours.bind_to_random_port("tcp://127.0.0.1")
    theirs = zmq.Context()
    peer = theirs.socket(zmq.DEALER)
    peer.sndtimeo = 300
    peer.linger = 0
    peer.connect(f"tcp://127.0.0.1:{port}")
    send_until_full(lambda: peer.send(b"x" * SIZE))
    peer.close()
    theirs.term()
    return ours


def fill_dealer(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    """Return a DEALER to which a gateway sent what nobody read, and left."""

    def connected(endpoint: str) -> zmq.Socket[bytes]:
        ours = sockets.dealer(context, HEARTBEAT_SECONDS, DEAD_SECONDS)
        ours.connect(endpoint)
        return ours

    return flooded(connected)


def fill_kv(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    """Return prefill's DEALER to a decode worker that sent what nobody read, and left."""
    dealers = Dealers(lambda: context.socket(zmq.DEALER), lambda socket, key: None, zmq.Poller())

    def connected(endpoint: str) -> zmq.Socket[bytes]:
        ours = dealers.to(Address(endpoint, ""), 0.0, ())
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
    ours = {"router": fill_router, "dealer": fill_dealer, "kv": fill_kv}[kind](context)
    time.sleep(UNREAD_SECONDS[kind])
    n_read = 0
    while ours.poll(300):
        ours.recv_multipart()
        n_read += 1
    sys.stdout.write(f"{n_read}\n")
    context.destroy(linger=0)


if __name__ == "__main__":
    main(sys.argv[1])
