"""What rank 0 says to another rank of its worker about KV that NIXL reads, and is answered.

Over a connection of that rank alone, beside the steps' orders. Owns the messages and their way.
Both ends are one worker's, of one version. Knows no pool.
"""

from __future__ import annotations

import contextlib
import socket
from multiprocessing.connection import Connection

import msgspec


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """Have an agent of this name, and register the rank's part of the pool; said first. Answered by
    `Begun`, or `Ended` of number 0.
    """

    agent: str
    is_rdma_only: bool


class Add(msgspec.Struct, frozen=True, tag="add"):
    """Learn of another worker's agent, which must be called so; answered by `Ended`."""

    number: int
    agent: str
    metadata: bytes


class Remove(msgspec.Struct, frozen=True, tag="remove"):
    """Forget it, no read of whose memory is under way; not answered."""

    agent: str


class Read(msgspec.Struct, frozen=True, tag="read"):
    """Read into the rank's part; answered by `Ended`, when nothing is under way any more.

    Attributes:
        device: there; None for the host's memory.
        pieces: i64[pieces, 3], address there, address here, bytes.
    """

    number: int
    agent: str
    device: int | None
    pieces: bytes


class Begun(msgspec.Struct, frozen=True, tag="begun"):
    """The agent is there, and others may read the part by it.

    Attributes:
        address, n_bytes, device: where the part lies, see `kv.memory.Region`.
    """

    metadata: bytes
    address: int
    n_bytes: int
    device: int | None


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """What was asked under this number is over; `why_not`: "" when it was done."""

    number: int
    why_not: str = ""


Told = Begin | Add | Remove | Read
Answer = Begun | Ended


class RankChannel:
    """One end of the way between the two. Each end has a thread that does nothing but receive, so
    that no message waits for another that goes the other way.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send(self, message: Told | Answer) -> bool:
        """Send a message; returns whether the other end is there."""
        try:
            self._connection.send_bytes(msgspec.msgpack.encode(message))
        except OSError:
            return False
        return True

    def has_heard(self, most_seconds: float) -> bool:
        """Wait for a message, or for the end of the other."""
        return self._connection.poll(most_seconds)

    def told(self) -> Told | None:
        """Return what rank 0 says next; None when it is gone."""
        data = self._received()
        if data is None:
            return None
        told: Told = msgspec.msgpack.decode(data, type=Told)
        return told

    def answer(self) -> Answer | None:
        """Return what the other rank says next; None when it is gone."""
        data = self._received()
        if data is None:
            return None
        answer: Answer = msgspec.msgpack.decode(data, type=Answer)
        return answer

    def close(self) -> None:
        """Let both ends know that this one is gone; who receives here is woken by it."""
        with contextlib.suppress(OSError), socket.socket(fileno=self._connection.fileno()) as way:
            try:
                way.shutdown(socket.SHUT_RDWR)
            finally:
                way.detach()

    def _received(self) -> bytes | None:
        try:
            return self._connection.recv_bytes()
        except (EOFError, OSError):
            return None
