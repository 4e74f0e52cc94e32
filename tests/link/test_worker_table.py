"""What a gateway lets in: greetings, replacement, refusal, quarantine, silence."""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec
import pytest

from baton_worker import logs
from baton_worker.config import LinkConfig
from baton_worker.identity import GatewayIdentity, Role
from baton_worker.link.api import StepReceived, StepsLost, WorkerDown, WorkerUp
from baton_worker.link.gateway_end import LOOK_SECONDS, GatewaySettings
from baton_worker.link.inbox import InboxPolicy
from baton_worker.link.metrics import GatewayLinkMetrics
from baton_worker.link.outbox import OutboxLimits
from baton_worker.link.parts import FrameWriter, StepPart
from baton_worker.link.refusals import INCARNATION_TAKEN
from baton_worker.link.worker_table import WorkerTable
from baton_worker.records.coalesce import coalesce
from baton_worker.records.control import Ack, Bye, ErrorNotice, Hello, Resume, Welcome, Who
from baton_worker.records.errors import RecordError, RefusalReason
from baton_worker.records.layout import PREFIX_BYTES, STEP_HEADER_BYTES

INCARNATION = 77
ROUTE = b"r1"


class Bench:
    """A table, and one worker that speaks correctly unless told otherwise."""

    def __init__(self, new_info, new_factory, columns, reconnect_seconds: float = 0.5) -> None:
        self.new_info = new_info
        self.columns = columns
        self.factory = new_factory("gateway")
        limits = OutboxLimits(1 << 20, 64)
        self.identity = GatewayIdentity(INCARNATION)
        settings = GatewaySettings(
            self.identity,
            InboxPolicy(credit_frames=8),
            1.0,
            3.0,
            reconnect_seconds,
            limits,
        )
        self.refuses: dict[str, str] = {}
        self.table = WorkerTable(
            settings,
            GatewayLinkMetrics(self.factory),
            lambda user_id, info: self.refuses.get(user_id, ""),
        )
        self.writer = FrameWriter(Role.DECODE, new_info().semantic_hash)

    def hello(
        self,
        epoch: int = 5,
        oldest: int = 1,
        route: bytes = ROUTE,
        now: float = 0.0,
        key: str = "key",
        **info: object,
    ) -> list[object]:
        body = msgspec.msgpack.encode(self.new_info(**info))
        message = Hello(epoch, oldest, oldest, 1, 0, body)
        return self.table.hello(route, key, message, now)

    def frame(self, seq: int, rows: list[int] | None = None, incarnation: int = 77) -> memoryview:
        columns = self.columns(incarnation, rows or [seq])
        return memoryview(self.writer.write([StepPart(columns, seq)], 5, seq, 0))

    def step(self, frame: memoryview, route: bytes = ROUTE, now: float = 0.0) -> list[object]:
        return self.table.step(route, frame, now)

    def said(self, worker_id: str = "decode-0") -> list[object]:
        end = self.table.ends[worker_id]
        said = list(end.out)
        end.out.clear()
        return said

    def said_to_strangers(self) -> list[object]:
        said = [message for _, message in self.table.out]
        self.table.out.clear()
        return said


@pytest.fixture
def bench(new_info, new_factory, columns) -> Bench:
    return Bench(new_info, new_factory, columns)


@pytest.fixture
def count(bench: Bench, read_metric) -> Callable[..., float]:
    return lambda name, **labels: read_metric(bench.factory, f"baton_link_{name}_total", **labels)


def test_a_hello_is_welcomed_with_position_and_credit(bench: Bench) -> None:
    (up,) = bench.hello(oldest=4)
    assert isinstance(up, WorkerUp)
    welcome, ack = bench.said()
    assert isinstance(welcome, Welcome)
    assert (welcome.expected_seq, welcome.credit_seq, welcome.gateway_incarnation) == (4, 11, 77)
    assert ack == Ack(5, 1, 3, 11, welcome.credit_bytes)


def test_records_of_a_stranger_are_asked_who(bench: Bench) -> None:
    assert bench.step(bench.frame(1)) == []
    assert bench.step(bench.frame(2)) == []
    assert bench.said_to_strangers() == [Who(INCARNATION, 0)], "asked once, not per record"
    bench.step(bench.frame(3), now=0.29)
    assert bench.said_to_strangers() == []
    bench.step(bench.frame(3), now=0.3)
    assert len(bench.said_to_strangers()) == 1


def test_of_strangers_that_were_asked_who_the_last_4096_are_remembered(bench: Bench) -> None:
    for n in range(4096):
        bench.step(bench.frame(1), route=b"%d" % n)
    bench.said_to_strangers()
    bench.step(bench.frame(1), route=b"0")
    assert bench.said_to_strangers() == []
    bench.step(bench.frame(1), route=b"one more")
    bench.step(bench.frame(1), route=b"0")
    assert len(bench.said_to_strangers()) == 2


def test_a_hole_is_asked_for_and_what_follows_waits(bench: Bench, count) -> None:
    bench.hello()
    bench.said()
    assert bench.step(bench.frame(2)) == []
    assert bench.step(bench.frame(3)) == []
    assert bench.said() == [Resume(5, 1, 1)]
    assert (count("gaps"), count("resumes")) == (2, 1)
    received = [bench.step(bench.frame(seq))[0].meta.seq for seq in (1, 2, 3)]
    assert received == [1, 2, 3]


def test_a_record_that_no_credit_let_out_is_a_lie(bench: Bench) -> None:
    bench.hello()
    for seq in (1, 2):
        bench.step(bench.frame(seq))
    bench.table.ends["decode-0"].inbox.apply(1, 0.0)
    assert bench.step(bench.frame(9)) == [], "the last of eight above what is applied: a gap"
    with pytest.raises(RecordError, match=r"field_range: seq is 10, not in 1\.\.9"):
        bench.step(bench.frame(10))


def test_records_behind_lost_ones_are_let_out_by_the_welcome(bench: Bench) -> None:
    bench.hello()
    bench.step(bench.frame(1))
    bench.hello(oldest=50, route=b"r2")
    (step,) = bench.step(bench.frame(50), route=b"r2")
    assert step.meta.seq == 50, "nothing below it was ever applied"


def test_a_repeated_record_is_dropped_and_counted(bench: Bench, count) -> None:
    bench.hello()
    assert len(bench.step(bench.frame(1))) == 1
    assert bench.step(bench.frame(1)) == []
    assert count("duplicates") == 1


def test_records_that_left_the_ring_are_told_lost(bench: Bench, count) -> None:
    bench.hello()
    bench.step(bench.frame(1))
    (lost,) = bench.hello(oldest=5, route=b"r2")
    assert lost == StepsLost("decode-0", 5, 2, 4)
    assert count("lost_frames") == 3
    (step,) = bench.step(bench.frame(5), route=b"r2")
    assert isinstance(step, StepReceived)


def test_rows_of_another_gateway_process_are_dropped_and_acknowledged(bench: Bench, count) -> None:
    bench.hello()
    assert bench.step(bench.frame(1, [7, 8], incarnation=76)) == []
    assert count("foreign_rows") == 2
    assert bench.table.ends["decode-0"].inbox.applied == 1


def test_a_record_with_rows_of_two_processes_is_refused(bench: Bench, count) -> None:
    bench.hello()
    mixed = coalesce([bench.columns(76, [1]), bench.columns(77, [2])])
    bench.said()
    assert bench.step(memoryview(bench.writer.write([StepPart(mixed, 1)], 5, 1, 0))) == []
    assert bench.said() == [ErrorNotice(5, 1, 1, 1, "incarnation")]
    assert count("refused_frames", reason="incarnation") == 1


@pytest.mark.parametrize(
    ("writer", "reason"),
    [
        (FrameWriter(Role.DECODE, 1), "semantic_hash"),
        (FrameWriter(Role.PREFILL, 0xBA70), "role"),
    ],
    ids=["semantic-hash", "role"],
)
def test_a_record_that_contradicts_its_hello_is_refused(
    bench: Bench, writer: FrameWriter, reason: str
) -> None:
    bench.hello()
    bench.said()
    bench.step(memoryview(writer.write([StepPart(bench.columns(77, [1]), 1)], 5, 1, 0)))
    assert bench.said() == [ErrorNotice(5, 1, 1, 1, reason)]


def corrupt(frame: memoryview, at: int) -> memoryview:
    changed = bytearray(frame)
    changed[at] ^= 0xFF
    return memoryview(bytes(changed))


def test_a_refused_record_is_taken_back_empty(bench: Bench) -> None:
    bench.hello()
    bench.said()
    bad = corrupt(bench.frame(1), STEP_HEADER_BYTES)
    assert bench.step(bad) == []
    assert bench.step(bench.frame(2)) == []
    assert bench.said() == [ErrorNotice(5, 1, 1, 1, "body_crc")], "and no RESUME beside it"
    assert bench.step(memoryview(bench.writer.blank(5, 1))) == []
    (step,) = bench.step(bench.frame(2))
    assert step.meta.seq == 2


def test_while_a_replay_is_awaited_only_bytes_of_its_number_stand_for_it(
    bench: Bench, count
) -> None:
    bench.hello()
    bench.said()
    bench.step(bench.frame(2))
    assert bench.said() == [Resume(5, 1, 1)]
    strange = [corrupt(bench.frame(seq), STEP_HEADER_BYTES) for seq in (2, 5)]
    for bad in (*strange, memoryview(b"none"), memoryview(b"")):
        assert bench.step(bad, now=0.1) == []
    assert bench.said() == [], "each may be of what was sent before the replay"
    assert count("refused_frames", reason="body_crc") == 2
    bench.step(corrupt(bench.frame(1), STEP_HEADER_BYTES)[:PREFIX_BYTES], now=0.1)
    assert bench.said() == [ErrorNotice(5, 1, 1, 1, "total_len")]


def test_unreadable_bytes_are_the_expected_record_whatever_number_they_claim(bench: Bench) -> None:
    bench.hello(oldest=3)
    bench.said()
    bench.step(corrupt(bench.frame(9), STEP_HEADER_BYTES))
    assert bench.said() == [ErrorNotice(5, 1, 3, 3, "body_crc")]


def test_a_token_outside_the_workers_vocabulary_is_refused(bench: Bench) -> None:
    bench.hello(vocab_size=50)
    bench.said()
    bench.step(bench.frame(1, [99]))
    assert bench.said() == [ErrorNotice(5, 1, 1, 1, "token_range")]


def test_too_many_refusals_quarantine_the_worker(bench: Bench, count) -> None:
    bench.hello()
    bad = corrupt(bench.frame(1), STEP_HEADER_BYTES)
    events = [event for second in range(10) for event in bench.step(bad, now=second)]
    assert events == [WorkerDown("decode-0", 5, "quarantined: body_crc")]
    assert count("quarantines") == 1
    assert bench.said_to_strangers() == [ErrorNotice(5, 0, 0, 0, "quarantined")]
    assert bench.hello(now=11.0) == []
    assert bench.said_to_strangers() == [ErrorNotice(5, 0, 0, 0, "quarantined")]
    (up,) = bench.hello(epoch=6, now=12.0)
    assert isinstance(up, WorkerUp)


def test_refusals_spread_over_time_do_not_quarantine(bench: Bench) -> None:
    bench.hello()
    bad = corrupt(bench.frame(1), STEP_HEADER_BYTES)
    assert [event for n in range(30) for event in bench.step(bad, now=7.0 * n)] == []


def test_garbage_that_is_no_record_counts_towards_quarantine(bench: Bench) -> None:
    bench.hello()
    garbage = memoryview(b"GET / HTTP/1.1\r\n\r\n")
    events = [event for _ in range(10) for event in bench.step(garbage)]
    assert [type(event) for event in events] == [WorkerDown]


def test_a_silent_worker_goes_down_and_comes_back_where_it_was(bench: Bench, count) -> None:
    bench.hello()
    bench.step(bench.frame(1))
    assert bench.table.tick(2.9, judge_silence=True) == []
    assert bench.table.tick(3.0, judge_silence=False) == [], "unread messages prove nothing"
    assert bench.table.tick(3.0, judge_silence=True) == [WorkerDown("decode-0", 5, "silent")]
    assert count("heartbeat_timeouts") == 1
    assert bench.step(bench.frame(2), now=3.1) == [], "its route is forgotten: WHO"
    (up,) = bench.hello(now=3.2)
    assert isinstance(up, WorkerUp)
    (step,) = bench.step(bench.frame(2), now=3.3)
    assert step.meta.seq == 2


def test_a_worker_whose_connection_ended_goes_down_when_it_is_not_back_in_time(
    bench: Bench, count
) -> None:
    bench.hello()
    bench.table.cut_off(ROUTE, 1.0)
    assert bench.table.tick(1.4, judge_silence=True) == []
    assert bench.table.tick(1.5, judge_silence=False) == [], "its last words may wait unread"
    assert bench.table.tick(1.5, judge_silence=True) == [WorkerDown("decode-0", 5, "disconnected")]
    assert count("disconnects") == count("workers_down", reason="disconnected") == 1
    assert count("heartbeat_timeouts") == count("reconnects") == 0
    (up,) = bench.hello(route=b"r2", now=2.0)
    assert (up.worker_id, up.epoch) == ("decode-0", 5), "as after a silence"


def test_a_goodbye_that_is_read_after_its_connection_ended_is_one(
    bench: Bench, count, caplog
) -> None:
    """At an orderly end the monitor may be read first, or a send find nobody, and then the BYE."""
    bench.hello()
    bench.table.cut_off(ROUTE, 1.0)
    assert bench.table.tick(1.0 + LOOK_SECONDS, judge_silence=False) == [], "the BYE waits unread"
    (down,) = bench.table.control(ROUTE, Bye(5, 1), 1.7)
    assert down == WorkerDown("decode-0", 5, "bye")
    assert bench.table.tick(9.0, judge_silence=True) == []
    assert count("disconnects") == count("workers_down", reason="disconnected") == 0
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_greeting_that_an_ended_connection_still_holds_brings_nobody_back(
    bench: Bench, count
) -> None:
    """One that drains says so by a HELLO, then BYE, and goes: all may be read after its end."""
    bench.hello()
    bench.table.cut_off(ROUTE, 1.0)
    (up,) = bench.hello(now=1.0, draining=True)
    assert up.info.draining, "what it says of itself still counts"
    assert bench.table.tick(1.5, judge_silence=True) == [WorkerDown("decode-0", 5, "disconnected")]
    assert (count("disconnects"), count("reconnects")) == (1, 0)


def test_a_connection_that_ends_without_goodbye_is_told_once_all_it_carried_is_read(
    bench: Bench, count, caplog
) -> None:
    bench.hello()
    bench.table.cut_off(ROUTE, 1.0)
    bench.table.tick(1.0 + LOOK_SECONDS / 2, judge_silence=True)
    assert count("disconnects") == 0, "that the inbox was empty may have been before the end"
    for now in (1.0 + LOOK_SECONDS, 1.0 + 2 * LOOK_SECONDS):
        assert bench.table.tick(now, judge_silence=True) == []
        assert count("disconnects") == 1
    assert [record.getMessage() for record in caplog.records] == ["worker disconnected"]


def test_a_worker_whose_successor_comes_before_it_is_given_up_was_cut_off(
    bench: Bench, count
) -> None:
    bench.hello(epoch=5)
    bench.table.cut_off(ROUTE, 1.0)
    (down, _) = bench.hello(epoch=6, route=b"r2", now=1.0)
    assert down == WorkerDown("decode-0", 5, "replaced")
    assert (count("disconnects"), count("reconnects")) == (1, 0)


def test_no_setting_gives_a_worker_up_before_its_last_words_are_read(
    new_info, new_factory, columns
) -> None:
    bench = Bench(new_info, new_factory, columns, reconnect_seconds=0.01)
    bench.hello()
    bench.table.cut_off(ROUTE, 1.0)
    assert bench.table.tick(1.0 + LOOK_SECONDS / 2, judge_silence=True) == []
    assert len(bench.table.tick(1.0 + LOOK_SECONDS, judge_silence=True)) == 1


def test_a_worker_that_is_back_in_time_loses_nothing(bench: Bench, count) -> None:
    bench.hello()
    bench.step(bench.frame(1))
    end = bench.table.ends["decode-0"]
    end.command(b"told", 0.0)
    bench.table.cut_off(ROUTE, 1.0)
    (step,) = bench.step(bench.frame(2), now=1.1)
    assert step.meta.seq == 2, "what the connection carried still counts"
    assert bench.hello(route=b"r2", now=1.4) == []
    assert bench.table.tick(1.6, judge_silence=True) == []
    (step,) = bench.step(bench.frame(3), route=b"r2", now=1.6)
    assert step.meta.seq == 3
    assert len(end.outbox) == 1, "its command goes out again"
    assert count("disconnects") == count("reconnects") == 1


def test_the_end_of_a_connection_that_was_left_before_means_nothing(bench: Bench, count) -> None:
    bench.hello()
    bench.hello(route=b"r2")
    bench.table.cut_off(ROUTE, 0.1)
    bench.table.cut_off(b"stranger", 0.1)
    assert bench.table.tick(2.0, judge_silence=True) == []
    assert count("disconnects") == 0


def test_a_connection_ends_once(bench: Bench, count) -> None:
    bench.hello()
    bench.table.cut_off(ROUTE, 1.0)
    bench.table.cut_off(ROUTE, 1.4)
    assert len(bench.table.tick(1.5, judge_silence=True)) == 1, "the second news buys no time"
    assert count("disconnects") == 1


def test_by_default_a_dead_process_is_given_up_within_a_second() -> None:
    config = LinkConfig()
    assert config.reconnect_seconds + LOOK_SECONDS < 1.0 < config.dead_after_seconds


def test_a_link_that_ends_takes_every_worker_down(bench: Bench) -> None:
    bench.hello()
    bench.hello(worker_id="decode-1", epoch=6, route=b"r2")
    downs = bench.table.abandon()
    assert [(down.worker_id, down.reason) for down in downs] == [
        ("decode-0", "link_failed"),
        ("decode-1", "link_failed"),
    ]


def test_commands_told_to_a_worker_that_went_down_are_never_delivered(bench: Bench) -> None:
    bench.hello()
    end = bench.table.ends["decode-0"]
    end.command(b"old", 0.0)
    bench.table.tick(3.0, judge_silence=True)
    bench.hello(now=4.0)
    end.command(b"new", 4.0)
    bench.table.control(ROUTE, Ack(INCARNATION, 1, 0, 100, 1 << 20), 4.0)
    command = end.next_command()
    assert (command.seq, command.body) == (2, b"new")
    assert next(m for m in bench.said() if isinstance(m, Welcome)).commands_oldest == 2


def test_commands_on_a_broken_connection_are_sent_again_after_the_next_hello(bench: Bench) -> None:
    bench.hello()
    end = bench.table.ends["decode-0"]
    end.command(b"a", 0.0)
    end.command(b"b", 0.0)
    bench.table.control(ROUTE, Ack(INCARNATION, 1, 0, 100, 1 << 20), 0.0)
    for _ in range(2):
        end.next_command()
        end.command_sent()
    assert end.next_command() is None
    bench.hello(route=b"r2")
    assert end.next_command().body == b"a"


def test_an_unacknowledged_command_is_sent_again_in_time(bench: Bench) -> None:
    bench.hello()
    end = bench.table.ends["decode-0"]
    bench.table.control(ROUTE, Ack(INCARNATION, 1, 0, 100, 1 << 20), 0.0)
    end.command(b"a", 0.0)
    end.next_command()
    end.command_sent()
    bench.table.tick(1.9, judge_silence=False)
    assert end.next_command() is None
    bench.table.tick(2.0, judge_silence=False)
    assert end.next_command().body == b"a"


def test_a_new_process_replaces_the_old_one_for_good(bench: Bench, count) -> None:
    bench.hello(epoch=5)
    bench.table.cut_off(ROUTE, 0.0)
    down, up = bench.hello(epoch=6, route=b"r2")
    assert down == WorkerDown("decode-0", 5, "replaced")
    assert (up.worker_id, up.epoch) == ("decode-0", 6)
    assert bench.hello(epoch=5, route=b"r3") == []
    assert count("rejected_hellos", reason="replaced") == 1


def test_bye_ends_an_epoch(bench: Bench) -> None:
    bench.hello()
    assert bench.table.control(ROUTE, Bye(5, 1), 0.0) == [WorkerDown("decode-0", 5, "bye")]
    assert bench.table.ends == {}


@pytest.mark.parametrize(
    ("info", "reason"),
    [({"wire_min": 2, "wire_max": 3}, "wire_version"), ({"role": 9}, "role")],
    ids=["wire", "role"],
)
def test_a_worker_that_cannot_be_served_is_told_why(
    bench: Bench,
    info: dict[str, object],
    reason: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch,
) -> None:
    monkeypatch.setattr(logs, "LOG_SECONDS", 1e9)
    assert bench.hello(**info) == bench.hello(**info) == []
    assert bench.said_to_strangers() == 2 * [ErrorNotice(5, 0, 0, 0, reason)]
    assert caplog.messages == ["HELLO rejected"]


def test_a_key_that_may_not_use_this_name_is_turned_away(bench: Bench) -> None:
    bench.refuses["key"] = "impersonation"
    assert bench.hello() == []
    assert bench.said_to_strangers() == [ErrorNotice(5, 0, 0, 0, "impersonation")]


def test_a_key_that_is_revoked_costs_its_worker_the_connection_and_no_other(bench: Bench) -> None:
    bench.hello()
    bench.hello(worker_id="decode-1", epoch=6, route=b"r2", key="kept")
    bench.refuses["key"] = "revoked"
    assert bench.table.review() == [WorkerDown("decode-0", 5, "revoked")]
    assert bench.said_to_strangers() == [ErrorNotice(5, 0, 0, 0, "revoked")]
    assert (list(bench.table.expelled), list(bench.table.ends)) == ([ROUTE], ["decode-1"])


LIE, SCRAP = RecordError(RefusalReason.FIELD_RANGE, "lie"), RecordError(RefusalReason.MAGIC, "?")


def test_a_stranger_that_lies_is_cut_off_and_one_that_talks_nonsense_is_not(bench: Bench) -> None:
    assert bench.table.malformed(b"scrap", SCRAP, 0.0) == []
    assert bench.table.malformed(b"lie", LIE, 0.0) == []
    assert bench.table.flooded(b"flood") == []
    assert list(bench.table.expelled) == [b"lie", b"flood"]
    assert bench.said_to_strangers() == []


def test_a_worker_that_lies_or_floods_is_told_cut_off_and_down(bench: Bench, caplog) -> None:
    bench.hello()
    assert bench.table.malformed(ROUTE, SCRAP, 0.0) == []
    assert bench.table.malformed(ROUTE, LIE, 0.0) == [WorkerDown("decode-0", 5, "field_range")]
    bench.hello(epoch=6, route=b"r2")
    assert bench.table.flooded(b"r2") == [WorkerDown("decode-0", 6, "flood")]
    assert bench.said_to_strangers() == [
        ErrorNotice(5, 0, 0, 0, "field_range"),
        ErrorNotice(6, 0, 0, 0, "flood"),
    ]
    ended = [record for record in caplog.records if "is ended" in record.getMessage()]
    assert [record.worker for record in ended] == ["decode-0", "decode-0"]


def test_an_incarnation_that_a_worker_holds_for_another_is_changed_and_all_others_asked(
    bench: Bench,
) -> None:
    bench.hello()
    bench.hello(worker_id="decode-1", epoch=6, route=b"r2")
    bench.hello(worker_id="decode-2", epoch=7, route=b"r3", now=-2.0)
    bench.table.tick(1.0, judge_silence=True)
    bench.said("decode-1")
    (down,) = bench.table.control(ROUTE, ErrorNotice(5, 0, 0, 0, INCARNATION_TAKEN), 1.0)
    assert down == WorkerDown("decode-0", 5, INCARNATION_TAKEN)
    assert bench.identity.incarnation != INCARNATION
    assert bench.said("decode-1") == [Who(bench.identity.incarnation, 0)]
    assert bench.said("decode-2") == [], "it is down, and will be greeted"


def test_an_incarnation_that_requests_have_is_kept(bench: Bench, caplog) -> None:
    bench.identity.new_handle()
    bench.hello()
    bench.hello(worker_id="decode-1", epoch=6, route=b"r2")
    bench.said("decode-1")
    assert len(bench.table.control(ROUTE, ErrorNotice(5, 0, 0, 0, INCARNATION_TAKEN), 0.0)) == 1
    assert (bench.identity.incarnation, bench.said("decode-1")) == (INCARNATION, [])
    assert "incarnation taken by another gateway" in caplog.text


def test_a_worker_that_refuses_this_gateway_for_another_reason_stays(bench: Bench, count) -> None:
    bench.hello()
    assert bench.table.control(ROUTE, ErrorNotice(5, 0, 0, 0, "role"), 0.0) == []
    assert bench.table.control(ROUTE, ErrorNotice(4, 0, 0, 0, INCARNATION_TAKEN), 0.0) == []
    assert (count("refusals", reason="role"), count("stale_messages")) == (1, 1)
    assert bench.identity.incarnation == INCARNATION


def test_an_unreadable_hello_body_is_turned_away(bench: Bench) -> None:
    assert bench.table.hello(ROUTE, "", Hello(5, 1, 1, 1, 0, b"\xc1"), 0.0) == []
    assert bench.said_to_strangers() == [ErrorNotice(5, 0, 0, 0, "hello_body")]
    assert list(bench.table.expelled) == [ROUTE]


def test_who_may_come_again_with_other_words_keeps_its_connection(bench: Bench) -> None:
    bench.hello(role=9)
    assert list(bench.table.expelled) == []


def test_a_worker_down_for_long_is_forgotten(bench: Bench) -> None:
    bench.hello()
    bench.table.tick(3.0, judge_silence=True)
    bench.table.tick(600.0, judge_silence=True)
    assert list(bench.table.ends) == ["decode-0"]
    bench.table.tick(600.1, judge_silence=True)
    assert bench.table.ends == {}
