"""A worker that was paused, as its host may be, heard nothing: no gateway was silent for that."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from baton_worker.identity import Role
from baton_worker.link.api import GatewayLost, Pressure
from baton_worker.link.inbox import InboxPolicy
from baton_worker.link.metrics import WorkerLinkMetrics
from baton_worker.link.outbox import OutboxLimits
from baton_worker.link.parts import FrameWriter
from baton_worker.link.peer import Clocks, GatewayPeer
from baton_worker.link.sockets import Change, ConnectionEvent, dealer
from baton_worker.link.worker_end import EndSettings, WorkerEnd
from baton_worker.records.control import Welcome

INCARNATION = 77
LOST_SECONDS = 30.0
TURN_SECONDS = 0.1
SETTINGS = EndSettings(
    OutboxLimits(1 << 20, 64, stalled_seconds=LOST_SECONDS),
    InboxPolicy(),
    1.0,
    3.0,
    lost_seconds=LOST_SECONDS,
)


class Bench:
    """A worker's end that is linked and waits for an acknowledgement, on a clock of the test's."""

    def __init__(self, context, new_factory, new_info, columns):
        self.now = 1000.0
        self.factory = new_factory("decode")
        metrics = WorkerLinkMetrics(self.factory)
        writer = FrameWriter(Role.DECODE, new_info().semantic_hash)
        end = WorkerEnd("tcp://127.0.0.1:9", SETTINGS, metrics, lambda: 9, writer.blank, self.now)
        clocks = Clocks(lambda: self.now, lambda: 0)
        self.peer = GatewayPeer(end, writer, dealer(context, 1.0, 3.0), metrics, clocks)
        end.connected(self.now)
        end.receive(Welcome(9, 1, 1, 1, 100, 1 << 20, INCARNATION, b""), self.now)
        assert self.peer.publish(INCARNATION, columns(INCARNATION, [1]), 1)

    def turns(self, seconds):
        """Serve the link for so long; return what came of it."""
        events = []
        for _ in range(round(seconds / TURN_SECONDS)):
            self.now += TURN_SECONDS
            events += self.peer.tick()
        return events


@pytest.fixture
def bench(new_factory, new_info, columns) -> Iterator[Bench]:
    context = zmq.Context()
    made = Bench(context, new_factory, new_info, columns)
    yield made
    made.peer.close(0)
    context.term()


def test_a_pause_longer_than_a_gateway_may_be_silent_loses_none(bench: Bench) -> None:
    bench.now += 2 * LOST_SECONDS
    assert bench.peer.pressure() is Pressure.OPEN, "the engine may be the first to look"
    assert bench.turns(LOST_SECONDS - 2.0) == []
    assert bench.peer.pressure() is Pressure.OPEN


def test_a_gateway_that_is_silent_afterwards_is_lost_as_ever(bench: Bench) -> None:
    bench.now += 2 * LOST_SECONDS
    assert bench.turns(LOST_SECONDS + 2.0) == [GatewayLost(INCARNATION, "silent")]


def test_a_gateway_that_libzmq_found_silent_meanwhile_counts_as_silent(
    bench: Bench, read_metric
) -> None:
    """Its ping is timed by a thread that did not stand still, and ends the connection."""
    bench.now += 10.0
    bench.peer._on_connection(ConnectionEvent(Change.DOWN))
    assert bench.turns(2.0) == []
    assert read_metric(bench.factory, "baton_link_heartbeat_timeouts_total") == 0
    assert bench.turns(6.0) == []
    assert read_metric(bench.factory, "baton_link_heartbeat_timeouts_total") == 1


def test_a_gateway_that_is_silent_is_lost_though_the_worker_stands_still_again_and_again(
    bench: Bench,
) -> None:
    events, seen = [], []
    for _ in range(round(LOST_SECONDS) + 10):
        bench.now += 1.5
        events += bench.peer.tick()
        if not events:
            seen.append(bench.peer.pressure())
    assert events == [GatewayLost(INCARNATION, "silent")]
    assert len(seen) > LOST_SECONDS
    assert set(seen) == {Pressure.OPEN}


def test_one_that_takes_nothing_while_the_link_is_served_stalls(bench: Bench) -> None:
    seen = set()
    for _ in range(round(LOST_SECONDS / TURN_SECONDS) + 5):
        bench.now += TURN_SECONDS
        seen.add(bench.peer.pressure())
        bench.peer._listening.look(bench.now)
    assert seen == {Pressure.OPEN, Pressure.STALLED}
