"""Over a slow link KV crosses once, in order, however long it takes; a stuck one is made again."""

from __future__ import annotations

import dataclasses
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from urllib.parse import urlsplit

import numpy as np
import pytest

from baton_worker.config import HandoffConfig
from baton_worker.handoff.api import HandoffArrived, HandoffDelivered
from baton_worker.identity import RequestKey
from baton_worker.messages import DecodeTarget

MB = 1 << 20
CHUNK = 1 << 16


def key(n: int) -> RequestKey:
    return RequestKey((1 << 40) + n, 0)


@pytest.fixture
def large(make_handoff):
    """Make a handoff of about so many bytes in six arrays."""

    def make(n: int, n_bytes: int):
        n_cached = 8 * max(1, n_bytes // (6 * 2 * 8 * 4 * 4))
        small = make_handoff(handle=key(n).handle, n_cached=n_cached)
        shape = (n_cached // 8, 2, 8, 4)
        return dataclasses.replace(small, kv=tuple(np.ones(shape, np.float32) for _ in range(6)))

    return make


class SlowProxy:
    """A TCP proxy on loopback that carries so many bytes a second towards the server."""

    def __init__(self, endpoint: str, bytes_per_second: float) -> None:
        self._server = urlsplit(endpoint)
        self._rate = bytes_per_second
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._is_closing = threading.Event()
        self.carried_bytes = 0
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def target(self) -> DecodeTarget:
        return DecodeTarget("decode-0", f"tcp://127.0.0.1:{self._listener.getsockname()[1]}")

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection((self._server.hostname, self._server.port))
                for one in (client, server):
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, CHUNK)
                self._sockets += [client, server]
                for pump in ((client, server, self._rate), (server, client, None)):
                    threading.Thread(target=self._pump, args=pump, daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, rate: float | None) -> None:
        with suppress(OSError):
            while data := source.recv(CHUNK):
                if rate is not None:
                    self._is_closing.wait(len(data) / rate)
                    self.carried_bytes += len(data)
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._is_closing.set()
        for one in (self._listener, *self._sockets):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


def deliver_all(prefill, decode, n_offers: int) -> None:
    """Let decode take what comes, and prefill see it delivered, each once and in order."""
    for n in range(n_offers):
        arrived = decode.next()
        assert isinstance(arrived, HandoffArrived)
        assert arrived.handoff.state.handle == key(n).handle
        decode.transport.acknowledge(key(n))
    for n in range(n_offers):
        delivered = prefill.next()
        assert isinstance(delivered, HandoffDelivered), delivered
        assert delivered.key == key(n)
    assert decode.events.empty()


def test_kv_on_a_slow_connection_is_sent_once_whatever_waits_behind_it(handoff_end, large):
    prefill, decode = handoff_end(HandoffConfig(send_bytes=3 * MB)), handoff_end()
    proxy = SlowProxy(decode.transport.endpoint, bytes_per_second=4 * MB)
    sizes = [8 * MB, *[MB] * 4]
    try:
        for n, size in enumerate(sizes):
            prefill.transport.offer(proxy.target, large(n, size), 60.0)
        deliver_all(prefill, decode, len(sizes))
    finally:
        proxy.close()
    assert prefill.value("baton_handoff_resent_total") == 0
    assert proxy.carried_bytes <= 1.1 * sum(sizes)


def can_make_namespaces() -> bool:
    if not shutil.which("ip") or not shutil.which("tc"):
        return False
    name = f"baton-kv-probe-{os.getpid()}"  # other test processes ask at the same time
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return made.returncode == 0


class Wire:
    """Two network namespaces and a link between them, at so many bits a second."""

    def __init__(self, rate: str) -> None:
        self.names = (f"baton-kv-p-{os.getpid()}", f"baton-kv-d-{os.getpid()}")
        self.close()
        for name in self.names:
            self._ip("netns", "add", name)
        self._ip("link", "add", "kvp", "netns", self.names[0], "type", "veth",
                 "peer", "name", "kvd", "netns", self.names[1])  # fmt: skip
        for name, device, address in zip(
            self.names, ("kvp", "kvd"), ("10.231.0.1", "10.231.0.2"), strict=True
        ):
            self.inside(name, "ip", "addr", "add", f"{address}/24", "dev", device)
            self.inside(name, "ip", "link", "set", device, "up")
            self.inside(name, "ip", "link", "set", "lo", "up")
        self.inside(self.names[0], "tc", "qdisc", "add", "dev", "kvp", "root", "tbf",
                    "rate", rate, "burst", "64kb", "latency", "50ms")  # fmt: skip

    @property
    def carried_bytes(self) -> int:
        path = "/sys/class/net/kvp/statistics/tx_bytes"
        return int(self.inside(self.names[0], "cat", path))

    def cut(self) -> None:
        """Let nothing through any more; nobody is told."""
        self._ip("-n", self.names[0], "neigh", "replace", "10.231.0.2", "dev", "kvp",
                 "lladdr", "02:00:00:00:00:99", "nud", "permanent")  # fmt: skip

    def heal(self) -> None:
        self._ip("-n", self.names[0], "neigh", "del", "10.231.0.2", "dev", "kvp")

    def inside(self, name: str, *command: str) -> str:
        done = self._ip("netns", "exec", name, *command)
        return done.stdout

    def close(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    @staticmethod
    def _ip(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def made_in(name: str, make):
    """Return what `make` returns when it runs in a namespace: its threads stay there."""
    import ctypes

    made = []

    def enter() -> None:
        with open(f"/run/netns/{name}") as namespace:  # noqa: PTH123 - the descriptor is needed
            assert ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0) == 0
        made.append(make())

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    return made[0]


needs_namespaces = pytest.mark.skipif(
    not can_make_namespaces(), reason="network namespaces need root and iproute2"
)


@pytest.fixture
def wire() -> Iterator[Wire]:
    with ExitStack() as stack:
        made = Wire("160mbit")
        stack.callback(made.close)
        yield made


@pytest.mark.e2e
@needs_namespaces
def test_a_link_of_20_megabytes_a_second_carries_each_byte_once(wire, handoff_end, large):
    config = HandoffConfig(bind="tcp://10.231.0.2:0")
    prefill = made_in(wire.names[0], handoff_end)
    decode = made_in(wire.names[1], lambda: handoff_end(config))
    sizes = [60 * MB, *[10 * MB] * 3]
    for n, size in enumerate(sizes):
        prefill.transport.offer(decode.target, large(n, size), 60.0)
    deliver_all(prefill, decode, len(sizes))
    assert prefill.value("baton_handoff_resent_total") == 0
    assert wire.carried_bytes <= 1.1 * sum(sizes)


@pytest.mark.e2e
@needs_namespaces
def test_a_link_that_goes_silent_with_kv_on_it_is_noticed_and_used_again(wire, handoff_end, large):
    config = HandoffConfig(bind="tcp://10.231.0.2:0")
    prefill = made_in(wire.names[0], handoff_end)
    decode = made_in(wire.names[1], lambda: handoff_end(config))
    prefill.transport.offer(decode.target, large(0, 40 * MB), 60.0)
    while wire.carried_bytes < 5 * MB:
        time.sleep(0.01)
    wire.cut()
    while prefill.value("baton_handoff_flying_bytes"):  # until the kernel gives the connection up
        time.sleep(0.05)
    wire.heal()
    deliver_all(prefill, decode, 1)
    assert prefill.value("baton_handoff_resent_total") == 1
