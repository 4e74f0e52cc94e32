"""Socket options and connection events of the link.

Owns how DEALER and ROUTER are set up and what libzmq's monitor says about them. The values are the
ones measured for this protocol: a silent peer is noticed in 3 s, one whose process died as soon as
the kernel closed its connection, a healed network is used within a second, and no option makes a
send wait.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Final, NamedTuple

import zmq
from zmq.utils.monitor import recv_monitor_message

from baton_worker.records.layout import MAX_FRAME_BYTES

Socket = zmq.Socket[bytes]

CALLING_AGAIN: Final = {
    zmq.CONNECT_TIMEOUT: 400,
    zmq.RECONNECT_IVL: 100,
    zmq.RECONNECT_IVL_MAX: 250,
}
"""How a peer that cannot be reached is called again. The call under way when a network heals may be
lost, and the next comes 0.4 s and up to 0.35 s (libzmq adds up to RECONNECT_IVL at random) later.
"""
HANDSHAKE_MS = 2000
_DEALER = {
    zmq.IMMEDIATE: 1,
    zmq.SNDHWM: 64,
    zmq.RCVHWM: 0,  # see `_prepared`
    **CALLING_AGAIN,
}
_ROUTER = {
    zmq.ROUTER_MANDATORY: 1,
    zmq.ROUTER_HANDOVER: 0,
    zmq.RCVHWM: 0,  # see `_prepared`
    zmq.SNDHWM: 256,
    zmq.BACKLOG: 1024,
}
_COMMON = {
    zmq.HANDSHAKE_IVL: HANDSHAKE_MS,
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 15,
    zmq.TCP_KEEPALIVE_INTVL: 5,
    zmq.TCP_KEEPALIVE_CNT: 3,
    zmq.LINGER: 0,
    zmq.MAXMSGSIZE: MAX_FRAME_BYTES,
}
_EVENTS = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class Change(enum.Enum):
    """What happened to a connection. CAME: it was accepted, and nothing was said over it yet."""

    CAME = enum.auto()
    UP = enum.auto()
    DOWN = enum.auto()
    HANDSHAKE_FAILED = enum.auto()


class ConnectionEvent(NamedTuple):
    """A change, and for a failed handshake why: `auth`, `protocol` or `other`.

    `fd` is the descriptor of a connection that came, or which one had that went down: that one is
    closed by now, maybe reused.
    """

    change: Change
    reason: str = ""
    fd: int = -1


_MEANING = {
    int(zmq.EVENT_ACCEPTED): ConnectionEvent(Change.CAME),
    int(zmq.EVENT_HANDSHAKE_SUCCEEDED): ConnectionEvent(Change.UP),
    int(zmq.EVENT_DISCONNECTED): ConnectionEvent(Change.DOWN),
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): ConnectionEvent(Change.HANDSHAKE_FAILED, "other"),
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): ConnectionEvent(Change.HANDSHAKE_FAILED, "protocol"),
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH): ConnectionEvent(Change.HANDSHAKE_FAILED, "auth"),
}


def dealer(context: zmq.Context[Socket], heartbeat_seconds: float, dead_seconds: float) -> Socket:
    """Return an unconnected DEALER with the link's options."""
    socket = _prepared(context.socket(zmq.DEALER), _DEALER)
    _ping(socket, heartbeat_seconds, dead_seconds)
    return socket


def router(context: zmq.Context[Socket]) -> Socket:
    """Return an unbound ROUTER with the link's options; its peers ping it."""
    return _prepared(context.socket(zmq.ROUTER), _ROUTER)


def is_ipv6_endpoint(endpoint: str) -> bool:
    """Whether the endpoint's host is an IPv6 address."""
    return endpoint.startswith("tcp://[")


def use_family_of(socket: Socket, endpoint: str) -> None:
    """Allow IPv6 where the address is one; call it before connecting or binding."""
    socket.ipv6 = is_ipv6_endpoint(endpoint)


def monitor(socket: Socket) -> Socket:
    """Return the socket on which `socket`'s connection events arrive; see `connection_events`.

    It takes whatever comes. libzmq (4.3.5) waits while it is full, on the thread that moves all
    bytes, and with the lock that closing or connecting `socket` needs: for ever, then.
    """
    address = f"inproc://connections-of-{socket.FD}"
    socket.monitor(address, _EVENTS)
    monitoring: Socket = socket.context.socket(zmq.PAIR)
    monitoring.set(zmq.RCVHWM, 0)
    monitoring.connect(address)
    return monitoring


def connection_events(monitoring: Socket) -> Iterator[ConnectionEvent]:
    """Yield the events that have arrived, without waiting."""
    while True:
        try:
            message = recv_monitor_message(monitoring, zmq.NOBLOCK)
        except zmq.Again:
            return
        event = _MEANING.get(int(message["event"]))
        if event is not None:
            has_fd = event.change in (Change.CAME, Change.DOWN)
            yield event._replace(fd=int(message["value"])) if has_fd else event


def close(socket: Socket, linger_ms: int = 0) -> None:
    """Close a monitored socket, giving what it still holds `linger_ms` to leave."""
    socket.disable_monitor()
    socket.close(linger=linger_ms)


def _prepared(socket: Socket, options: dict[zmq.SocketOption, int]) -> Socket:
    """Set options, of which RCVHWM must be 0, no bound, on every socket that strangers can reach.

    When the queue of what was received is full and the peer hangs up, libzmq (4.3.5) marks the
    connection broken and keeps it until there is room. A ping then, ours that falls due or one of
    the peer's that had arrived, finds it broken and aborts the process: forty bytes behind a few
    small messages are enough. So nothing here may ever be full. What an honest peer has under way
    is bounded by the credit it was given, and `pace` ends the connection of any other.
    """
    for option, value in (_COMMON | options).items():
        socket.setsockopt(option, value)
    return socket


def _ping(socket: Socket, heartbeat: float, dead: float) -> None:
    """Let a socket ping its peer, and either end close a connection that has been silent.

    A ROUTER only answers: a ping carries how long it may hear nothing.
    """
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(1000 * heartbeat))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(1000 * dead))
    socket.setsockopt(zmq.HEARTBEAT_TTL, int(1000 * dead))
