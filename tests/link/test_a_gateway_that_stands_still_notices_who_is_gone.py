"""A link that is not served again and again blames nobody for that, and notices who is gone.

The switchboard is real, and the time that it goes by is the test's.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import msgspec
import pytest
import zmq

from baton_worker.identity import GatewayIdentity
from baton_worker.link import switchboard
from baton_worker.link.api import WorkerDown
from baton_worker.link.gateway_end import GatewaySettings
from baton_worker.link.inbox import InboxPolicy
from baton_worker.link.metrics import GatewayLinkMetrics
from baton_worker.link.outbox import OutboxLimits
from baton_worker.link.sockets import router
from baton_worker.link.switchboard import Switchboard
from baton_worker.link.worker_table import WorkerTable
from baton_worker.records.control import Ack, Hello, encode_control

DEAD_AFTER, TURN_SECONDS = 3.0, 0.125


class Bench:
    """A served link with one worker, which speaks when it is told to."""

    def __init__(self, socket, context, factory, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(switchboard, "time", SimpleNamespace(monotonic=lambda: self.now))
        settings = GatewaySettings(
            GatewayIdentity(77), InboxPolicy(), 1.0, DEAD_AFTER, 0.5, OutboxLimits(1 << 20, 64)
        )
        metrics = GatewayLinkMetrics(factory)
        self.socket = socket
        self.table = WorkerTable(settings, metrics)
        self.board = Switchboard(socket, self.table, metrics, settings.identity)
        self.worker = context.socket(zmq.DEALER)
        self.worker.connect(socket.last_endpoint.decode())

    def say(self, message):
        self.worker.send(encode_control(message))
        assert self.socket.poll(60_000)

    def close(self):
        """The worker's connection ends, and the gateway is told."""
        self.worker.close(linger=0)
        while not self.table.ends["decode-0"].is_cut_off:
            assert self.board.monitoring.poll(60_000)
            self.board.read_connections()

    def stand_still(self, seconds):
        """What came meanwhile is read first, as in each turn of the link's thread."""
        self.now += seconds
        return [*self.board.receive(), *self.board.tick()]

    def listen(self, seconds):
        turns = range(round(seconds / TURN_SECONDS))
        return [event for _ in turns for event in self.stand_still(TURN_SECONDS)]


@pytest.fixture
def bench(new_factory, new_info, monkeypatch) -> Iterator[Bench]:
    with zmq.Context() as context:
        socket = router(context)
        socket.bind("tcp://127.0.0.1:*")
        made = Bench(socket, context, new_factory("gateway"), monkeypatch)
        made.say(Hello(5, 1, 1, 1, 0, msgspec.msgpack.encode(new_info("decode-0"))))
        made.board.receive()
        yield made
        made.worker.close(linger=0)
        monkeypatch.undo()
        made.board.close()


def test_silence_counts_from_when_it_listens_again(bench):
    assert bench.stand_still(60.0) == []
    assert bench.listen(DEAD_AFTER - 0.25) == []
    assert bench.listen(0.5) == [WorkerDown("decode-0", 5, "silent")]


@pytest.mark.parametrize("is_cut_first", [True, False])
def test_a_connection_that_was_cut_for_its_silence_has_the_time_of_a_silent_worker(
    bench, is_cut_first
):
    if is_cut_first:
        bench.close()
        assert bench.listen(0.25) == []
    assert bench.stand_still(60.0) == []
    if not is_cut_first:
        bench.close()
    assert bench.listen(DEAD_AFTER - 0.25) == []
    assert len(bench.listen(0.5)) == 1


@pytest.mark.parametrize(("is_cut", "why"), [(False, "silent"), (True, "disconnected")])
def test_who_is_gone_is_noticed_though_it_stands_still_again_and_again(bench, is_cut, why):
    if is_cut:
        bench.close()
    events = [event for _ in range(12) for event in bench.stand_still(1.5)]
    assert events == [WorkerDown("decode-0", 5, why)]


def test_one_that_spoke_in_each_of_its_stalls_is_there(bench):
    for _ in range(12):
        bench.say(Ack(77, 1, 0, 0, 0))
        assert bench.stand_still(60.0) == []
