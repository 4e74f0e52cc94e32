"""The sending side's connections: one DEALER for each decode worker that is spoken to.

Owns when a connection is made, what tells that it stands or broke, and when it is given back:
decode workers come and go, and a prefill worker must not keep a socket for each that it ever met.
A connection that is stuck breaks by itself: the kernel ends one on which nothing that was sent is
taken for `STUCK_MS`, and the heartbeat one behind which no ZeroMQ answers. Only this end beats: it
knows when it has time to, whereas the other's would fire behind one long message of ours.
Everything here runs on the transport's thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import Any

import zmq

from baton_worker.handoff.frames import MAX_ANSWER_FRAMES
from baton_worker.handoff.offers import Address
from baton_worker.link.contexts import Context, Contexts
from baton_worker.link.multipart import Multipart
from baton_worker.link.sockets import (
    Change,
    close,
    connection_events,
    monitor,
    use_family_of,
)

Socket = zmq.Socket[bytes]

UNUSED_SECONDS = 300.0
STUCK_MS = 10_000
_BEAT_MS = 1000


@dataclass(slots=True, eq=False)
class _Dealer:
    socket: Socket
    monitoring: Socket
    answers: Multipart
    used_at: float
    is_up: bool = False


class Dealers:
    """See the module.

    Args:
        context: of connections to addresses.
        new_socket: returns an unconnected DEALER of a context, with the channel's options.
        secure: prepares it for a peer's public key.
        poller: learns of every socket that can have something to read.
    """

    def __init__(
        self,
        context: Context,
        new_socket: Callable[[Context], Socket],
        secure: Callable[[Socket, str], None],
        poller: zmq.Poller,
    ) -> None:
        self._contexts = Contexts(context)
        self._new_socket = new_socket
        self._secure = secure
        self._poller = poller
        self._dealers: dict[Address, _Dealer] = {}

    def __len__(self) -> int:
        return len(self._dealers)

    def to(self, address: Address, now: float) -> Socket:
        """Return the connection to an address.

        Raises:
            zmq.ZMQError: the address cannot be connected to.
        """
        dealer = self._dealers.get(address)
        if dealer is None:
            try:
                dealer = self._dealers[address] = self._connected(address, now)
            except zmq.ZMQError:
                self._leave_context(address)
                raise
        dealer.used_at = now
        return dealer.socket

    def readable(self, ready: Container[Any]) -> Iterator[tuple[Address, Multipart]]:
        """Yield the connections on which answers wait, to be taken from there."""
        for address, dealer in list(self._dealers.items()):
            if dealer.socket in ready:
                yield address, dealer.answers

    def changes(self, ready: Container[Any]) -> list[tuple[Address, Change]]:
        """Return which connections came to stand or ended, in order; those are made again."""
        changed: list[tuple[Address, Change]] = []
        for address, dealer in self._dealers.items():
            if dealer.monitoring in ready:
                for event in connection_events(dealer.monitoring):
                    is_up = event.change is Change.UP
                    if is_up != dealer.is_up:  # one that never stood ends without having begun
                        dealer.is_up = is_up
                        changed.append((address, Change.UP if is_up else Change.DOWN))
        return changed

    def standing(self) -> frozenset[Address]:
        """Return the addresses with a connection."""
        return frozenset(address for address, dealer in self._dealers.items() if dealer.is_up)

    def close_unused(self, now: float, needed: Container[Address]) -> None:
        """Give back what has been of no use for long, or it tries for ever to reach who is gone.

        Args:
            needed: addresses with something open, whose connections stay.
        """
        for address, dealer in list(self._dealers.items()):
            if now - dealer.used_at >= UNUSED_SECONDS and address not in needed:
                self._close(address)

    def close(self) -> None:
        """Close every connection."""
        for address in list(self._dealers):
            self._close(address)
        self._contexts.close(0.0)

    def _connected(self, address: Address, now: float) -> _Dealer:
        socket = self._new_socket(self._contexts.of(address.endpoint))
        # Nothing may wait in a socket that is not connected: it would go out long after its offer
        # was given up.
        socket.set(zmq.IMMEDIATE, 1)
        socket.set(zmq.SNDHWM, 0)  # what waits in it is bounded in bytes, by who sends
        # A full queue would let a peer end this process: `link.sockets`. Answers are small, and an
        # honest decode worker gives no more of them than it was asked for.
        socket.set(zmq.RCVHWM, 0)
        socket.set(zmq.TCP_MAXRT, STUCK_MS)
        socket.set(zmq.HEARTBEAT_IVL, _BEAT_MS)
        socket.set(zmq.HEARTBEAT_TIMEOUT, STUCK_MS)
        use_family_of(socket, address.endpoint)
        with contextlib.ExitStack() as undo:
            undo.callback(close, socket)
            monitoring = monitor(socket)  # before it connects, or the news of that could be missed
            undo.callback(monitoring.close, linger=0)
            self._secure(socket, address.public_key)
            socket.connect(address.endpoint)
            undo.pop_all()
        dealer = _Dealer(socket, monitoring, Multipart(socket, MAX_ANSWER_FRAMES), now)
        for source in (dealer.socket, dealer.monitoring):
            self._poller.register(source, zmq.POLLIN)
        return dealer

    def _close(self, address: Address) -> None:
        dealer = self._dealers.pop(address)
        for source in (dealer.socket, dealer.monitoring):
            self._poller.unregister(source)
        close(dealer.socket)
        dealer.monitoring.close(linger=0)
        self._leave_context(address)

    def _leave_context(self, address: Address) -> None:
        if not any(other.endpoint == address.endpoint for other in self._dealers):
            self._contexts.leave(address.endpoint)
