"""The kernel says that a worker is dead: its connection ends. A live one is soon back.

Every gateway here waits ten minutes for a silent worker, so whatever it notices in a test, it did
not notice by silence.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import zmq

from baton_cluster.ports import reserve_port
from baton_worker.config import CurveConfig, LinkConfig, ModelConfig, ProcessConfig, dump_config
from baton_worker.identity import GatewayIdentity, make_handle
from baton_worker.link.api import CommandReceived, GatewayUp, WorkerDown, WorkerUp
from baton_worker.link.curve import generate_key_files
from baton_worker.link.gateway_end import GatewayEnd, GatewaySettings
from baton_worker.link.inbox import InboxPolicy
from baton_worker.link.metrics import GatewayLinkMetrics
from baton_worker.link.outbox import OutboxLimits
from baton_worker.link.sockets import Socket, router
from baton_worker.link.switchboard import Switchboard
from baton_worker.link.worker_table import WorkerTable
from baton_worker.messages import Abort, WorkerInfo
from baton_worker.metrics import MetricFactory
from baton_worker.records.control import Bye, Hello, encode_control

PROGRAM = Path(__file__).with_name("program_linked_worker.py")
NEVER_SILENT = {"dead_after_seconds": 60.0}
"""For no longer than is waited for here: behind a stall of its own, which a busy machine makes, a
gateway gives as long to connections that ended too.
"""


def free_endpoint() -> str:
    return f"tcp://127.0.0.1:{reserve_port()}"


class Proxy:
    """A TCP address in front of another, whose connections can be reset and whose door shut."""

    def __init__(self, endpoint: str) -> None:
        host, port = endpoint.removeprefix("tcp://").split(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._ends: list[socket.socket] = []
        self._lock = threading.Lock()
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                with self._lock:
                    self._ends += [near, far]
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=(source, sink), daemon=True).start()

    @staticmethod
    def _carry(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)

    def reset(self) -> None:
        """Cut every connection, as a middlebox that lost its state does."""
        with self._lock:
            ends, self._ends = self._ends, []
        for end in ends:
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self) -> None:
        """Let nobody in any more, and cut who is."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.reset()


@pytest.fixture
def proxied(start_gateway, start_worker):
    """A gateway with all the time in the world, a worker, and the proxy between them."""

    def start(**changes: object):
        gateway = start_gateway(**NEVER_SILENT, **changes)
        proxy = Proxy(gateway.link.endpoint)
        worker = start_worker(proxy.endpoint, **NEVER_SILENT)
        worker.log.wait_for(GatewayUp)
        gateway.log.wait_for(WorkerUp)
        return gateway, proxy, worker

    return start


def curve_of(folder: Path) -> Callable[[str], CurveConfig]:
    pairs = {
        name: generate_key_files(folder / f"{name}.pub", folder / f"{name}.sec")
        for name in ("gateway", "worker")
    }
    allowed = folder / "allowed"
    allowed.write_text("".join(pair.public.decode() + "\n" for pair in pairs.values()))
    return lambda name: CurveConfig(
        public_key_file=str(folder / f"{name}.pub"),
        secret_key_file=str(folder / f"{name}.sec"),
        gateway_public_key_file=str(folder / "gateway.pub"),
        allowed_keys_file=str(allowed),
    )


@contextlib.contextmanager
def worker_process(folder: Path, worker_id: str, link: LinkConfig) -> Iterator[subprocess.Popen]:
    """Run a worker process until the caller, or the end of the block, kills it."""
    config = ProcessConfig(model=ModelConfig(path="unused"), worker_id=worker_id, link=link)
    path = folder / f"{worker_id}.yaml"
    path.write_bytes(dump_config(config))
    command = [sys.executable, str(PROGRAM), str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "linked\n"
            yield process
        finally:
            process.kill()


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("has_curve", [False, True], ids=["plain", "curve"])
def test_a_killed_process_is_known_by_its_connection(
    start_gateway, read_metric, tmp_path: Path, has_curve: bool
) -> None:
    curve = curve_of(tmp_path) if has_curve else lambda name: CurveConfig(enabled=False)
    gateway = start_gateway(curve=curve("gateway"), **NEVER_SILENT)
    link = LinkConfig(
        gateways=(gateway.link.endpoint,), curve=curve("worker"), dead_after_seconds=600.0
    )
    with (
        worker_process(tmp_path, "prefill-0", link) as victim,
        worker_process(tmp_path, "prefill-1", link),
    ):
        gateway.log.wait_for(WorkerUp, 2)
        victim.kill()
        (down,) = gateway.log.wait_for(WorkerDown)
        assert (down.worker_id, down.reason) == ("prefill-0", "disconnected")
        assert read_metric(gateway.factory, "baton_link_disconnects_total") == 1
        assert read_metric(gateway.factory, "baton_link_heartbeat_timeouts_total") == 0
        assert read_metric(gateway.factory, "baton_link_workers_up") == 1


def test_a_live_worker_whose_connection_is_reset_loses_no_row_and_no_command(
    proxied, columns, read_metric
) -> None:
    gateway, proxy, worker = proxied(reconnect_seconds=600.0)
    rows = itertools.count()
    commands = [Abort(make_handle(77, n), 0) for n in range(30)]
    for cut in range(3):
        for command in commands[10 * cut : 10 * cut + 10]:
            row = next(rows)
            worker.link.publish(77, columns(77, [row]), row)
            assert gateway.link.send("decode-0", command)
        proxy.reset()
        worker.log.wait_until(
            lambda n=cut + 1: read_metric(gateway.factory, "baton_link_reconnects_total") >= n
        )
    gateway.log.wait(lambda log: len(gateway.rows()) >= 30)
    received = worker.log.wait_for(CommandReceived, 30)
    assert gateway.rows() == list(range(30))
    assert [event.command for event in received] == commands
    assert gateway.log.of(WorkerDown) == []
    assert worker.log.of(GatewayUp) == worker.log.of(GatewayUp)[:1]


def test_a_worker_that_cannot_come_back_is_given_up_and_welcome_later(
    proxied, start_worker, columns, read_metric
) -> None:
    gateway, proxy, worker = proxied()
    proxy.close()
    (down,) = gateway.log.wait_for(WorkerDown)
    assert (down.worker_id, down.reason) == ("decode-0", "disconnected")
    assert not gateway.link.send("decode-0", Abort(make_handle(77, 1), 0))
    direct = start_worker(gateway.link.endpoint)
    direct.log.wait_for(GatewayUp)
    direct.link.publish(77, columns(77, [7]), 1)
    gateway.log.wait(lambda log: gateway.rows() == [7])
    assert worker.link.linked_gateways() == 0


def test_a_gateway_that_is_not_back_in_time_is_silent_too(
    start_gateway, start_worker, read_metric
) -> None:
    gateway = start_gateway(**NEVER_SILENT)
    proxy = Proxy(gateway.link.endpoint)
    worker = start_worker(proxy.endpoint, heartbeat_seconds=0.05, dead_after_seconds=0.5)
    worker.log.wait_for(GatewayUp)
    proxy.close()
    for name in ("disconnects", "heartbeat_timeouts"):
        worker.log.wait_until(
            lambda name=name: read_metric(worker.factory, f"baton_link_{name}_total") >= 1
        )


class Bench(NamedTuple):
    """A gateway's end of the link that the test turns by hand, a poll at a time."""

    socket: Socket
    table: WorkerTable
    board: Switchboard
    factory: MetricFactory

    @contextlib.contextmanager
    def greeted_by(
        self, infos: list[WorkerInfo], *, leave: bool = False
    ) -> Iterator[list[GatewayEnd]]:
        """Connect workers and take their greetings in, nothing else.

        The block's end kills them; those that `leave` say goodbye first.
        """
        with contextlib.ExitStack() as stack:
            context = stack.enter_context(zmq.Context())
            dealers = []
            for epoch, info in enumerate(infos):
                dealer = stack.enter_context(context.socket(zmq.DEALER))
                dealers.append(dealer)
                dealer.linger = 60_000 if leave else 0
                dealer.connect(self.socket.last_endpoint)
                dealer.send(encode_control(Hello(epoch, 1, 1, 1, 0, msgspec.msgpack.encode(info))))
            while not all(info.worker_id in self.table.ends for info in infos):
                assert self.socket.poll(60_000)
                self.board.receive()
            yield [self.table.ends[info.worker_id] for info in infos]
            if leave:
                for epoch, dealer in enumerate(dealers):
                    dealer.send(encode_control(Bye(epoch, 1)))

    def wait_until_unreachable(self, route: bytes) -> None:
        with contextlib.suppress(zmq.ZMQError):
            while True:
                self.socket.send_multipart([route, b""], zmq.NOBLOCK)
                threading.Event().wait(0.01)


@pytest.fixture
def bench(new_factory) -> Iterator[Bench]:
    factory = new_factory("gateway")
    metrics = GatewayLinkMetrics(factory)
    settings = GatewaySettings(
        GatewayIdentity(77), InboxPolicy(), 1.0, 600.0, 0.5, OutboxLimits(1 << 20, 64)
    )
    table = WorkerTable(settings, metrics)
    with zmq.Context() as context:
        socket = router(context)
        socket.bind("tcp://127.0.0.1:*")
        board = Switchboard(socket, table, metrics, settings.identity)
        yield Bench(socket, table, board, factory)
        board.close()


def test_the_next_owner_of_a_descriptor_is_not_blamed_for_the_last_ones_end(
    bench: Bench, new_info
) -> None:
    """The kernel hands out the lowest free number, so newcomers get the numbers of the dead."""
    with bench.greeted_by([new_info(f"dead-{n}") for n in range(8)]) as dead:
        pass
    for end in dead:
        bench.wait_until_unreachable(end.route)
    with bench.greeted_by([new_info(f"alive-{n}") for n in range(8)]) as alive:
        bench.board.read_connections()
        assert [end.is_cut_off for end in dead] == [True] * 8
        assert [end.is_cut_off for end in alive] == [False] * 8


@pytest.mark.parametrize("found_by", ["monitor", "send"])
def test_a_goodbye_is_heard_behind_the_news_that_its_connection_ended(
    bench: Bench, new_info, read_metric, found_by: str
) -> None:
    with bench.greeted_by([new_info("polite")], leave=True) as (end,):
        pass
    bench.wait_until_unreachable(end.route)
    if found_by == "monitor":
        bench.board.read_connections()
    else:
        bench.board.flush()
    assert end.is_cut_off
    assert bench.board.receive() == [WorkerDown("polite", 0, "bye")]
    assert read_metric(bench.factory, "baton_link_disconnects_total") == 0
    assert read_metric(bench.factory, "baton_link_workers_down_total", reason="bye") == 1


def test_a_worker_that_nothing_can_be_sent_to_is_cut_off(bench: Bench, new_info) -> None:
    """As when the news of its end came before its greeting was read."""
    with bench.greeted_by([new_info("short-lived")]) as (end,):
        pass
    bench.wait_until_unreachable(end.route)
    assert not end.is_cut_off, "the news has not been read"
    bench.board.flush()
    assert end.is_cut_off
