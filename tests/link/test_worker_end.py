"""The worker's end alone: greeting, replay, being turned away, losing a gateway."""

from __future__ import annotations

import itertools

import pytest

from baton_worker.identity import Role
from baton_worker.link.api import GatewayLost, GatewayUp, Pressure
from baton_worker.link.inbox import InboxPolicy
from baton_worker.link.metrics import WorkerLinkMetrics
from baton_worker.link.outbox import OutboxLimits
from baton_worker.link.parts import TAIL_LIMIT, FrameWriter, StepPart, tag_of, weigh
from baton_worker.link.worker_end import CommandBytes, EndSettings, FrameRefused, State, WorkerEnd
from baton_worker.records.control import (
    Ack,
    Bye,
    CommandFrame,
    ErrorNotice,
    Hello,
    Resume,
    Welcome,
    Who,
)

SETTINGS = EndSettings(
    OutboxLimits(1 << 16, 64, tail=TAIL_LIMIT), InboxPolicy(), 1.0, 3.0, lost_seconds=30.0
)


class Bench:
    def __init__(self, new_factory, columns) -> None:
        self.columns = columns
        self.factory = new_factory()
        self.writer = FrameWriter(Role.DECODE, 1)
        self.end = WorkerEnd(
            "tcp://gw:1",
            SETTINGS,
            WorkerLinkMetrics(self.factory),
            itertools.count(5).__next__,
            self.writer.blank,
            now=0.0,
        )

    def said(self) -> list[object]:
        said = list(self.end.out)
        self.end.out.clear()
        return said

    def welcome(
        self, expected: int = 1, incarnation: int = 77, now: float = 0.0, oldest: int = 1
    ) -> list[object]:
        message = Welcome(self.end.epoch, oldest, oldest, expected, 100, 1 << 20, incarnation)
        return self.end.receive(message, now)

    def publish(self, n: int) -> None:
        for row in range(n):
            columns = self.columns(77, [row])
            self.end.outbox.push(StepPart(columns, row), weigh(columns), 0.0, group=77)

    def send(self) -> list[int]:
        seqs = []
        while entry := self.end.claim():
            if entry.frame is None:
                frame = self.writer.write(entry.parts, self.end.epoch, entry.seq, 0)
                self.end.outbox.seal(entry, frame, tag_of(entry.parts))
            self.end.outbox.sent(entry)
            seqs.append(entry.seq)
        return seqs


@pytest.fixture
def bench(new_factory, columns) -> Bench:
    return Bench(new_factory, columns)


@pytest.fixture
def linked(bench: Bench) -> Bench:
    bench.end.connected(0.0)
    bench.welcome()
    bench.said()
    return bench


def test_nothing_but_hello_goes_out_before_a_welcome(bench: Bench) -> None:
    bench.end.connected(0.0)
    bench.publish(2)
    assert bench.send() == []
    assert [type(message) for message in bench.said()] == [Hello]
    assert bench.welcome() == [GatewayUp(77, "tcp://gw:1")]
    assert bench.send() == [1]
    assert [type(message) for message in bench.said()] == [Ack], "credit for commands"


def test_hello_is_repeated_until_it_is_answered(bench: Bench) -> None:
    bench.end.connected(0.0)
    bench.said()
    for now in (0.2, 0.3, 0.4, 0.6):
        bench.end.tick(now)
    assert [type(message) for message in bench.said()] == [Hello, Hello]


def test_after_a_reconnect_sending_goes_on_where_the_gateway_says(linked: Bench) -> None:
    linked.publish(4)
    assert linked.send() == [1, 2, 3, 4]
    linked.end.disconnected()
    linked.end.connected(1.0)
    linked.welcome(expected=3, now=1.0)
    assert linked.send() == [3, 4]


def test_a_welcome_on_a_standing_connection_replays_only_what_is_missing(linked: Bench) -> None:
    linked.publish(2)
    linked.send()
    linked.end.tick(0.5)
    assert isinstance(linked.said()[0], Hello), "no acknowledgement for 300 ms"
    linked.publish(2)
    assert linked.send() == [3, 4]
    linked.welcome(expected=3, now=0.5)
    assert linked.send() == [], "3 and 4 went out after the HELLO and are on their way"


def test_a_resume_replays_and_tells_what_is_gone(linked: Bench) -> None:
    linked.publish(3)
    linked.send()
    linked.end.receive(Ack(5, 1, 2, 100, 1 << 20), 0.0)
    linked.end.receive(Resume(5, 1, 1), 0.0)
    assert linked.send() == [3]
    (hello,) = linked.said()
    assert hello.oldest_seq == 3


def test_a_gateway_that_asks_who_is_greeted_again(linked: Bench) -> None:
    linked.publish(1)
    linked.end.receive(Who(77, 0), 1.0)
    linked.end.receive(Who(77, 0), 1.1)
    assert [type(message) for message in linked.said()] == [Hello]
    assert linked.send() == []


def test_another_incarnation_means_the_gateway_restarted(linked: Bench) -> None:
    linked.publish(2)
    linked.send()
    linked.end.disconnected()
    linked.end.connected(1.0)
    events = linked.welcome(incarnation=78, now=1.0)
    assert events == [GatewayLost(77, "restarted"), GatewayUp(78, "tcp://gw:1")]
    assert linked.send() == [1, 2], "unacknowledged records are replayed"


def test_a_silent_gateway_is_unlinked_then_lost_and_its_rows_freed(linked: Bench) -> None:
    linked.publish(2)
    epoch = linked.end.epoch
    assert linked.end.is_linked(2.9)
    assert not linked.end.is_linked(3.0)
    assert linked.end.tick(29.9) == []
    assert linked.end.tick(30.0) == [GatewayLost(77, "silent")]
    assert len(linked.end.outbox) == 0
    assert linked.end.epoch != epoch
    assert linked.end.pressure(30.0) is Pressure.OPEN


@pytest.mark.parametrize("is_cut", [False, True], ids=["stands", "cut"])
def test_each_silence_of_a_gateway_counts_once_whatever_becomes_of_its_connection(
    linked: Bench, read_metric, is_cut: bool
) -> None:
    """Of a gateway that stands still libzmq's ping may end the connection before the next tick."""

    def counted() -> float:
        return read_metric(linked.factory, "baton_link_heartbeat_timeouts_total")

    linked.end.tick(2.99)
    if is_cut:
        linked.end.disconnected()
    assert counted() == 0
    linked.end.tick(3.0)
    assert counted() == 1
    linked.end.connected(3.5)
    linked.end.tick(4.0)
    assert counted() == 1, "whose kernel takes connections is silent as before"
    linked.welcome(now=5.0)
    linked.end.tick(7.99)
    linked.end.tick(8.0)
    assert counted() == 2
    linked.end.tick(40.0)
    linked.end.tick(80.0)
    assert counted() == 2, "one that was lost is nobody's silence"


def test_a_gateway_that_was_never_met_is_not_silent(bench: Bench, read_metric) -> None:
    bench.end.connected(0.0)
    bench.end.tick(60.0)
    assert read_metric(bench.factory, "baton_link_heartbeat_timeouts_total") == 0


def test_bye_loses_the_gateway_at_once(linked: Bench) -> None:
    assert linked.end.receive(Bye(77, 1), 1.0) == [GatewayLost(77, "bye")]


def test_commands_are_handed_over_once_and_in_order(linked: Bench) -> None:
    frames = [CommandFrame(77, seq, bytes([seq])) for seq in (1, 3, 2, 2, 3)]
    events = [event for frame in frames for event in linked.end.receive(frame, 0.0)]
    assert events == [CommandBytes(77, bytes([seq])) for seq in (1, 2, 3)]
    assert linked.said() == [Resume(77, 1, 2)]


def test_commands_of_another_incarnation_are_ignored(linked: Bench, read_metric) -> None:
    assert linked.end.receive(CommandFrame(76, 1, b"x"), 0.0) == []
    assert read_metric(linked.factory, "baton_link_stale_messages_total") == 1


def test_commands_that_the_gateway_dropped_are_skipped(linked: Bench) -> None:
    linked.welcome(oldest=4)
    assert linked.end.receive(CommandFrame(77, 4, b"x"), 0.0) == [CommandBytes(77, b"x")]


def test_a_refused_record_is_replaced_and_its_rows_named(linked: Bench) -> None:
    linked.publish(2)
    linked.send()
    (refused,) = linked.end.receive(ErrorNotice(5, 1, 1, 1, "body_crc"), 0.0)
    assert isinstance(refused, FrameRefused)
    assert [key.handle & 0xFF for key in refused.tag.requests()] == [0]
    entry = linked.end.claim()
    assert entry.frame == linked.writer.blank(5, 1)
    assert linked.send() == [1, 2]


@pytest.mark.parametrize(
    ("reason", "seconds"), [("replaced", 3.0), ("quarantined", 30.0)], ids=["other", "quarantine"]
)
def test_turned_away_it_starts_over_after_a_while(
    linked: Bench, reason: str, seconds: float
) -> None:
    events = linked.end.receive(ErrorNotice(5, 0, 0, 0, reason), 1.0)
    assert events == [GatewayLost(77, reason)]
    assert linked.end.state is State.TURNED_AWAY
    linked.end.receive(Who(77, 0), 1.5)
    linked.end.disconnected()
    linked.end.connected(2.0)
    linked.end.tick(seconds + 0.9)
    assert linked.said() == []
    linked.end.tick(seconds + 1.0)
    (hello,) = linked.said()
    assert hello.epoch == 6


def test_a_quiet_link_is_kept_alive(linked: Bench) -> None:
    linked.end.tick(0.9)
    assert linked.said() == []
    linked.end.tick(1.0)
    assert [type(message) for message in linked.said()] == [Ack]
