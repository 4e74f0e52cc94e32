"""Both pure ends joined by a hostile network: every row arrives exactly once and in order, or its
loss is told.

The network drops, repeats and corrupts messages, cuts connections (losing what was on them, or
delivering it late; the gateway hears of it at any time or never), and restarts either side.
Consumers apply late, time jumps, credit shrinks.
"""

from __future__ import annotations

import itertools
from collections import deque

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton_testing.lengths import length
from baton_worker.identity import GatewayIdentity, Role, incarnation_of
from baton_worker.link.api import (
    GatewayLost,
    GatewayUp,
    StepReceived,
    StepsLost,
    WorkerDown,
    WorkerUp,
)
from baton_worker.link.gateway_end import GatewaySettings, LinkState
from baton_worker.link.inbox import InboxPolicy
from baton_worker.link.metrics import GatewayLinkMetrics, WorkerLinkMetrics
from baton_worker.link.outbox import OutboxLimits, Push
from baton_worker.link.parts import TAIL_LIMIT, FrameWriter, RowTag, StepPart, tag_of, weigh
from baton_worker.link.worker_end import CommandBytes, EndSettings, FrameRefused, State, WorkerEnd
from baton_worker.link.worker_table import WorkerTable
from baton_worker.records.control import Hello, decode_control, encode_control
from baton_worker.records.encode import restamp
from baton_worker.records.errors import RecordError
from baton_worker.records.layout import MessageType
from baton_worker.records.prefix import peek_type

LIMITS = OutboxLimits(
    4096, 12, reserve_bytes=512, reserve_frames=4, tail=TAIL_LIMIT, stalled_seconds=30.0
)
POLICY = InboxPolicy(credit_frames=4, credit_bytes=1024, ack_frames=2)
DEAD_SECONDS, LOST_SECONDS, RECONNECT_SECONDS = 3.0, 30.0, 0.5
COMMAND_LIMITS = OutboxLimits(1 << 16, 64)
DEEDS = st.sampled_from(["drop", "repeat", "corrupt"])


class Connection:
    """One TCP connection: bytes in flight each way, under one routing id."""

    def __init__(self, route: bytes) -> None:
        self.route = route
        self.up: deque[bytes] = deque()
        self.down: deque[bytes] = deque()


class Link(RuleBasedStateMachine):
    columns = None
    info = None
    factory = None

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.fresh = itertools.count(1)
        self.writer = FrameWriter(Role.DECODE, self.info.semantic_hash)
        self.worker_metrics = WorkerLinkMetrics(self.factory())
        self.connection: Connection | None = None
        self.stale: list[Connection] = []
        self.ended_routes: deque[bytes] = deque()
        self.published: dict[tuple[int, int], list[int]] = {}
        self.received: dict[tuple[int, int], list[int]] = {}
        self.lost_rows: set[int] = set()
        self.holed: set[tuple[int, int]] = set()
        self.gone: set[int] = set()
        self.up: dict[str, int] = {}
        self.commanded: dict[tuple[int, int], list[int]] = {}
        self.obeyed: dict[tuple[int, int], list[int]] = {}
        self.fallen: set[tuple[int, int]] = set()
        self.unapplied: deque[tuple[int, int]] = deque()
        self.linked: set[int] = set()
        self.new_gateway()
        self.new_worker()

    # The two processes.

    def new_gateway(self) -> None:
        self.incarnation = next(self.fresh)
        gateway = GatewaySettings(
            GatewayIdentity(self.incarnation),
            POLICY,
            1.0,
            DEAD_SECONDS,
            RECONNECT_SECONDS,
            COMMAND_LIMITS,
        )
        self.gateway_metrics = GatewayLinkMetrics(self.factory("gateway"))
        self.table = WorkerTable(gateway, self.gateway_metrics)
        self.unapplied.clear()
        self.ended_routes.clear()

    def new_worker(self) -> None:
        end = EndSettings(LIMITS, POLICY, 1.0, DEAD_SECONDS, LOST_SECONDS)
        self.end = WorkerEnd(
            "gw",
            end,
            self.worker_metrics,
            lambda: next(self.fresh),
            self.writer.blank,
            self.now,
        )
        self.end.info = msgspec.msgpack.encode(self.info)
        self.linked.clear()

    # What moves between them.

    def flush_worker(self) -> None:
        while self.end.out:
            message = encode_control(self.end.out.popleft())
            if self.connection:
                self.connection.up.append(message)
        while self.connection and (entry := self.end.claim()):
            if entry.frame is None:
                tag = tag_of(entry.parts)
                frame = self.writer.write(entry.parts, self.end.epoch, entry.seq, 0)
                self.end.outbox.seal(entry, frame, tag)
            replayed = entry.n_sends > 0
            self.connection.up.append(restamp(entry.frame, seq=entry.seq, is_replayed=replayed))
            self.end.outbox.sent(entry)

    def to_worker(self, route: bytes, message: object) -> None:
        if self.connection and self.connection.route == route:
            self.connection.down.append(encode_control(message))

    def flush_gateway(self) -> None:
        while self.table.out:
            route, message = self.table.out.popleft()
            self.to_worker(route, message)
        for end in self.table.ends.values():
            if end.standing is not LinkState.UP:
                continue
            while end.out:
                self.to_worker(end.route, end.out.popleft())
            while command := end.next_command():
                self.to_worker(end.route, command)
                end.command_sent()

    def gateway_takes(self, route: bytes, frame: bytes) -> None:
        try:
            if peek_type(frame) is MessageType.STEP:
                events = self.table.step(route, memoryview(frame), self.now)
            else:
                message = decode_control(frame)
                if isinstance(message, Hello):
                    events = self.table.hello(route, "", message, self.now)
                else:
                    events = self.table.control(route, message, self.now)
        except RecordError as error:
            events = self.table.malformed(route, error, self.now)
        self.gateway_hears(events)

    def gateway_hears(self, events: list[object]) -> None:
        for event in events:
            match event:
                case WorkerUp(worker_id, epoch):
                    assert self.up.get(worker_id, epoch) == epoch
                    self.up[worker_id] = epoch
                case WorkerDown(worker_id, epoch):
                    assert self.up.pop(worker_id) == epoch
                    self.fallen.add((self.incarnation, epoch))
                case StepReceived():
                    self.take_step(event)
                case StepsLost(_, epoch):
                    self.holed.add((self.incarnation, epoch))
        self.flush_gateway()

    def take_step(self, event: StepReceived) -> None:
        assert self.up[event.worker_id] == event.meta.epoch
        key = (self.incarnation, event.meta.epoch)
        handles = event.columns.handle.tolist()
        assert {incarnation_of(handle) for handle in handles} == {self.incarnation}
        rows = [handle & 0xFFFFFFFF for handle in handles]
        self.received.setdefault(key, []).extend(rows)
        self.unapplied.append((event.meta.epoch, event.meta.seq))

    def worker_hears(self, events: list[object]) -> None:
        for event in events:
            match event:
                case GatewayUp(incarnation):
                    self.linked.add(incarnation)
                case GatewayLost(incarnation):
                    self.linked.remove(incarnation)
                    self.gone.add(incarnation)
                case CommandBytes(incarnation, payload):
                    key = (incarnation, self.end.epoch)
                    self.obeyed.setdefault(key, []).append(int(payload))
                case FrameRefused(_, RowTag() as tag, _):
                    self.lost_rows |= {key.handle & 0xFFFFFFFF for key in tag.requests()}
        self.flush_worker()

    # What may happen.

    @precondition(lambda self: self.end.incarnation)
    @rule(n=st.integers(1, 3), group=st.integers(1, 4))
    def publish(self, n: int, group: int) -> None:
        for _ in range(n):
            rows = [next(self.fresh) for _ in range(group)]
            columns = self.columns(self.end.incarnation, rows)
            pushed = self.end.outbox.push(
                StepPart(columns, rows[0]), weigh(columns), self.now, group=self.end.incarnation
            )
            if pushed is not Push.REFUSED:
                key = (self.end.incarnation, self.end.epoch)
                self.published.setdefault(key, []).extend(rows)
        self.flush_worker()

    @rule()
    def command(self) -> None:
        for end in self.table.ends.values():
            if end.standing is LinkState.UP:
                number = next(self.fresh)
                if end.command(str(number).encode(), self.now):
                    key = (self.incarnation, end.epoch)
                    self.commanded.setdefault(key, []).append(number)
        self.flush_gateway()

    @initialize()
    def begin(self) -> None:
        self.connect()
        self.exchange(2, 0.01)

    @precondition(lambda self: self.connection is None)
    @rule()
    def connect(self) -> None:
        if self.connection is None:
            self.connection = Connection(next(self.fresh).to_bytes(4, "big"))
            self.end.connected(self.now)
            self.flush_worker()

    @precondition(lambda self: self.connection)
    @rule(rounds=st.integers(1, 4), seconds=st.sampled_from([0.01, 0.03, 0.4]))
    def exchange(self, rounds: int, seconds: float) -> None:
        for _ in range(rounds):
            self.pass_time(seconds)
            self.deliver_up(6)
            self.apply(6)
            self.deliver_down(6)

    @precondition(lambda self: self.end.incarnation)
    @rule(
        n=st.integers(1, 6),
        rounds=st.integers(1, 3),
        deed=DEEDS,
        up=st.booleans(),
        where=st.integers(0, 7),
        at=st.integers(0, 200),
    )
    def publish_and_exchange(
        self, n: int, rounds: int, deed: str, up: bool, where: int, at: int
    ) -> None:
        self.publish(n, 2)
        self.command()
        if self.connection:
            self.meddle(deed, up, where, at)
            self.exchange(rounds, 0.02)

    @rule(n=st.integers(1, 8))
    def deliver_up(self, n: int) -> None:
        for _ in range(n):
            if self.connection and self.connection.up:
                self.gateway_takes(self.connection.route, self.connection.up.popleft())

    @rule(n=st.integers(1, 8))
    def deliver_down(self, n: int) -> None:
        for _ in range(n):
            if self.connection and self.connection.down:
                message = decode_control(self.connection.down.popleft())
                self.worker_hears(self.end.receive(message, self.now))

    @rule(n=st.integers(1, 6))
    def apply(self, n: int) -> None:
        for _ in range(min(n, len(self.unapplied))):
            epoch, seq = self.unapplied.popleft()
            end = self.table.ends.get(self.info.worker_id)
            if end and end.epoch == epoch:
                end.inbox.apply(seq, self.now)

    @precondition(lambda self: self.connection and (self.connection.up or self.connection.down))
    @rule(
        deed=DEEDS,
        up=st.booleans(),
        where=st.integers(0, 7),
        at=st.integers(0, 200),
    )
    def meddle(self, deed: str, up: bool, where: int, at: int) -> None:
        queue = self.connection.up if up else self.connection.down
        if not queue:
            return
        where %= len(queue)
        if deed == "drop":
            del queue[where]
        elif deed == "repeat":
            queue.append(queue[where])
        elif up:
            frame = bytearray(queue[where])
            frame[at % len(frame)] ^= 1 << at % 8
            queue[where] = bytes(frame)

    @precondition(lambda self: self.connection)
    @rule(late=st.booleans())
    def cut(self, late: bool) -> None:
        if late:
            self.stale.append(self.connection)
        self.ended_routes.append(self.connection.route)
        self.connection = None
        self.end.disconnected()

    @precondition(lambda self: self.ended_routes)
    @rule()
    def gateway_hears_of_a_cut(self) -> None:
        self.table.cut_off(self.ended_routes.popleft(), self.now)

    @precondition(lambda self: self.stale)
    @rule(n=st.integers(1, 8))
    def deliver_stale(self, n: int) -> None:
        connection = self.stale[0]
        for _ in range(min(n, len(connection.up))):
            self.gateway_takes(connection.route, connection.up.popleft())
        if not connection.up:
            self.stale.pop(0)

    @rule(lag=st.sampled_from([0.0, 0.2, 100.0]))
    def lag(self, lag: float) -> None:
        self.table.lag_seconds = lag

    @rule(
        disaster=st.sampled_from(["none", "silence", "loss", "gateway", "worker", "none", "none"])
    )
    def disaster(self, disaster: str) -> None:
        if disaster == "silence":
            self.pass_time(DEAD_SECONDS + 0.5)
        elif disaster == "loss":
            self.pass_time(LOST_SECONDS + 1)
        elif disaster == "gateway":
            self.gateway_restarts()
        elif disaster == "worker":
            self.worker_restarts()

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.worker_hears(self.end.tick(self.now))
        self.gateway_hears(self.table.tick(self.now, judge_silence=True))

    def gateway_restarts(self) -> None:
        self.up.clear()
        self.stale.clear()
        if self.connection:
            self.cut(late=False)
        self.gone.add(self.incarnation)
        self.new_gateway()

    def worker_restarts(self) -> None:
        if self.connection:
            self.cut(late=True)
        self.gone |= self.linked
        self.new_worker()

    # What must hold.

    @invariant()
    def rows_arrive_once_and_in_order(self) -> None:
        for key, rows in self.received.items():
            place = {row: index for index, row in enumerate(self.published[key])}
            places = [place[row] for row in rows]
            assert all(before < after for before, after in itertools.pairwise(places))
            skipped = set(self.published[key][: places[-1]]) - set(rows)
            assert key in self.holed or skipped <= self.lost_rows

    @invariant()
    def commands_are_obeyed_once_and_in_order(self) -> None:
        for key, numbers in self.obeyed.items():
            told = self.commanded[key]
            if key not in self.fallen:
                assert numbers == told[: len(numbers)]
            assert sorted(set(numbers)) == numbers

    @invariant()
    def memory_is_bounded(self) -> None:
        box = self.end.outbox
        blanks = len(box) * 128
        assert box.n_bytes <= LIMITS.ring_bytes + LIMITS.reserve_bytes + blanks
        assert len(box) <= LIMITS.ring_frames + LIMITS.reserve_frames
        for end in self.table.ends.values():
            # A WELCOME may grant one frame beyond what the consumer's lag would.
            held = end.inbox.expected - 1 - end.inbox.applied
            assert held <= 2 * POLICY.credit_frames

    def teardown(self) -> None:
        self.settle()
        key = (self.incarnation, self.end.epoch)
        assert self.end.state is State.LINKED
        assert len(self.end.outbox) == 0
        missing = set(self.published.get(key, ())) - set(self.received.get(key, ()))
        assert key in self.holed or missing <= self.lost_rows
        if key not in self.fallen:
            assert self.obeyed.get(key, []) == self.commanded.get(key, [])

    def settle(self) -> None:
        """Heal the network and let everybody finish."""
        self.table.lag_seconds = 0.0
        self.stale.clear()
        self.pass_time(LOST_SECONDS + 1 if self.is_shut_out() else 0.01)
        self.connect()
        for _ in range(400):
            self.exchange(4, 0.02)
            if self.is_quiet():
                return
        pytest.fail("the link did not settle")

    def is_shut_out(self) -> bool:
        end = self.table.ends.get(self.info.worker_id)
        return bool(end and end.standing is LinkState.QUARANTINED)

    def is_quiet(self) -> bool:
        commands = [len(end.outbox) for end in self.table.ends.values()]
        return self.end.state is State.LINKED and not len(self.end.outbox) and not any(commands)


def run(columns, new_info, new_factory, examples: int, steps: int) -> None:
    machine = type(
        "Machine",
        (Link,),
        {
            "columns": staticmethod(columns),
            "info": new_info(),
            "factory": staticmethod(new_factory),
        },
    )
    machine.TestCase.settings = settings(
        max_examples=examples, stateful_step_count=steps, deadline=None
    )
    machine.TestCase().runTest()


@pytest.mark.hypothesis
def test_rows_arrive_exactly_once_or_are_told_lost(columns, new_info, new_factory) -> None:
    run(columns, new_info, new_factory, examples=60, steps=50)


@pytest.mark.hypothesis
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_rows_arrive_exactly_once_or_are_told_lost_at_length(
    columns, new_info, new_factory
) -> None:
    run(columns, new_info, new_factory, examples=length(1500, 400), steps=100)
