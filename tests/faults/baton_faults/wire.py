"""A cable between two network namespaces that drops, delays, throttles, cuts and resets.

    python -m baton_faults.wire LEFT_FD RIGHT_FD ORDERS_FD

Each end is a TUN device; this program carries IP packets between them. It does what tc's netem
would, on kernels that have none, and counts what it carries. Orders are JSON lines on a socket:
`Weather` sets what happens to packets from now on, and each order is answered by the `Carried`.
"""

from __future__ import annotations

import os
import random
import select
import socket
import struct
import sys
import time
from collections import deque
from dataclasses import dataclass, field

import msgspec

QUEUE_SECONDS = 0.5
"""How much a throttled direction holds, in time at its rate, before it drops what is newest."""
MOST_PACKETS = 64
_IPV4, _TCP = 4, 6
_ACK, _RST, _SYN = 0x10, 0x04, 0x02


class Side(msgspec.Struct, frozen=True):
    """One direction: share of packets lost, seconds of delay, bytes a second (0: no limit)."""

    loss: float = 0.0
    delay_seconds: float = 0.0
    rate_bytes: float = 0.0
    is_cut: bool = False


class Weather(msgspec.Struct, frozen=True):
    """Both directions; `resets`: end every TCP connection that sends something next."""

    rightward: Side = Side()
    leftward: Side = Side()
    resets: bool = False


class Carried(msgspec.Struct, frozen=True):
    """Bytes carried, and packets dropped, so far."""

    rightward_bytes: int
    leftward_bytes: int
    dropped_packets: int


@dataclass(slots=True)
class Direction:
    """Packets on their way from one device to the other; pure but for `flush`."""

    out_fd: int
    side: Side = field(default_factory=Side)
    on_the_way: deque[tuple[float, bytes]] = field(default_factory=deque)
    free_at: float = 0.0
    carried_bytes: int = 0
    dropped: int = 0

    def put(self, packet: bytes, now: float, chance: random.Random) -> None:
        """A packet enters this end of the cable, or is dropped."""
        side = self.side
        self.free_at = max(self.free_at, now)
        is_full = side.rate_bytes and self.free_at - now > QUEUE_SECONDS
        if side.is_cut or is_full or chance.random() < side.loss:
            self.dropped += 1
            return
        if side.rate_bytes:
            self.free_at += len(packet) / side.rate_bytes
        self.on_the_way.append((self.free_at + side.delay_seconds, packet))

    def flush(self, now: float) -> None:
        """Hand out what has arrived."""
        while self.on_the_way and self.on_the_way[0][0] <= now:
            _, packet = self.on_the_way.popleft()
            try:
                os.write(self.out_fd, packet)
            except BlockingIOError:
                self.dropped += 1  # the device's queue is full: a cable may lose that
                continue
            self.carried_bytes += len(packet)

    def cut_off(self) -> None:
        """Lose what is on the way."""
        self.dropped += len(self.on_the_way)
        self.on_the_way.clear()


def _checksum(data: bytes) -> int:
    if len(data) % 2:
        data += b"\0"
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def reset_of(packet: bytes) -> bytes | None:
    """Return the reset that the sender of a TCP segment takes for its peer's; None for others."""
    size = (packet[0] & 0xF) * 4
    if packet[0] >> 4 != _IPV4 or packet[9] != _TCP or len(packet) < size + 20:
        return None
    source, target = packet[12:16], packet[16:20]
    from_port, to_port, _, ack, _, flags = struct.unpack("!HHIIBB", packet[size : size + 14])
    if not flags & _ACK or flags & (_RST | _SYN):
        return None
    tcp = struct.pack("!HHIIBBHHH", to_port, from_port, ack, 0, 5 << 4, _RST, 0, 0, 0)
    pseudo = target + source + struct.pack("!BBH", 0, _TCP, len(tcp))
    tcp = tcp[:16] + struct.pack("!H", _checksum(pseudo + tcp)) + tcp[18:]
    ip = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(tcp), 0, 0, 64, _TCP, 0) + target + source
    return ip[:10] + struct.pack("!H", _checksum(ip)) + ip[12:] + tcp


class Cable:
    """Both directions and the orders."""

    def __init__(self, left_fd: int, right_fd: int, orders: socket.socket) -> None:
        self._orders = orders
        self._buffer = b""
        self._chance = random.Random(1)
        self._resets = False
        self._inward = {left_fd: Direction(right_fd), right_fd: Direction(left_fd)}
        self._right, self._left = self._inward[left_fd], self._inward[right_fd]
        for fd in self._inward:
            os.set_blocking(fd, False)

    def run(self) -> None:
        """Carry until the orders' socket is closed."""
        while True:
            ready, _, _ = select.select([*self._inward, self._orders], [], [], self._pause())
            if self._orders in ready and not self._obey():
                return
            for fd in self._inward:
                if fd in ready:
                    self._take(fd)
            now = time.monotonic()
            for direction in self._inward.values():
                direction.flush(now)

    def _pause(self) -> float | None:
        """Return the seconds until the next packet arrives."""
        due = [d.on_the_way[0][0] for d in self._inward.values() if d.on_the_way]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _take(self, fd: int) -> None:
        for _ in range(MOST_PACKETS):
            try:
                packet = os.read(fd, 1 << 16)
            except BlockingIOError:
                return
            if self._resets and (reset := reset_of(packet)):
                os.write(fd, reset)
            else:
                self._inward[fd].put(packet, time.monotonic(), self._chance)

    def _obey(self) -> bool:
        """Take orders; return whether there may be more."""
        data = self._orders.recv(1 << 16)
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            weather = msgspec.json.decode(line, type=Weather)
            self._resets = weather.resets
            for direction, side in (
                (self._right, weather.rightward),
                (self._left, weather.leftward),
            ):
                direction.side = side
                if side.is_cut:
                    direction.cut_off()
            dropped = self._right.dropped + self._left.dropped
            carried = Carried(self._right.carried_bytes, self._left.carried_bytes, dropped)
            self._orders.sendall(msgspec.json.encode(carried) + b"\n")
        return bool(data)


if __name__ == "__main__":
    left, right, control = (int(word) for word in sys.argv[1:4])
    Cable(left, right, socket.socket(fileno=control)).run()
