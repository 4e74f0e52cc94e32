"""State machines under hostile input: bytes are read as a conversation, and each word of it is
parsed, given to the machine, and what the machine then has to say is encoded.

What must hold for any bytes: only the declared error escapes a parser or a machine, and whatever
state that leaves can be said: an encoder never meets a number that it cannot write.
"""

from __future__ import annotations

import itertools
import struct
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from prometheus_client import CollectorRegistry

from baton_worker.engine.api import Handoff
from baton_worker.handoff.asks import AskBook
from baton_worker.handoff.frames import (
    Answer,
    AnswerKind,
    Ask,
    HandoffFormatError,
    decode_answer,
    decode_ask,
    decode_offer,
    encode_answer,
    encode_ask,
    encode_offer,
)
from baton_worker.handoff.ledger import HandoffLedger
from baton_worker.handoff.offers import OfferBook, address_of
from baton_worker.handoff.places import PlaceLimits, Places, Reply
from baton_worker.handoff.room import Amount, Wish
from baton_worker.identity import GatewayIdentity, RequestKey, Role, make_handle
from baton_worker.link.gateway_end import GatewaySettings, LinkState
from baton_worker.link.inbox import InboxPolicy
from baton_worker.link.metrics import GatewayLinkMetrics, WorkerLinkMetrics
from baton_worker.link.outbox import OutboxLimits
from baton_worker.link.parts import TAIL_LIMIT, FrameWriter, StepPart, tag_of, weigh
from baton_worker.link.worker_end import EndSettings, WorkerEnd
from baton_worker.link.worker_table import WorkerTable
from baton_worker.messages import DecodeTarget, GatewayInfo, HandoffState, WorkerInfo
from baton_worker.metrics import MetricFactory
from baton_worker.records.columns import StepColumns
from baton_worker.records.control import (
    AbortNotice,
    Ack,
    Bye,
    CommandFrame,
    Control,
    ErrorNotice,
    Hello,
    Resume,
    Welcome,
    Who,
    decode_control,
    encode_control,
)
from baton_worker.records.errors import RecordError
from baton_worker.records.layout import MessageType
from baton_worker.records.prefix import peek_type
from baton_worker.sampling import SamplingParams

CORPUS = Path(__file__).parents[1] / "corpus" / "records"
SEEDS = [path.read_bytes() for path in sorted(CORPUS.glob("*.bin"))]
INCARNATION = 77
TARGET = DecodeTarget("d", "tcp://127.0.0.1:1")
ADDRESS = address_of(TARGET)
PLACES = PlaceLimits(
    slots=2,
    receive_bytes=1 << 12,
    kv_tokens=1 << 10,
    asks=3,
    queue_seconds=20.0,
    reserve=Amount(1, 1 << 9, 1 << 7),
)
EDGES = (0, 1, 2, 3, 5, 77, 255, 256, 1 << 24, (1 << 32) - 1, 1 << 32, 1 << 62, (1 << 62) + 1)
TOP_EDGES = (1 << 63, (1 << 64) - 2, (1 << 64) - 1)
MOST_WORDS = 64
MOST_OUT = 4096


class Reader:
    """Takes numbers and choices from bytes; what is missing is 0."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def has_more(self) -> bool:
        return self._at < len(self._data)

    def byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1] if self._at <= len(self._data) else 0

    def pick(self, choices: Any) -> Any:
        return choices[self.byte() % len(choices)]

    def number(self) -> int:
        """Return an edge, a small number, or any 64 bits."""
        kind = self.byte() % 4
        if kind == 0:
            return int(self.pick(TOP_EDGES))
        if kind < 3:
            return int(self.pick(EDGES))
        chunk = self._data[self._at : self._at + 8].ljust(8, b"\0")
        self._at += 8
        return int(struct.unpack("<Q", chunk)[0])

    def likely(self, honest: int) -> int:
        """Return what an honest peer would say, more often than not."""
        return self.number() if self.byte() % 4 == 0 else honest

    def bytes(self) -> bytes:
        size = self.byte()
        self._at += size
        return self._data[self._at - size : self._at]


@dataclass(slots=True)
class Tally:
    """What was seen so far."""

    inputs: int = 0
    words: int = 0
    events: int = 0
    refused: Counter[str] = field(default_factory=Counter)


def encoded(message: Control) -> bytes | None:
    """Return the frame of a lie; None when no frame can hold it."""
    try:
        return encode_control(message)
    except (RecordError, ValueError):
        return None


def columns(reader: Reader) -> StepColumns:
    n = 1 + reader.byte() % 3
    handle = [make_handle(INCARNATION, reader.byte()) for _ in range(n)]
    return StepColumns(
        handle=np.array(handle, np.uint64),
        position=np.full(n, reader.number() & 0xFFFFFFFF, np.uint32),
        n_tokens=np.ones(n, np.uint8),
        width=np.zeros(n, np.uint8),
        flags=np.full(n, reader.byte() % 5, np.uint8),
        attempt=np.zeros(n, np.uint8),
        token=np.full(n, 3, np.int32),
        logprob=np.empty(0, np.float32),
        rank=np.empty(0, np.int32),
        topk_token=np.empty(0, np.int32),
        topk_logprob=np.empty(0, np.float32),
    )


def spoilt(reader: Reader, frame: bytes) -> bytes:
    """Return a frame, rarely with a byte of it changed."""
    if not frame or reader.byte() % 8:
        return frame
    changed = bytearray(frame)
    changed[reader.byte() * 7 % len(changed)] ^= 1 + reader.byte() % 255
    return bytes(changed)


def info(reader: Reader) -> bytes:
    """Return what a worker says of itself, with lies."""
    facts: dict[str, Any] = msgspec.to_builtins(
        WorkerInfo(
            worker_id=f"w{reader.byte() % 3}",
            role=int(Role.DECODE),
            wire_min=1,
            wire_max=1,
            semantic_hash=1,
            config_hash="c",
            revision="",
            model="m",
            vocab_size=64,
            max_model_len=64,
            max_top_k=20,
            max_running=8,
            max_waiting=8,
            kv_capacity_tokens=64,
        )
    )
    while reader.byte() % 4 == 0 and reader.has_more():
        name = reader.pick(WorkerInfo.__struct_fields__)
        facts[name] = reader.pick([reader.number(), -1, "x" * 5000, "a\nb", [], None, 1.5, ""])
    return msgspec.msgpack.encode(facts) if reader.byte() % 8 else reader.bytes()


class GatewayMachine:
    """A gateway's end: three connections that say anything to a table of workers."""

    def __init__(self) -> None:
        self.tally = Tally()
        factory = MetricFactory(CollectorRegistry(), "m", "gateway")
        self._metrics = GatewayLinkMetrics(factory)
        self._writer = FrameWriter(Role.DECODE, 1)

    def check(self, data: bytes) -> None:
        """Hold one conversation.

        Raises:
            Exception: any; that is the finding.
        """
        reader, self.now = Reader(data), 100.0
        settings = GatewaySettings(
            GatewayIdentity(INCARNATION),
            InboxPolicy(credit_frames=4),
            1.0,
            3.0,
            0.5,
            OutboxLimits(4096, 8),
        )
        self.table = WorkerTable(settings, self._metrics)
        self.tally.inputs += 1
        for _ in range(MOST_WORDS):
            if not reader.has_more():
                break
            self._turn(reader)
            self._flush()

    def _turn(self, reader: Reader) -> None:
        route = bytes([reader.byte() % 3])
        deed = reader.byte() % 12
        if deed == 0:
            self.now += reader.byte() / 40
            events = self.table.tick(self.now, judge_silence=bool(reader.byte() % 2))
        elif deed == 1:
            self.table.cut_off(route, self.now)
            events = []
        elif deed == 2:
            events = self.table.review()
            for end in self.table.ends.values():
                end.command(b"c" * reader.byte(), self.now)
        elif deed == 3:
            events = []
            for end in self.table.ends.values():
                end.inbox.apply(end.inbox.expected - 1, self.now)
        else:
            events = self._hear(reader, route)
        self.tally.words += 1
        self.tally.events += len(events)

    def _hear(self, reader: Reader, route: bytes) -> list[Any]:
        frame = self._frame(reader, self.table.end_of(route))
        if frame is None:
            return []
        try:
            if peek_type(frame) is MessageType.STEP:
                return list(self.table.step(route, memoryview(frame), self.now))
            message = decode_control(frame)
            if isinstance(message, Hello):
                return list(self.table.hello(route, "", message, self.now))
            return list(self.table.control(route, message, self.now))
        except RecordError as error:
            self.tally.refused[error.reason.value] += 1
            return list(self.table.malformed(route, error, self.now))

    def _frame(self, reader: Reader, end: Any) -> bytes | None:
        epoch = reader.likely(end.epoch if end else 5 + reader.byte() % 3)
        number, likely = reader.number, reader.likely
        kind = reader.byte() % 9
        if kind == 0:
            return spoilt(reader, reader.pick(SEEDS))
        if kind == 1:
            expected = end.inbox.expected if end else 1
            part = StepPart(columns(reader), 1)
            try:
                return spoilt(reader, self._writer.write([part], epoch, likely(expected), 0))
            except RecordError:
                return None
        next_seq = likely(end.inbox.expected if end else 1)
        message: Control = reader.pick(
            [
                lambda: Hello(
                    epoch, next_seq, likely(next_seq), likely(1), likely(0), info(reader)
                ),
                lambda: Hello(
                    epoch, next_seq, likely(next_seq), likely(1), likely(0), info(reader)
                ),
                lambda: Ack(likely(INCARNATION), number(), number(), number(), number()),
                lambda: Resume(likely(INCARNATION), number(), number()),
                lambda: ErrorNotice(epoch, 0, likely(0), likely(0), "incarnation_taken"),
                lambda: Bye(epoch, number()),
                lambda: AbortNotice(epoch, number(), number(), number() & 0xFFFFFFFF),
                lambda: CommandFrame(epoch, number(), reader.bytes()),
            ]
        )()
        frame = encoded(message)
        return spoilt(reader, frame) if frame is not None else None

    @staticmethod
    def _hello(reader: Reader, epoch: int, next_seq: int) -> Hello:
        likely = reader.likely
        incarnation = likely(0) & 0xFFFFFFFF
        return Hello(epoch, next_seq, likely(next_seq), likely(1), incarnation, info(reader))

    def _flush(self) -> None:
        while self.table.out:
            encode_control(self.table.out.popleft().message)
        self.table.expelled.clear()
        for end in self.table.ends.values():
            if end.standing is not LinkState.UP:
                continue
            while end.out:
                encode_control(end.out.popleft())
            for _ in range(MOST_OUT):
                command = end.next_command()
                if command is None:
                    break
                encode_control(command)
                end.command_sent()


class WorkerMachine:
    """A worker's end: a gateway that says anything to it while it publishes."""

    def __init__(self) -> None:
        self.tally = Tally()
        self._metrics = WorkerLinkMetrics(MetricFactory(CollectorRegistry(), "m", "decode"))
        self._writer = FrameWriter(Role.DECODE, 1)

    def check(self, data: bytes) -> None:
        """Hold one conversation; see `GatewayMachine.check`."""
        reader, self.now = Reader(data), 100.0
        epochs = itertools.count(5)
        settings = EndSettings(
            OutboxLimits(4096, 12, tail=TAIL_LIMIT), InboxPolicy(credit_frames=4), 1.0, 3.0, 30.0
        )
        self.end = WorkerEnd(
            "gw", settings, self._metrics, epochs.__next__, self._writer.blank, self.now
        )
        self.end.connected(self.now)
        self.tally.inputs += 1
        for _ in range(MOST_WORDS):
            if not reader.has_more():
                break
            self._turn(reader)
            self._flush()

    def _turn(self, reader: Reader) -> None:
        deed = reader.byte() % 12
        self.tally.words += 1
        if deed == 0:
            self.now += reader.byte() / 8
            self.tally.events += len(self.end.tick(self.now))
        elif deed == 1:
            self.end.disconnected()
            self.end.connected(self.now)
        elif deed == 2:
            rows = columns(reader)
            group = self.end.incarnation
            self.end.outbox.push(StepPart(rows, 1), weigh(rows), self.now, group=group)
        else:
            self._hear(reader)

    def _hear(self, reader: Reader) -> None:
        frame = self._frame(reader)
        if frame is None:
            return
        try:
            self.tally.events += len(self.end.receive(decode_control(frame), self.now))
        except RecordError as error:
            self.tally.refused[error.reason.value] += 1
            if self.end.malformed(error, self.now) is not None:
                self.end.connected(self.now)

    def _frame(self, reader: Reader) -> bytes | None:
        end, number, likely = self.end, reader.number, reader.likely
        if reader.byte() % 9 == 0:
            return spoilt(reader, reader.pick(SEEDS))
        message: Control = reader.pick(
            [
                lambda: self._welcome(reader),
                lambda: self._welcome(reader),
                lambda: Ack(likely(end.epoch), number(), number(), number(), number()),
                lambda: Resume(likely(end.epoch), number(), number()),
                lambda: Who(number(), number()),
                lambda: ErrorNotice(likely(end.epoch), 0, number(), number(), "x" * reader.byte()),
                lambda: Bye(likely(end.incarnation), number()),
                lambda: CommandFrame(likely(end.incarnation), likely(end.inbox.expected), b"x"),
            ]
        )()
        frame = encoded(message)
        return spoilt(reader, frame) if frame is not None else None

    def _welcome(self, reader: Reader) -> Welcome:
        likely = reader.likely
        expected, commands = likely(self.end.outbox.oldest), likely(1)
        return Welcome(
            epoch=likely(self.end.epoch),
            commands_next=likely(commands),
            commands_oldest=commands,
            expected_seq=expected,
            credit_seq=likely(expected + 4),
            credit_bytes=likely(1 << 20),
            gateway_incarnation=likely(INCARNATION + reader.byte() % 2) & 0xFFFFFFFF,
            body=reader.pick([b"", msgspec.msgpack.encode(GatewayInfo("i")), b"\xc1", b"\x80"]),
        )

    def _flush(self) -> None:
        while self.end.out:
            encode_control(self.end.out.popleft())
        for _ in range(MOST_OUT):
            entry = self.end.claim()
            if entry is None:
                break
            if entry.frame is None:
                frame = self._writer.write(entry.parts, self.end.epoch, entry.seq, 0)
                self.end.outbox.seal(entry, frame, tag_of(entry.parts))
            self.end.outbox.sent(entry)


class KvMachine:
    """Both ends of the KV channel: asks, offers and answers that say anything."""

    def __init__(self) -> None:
        self.tally = Tally()

    def check(self, data: bytes) -> None:
        """Hold one conversation; see `GatewayMachine.check`."""
        reader, self.now = Reader(data), 100.0
        self.book, self.asks = OfferBook(1 << 20), AskBook()
        self.ledger, self.places = HandoffLedger(4, 10.0, 20.0), Places(PLACES)
        self.opened: set[RequestKey] = set()
        self.asked: set[RequestKey] = set()
        self.heard: set[RequestKey] = set()
        self.tally.inputs += 1
        for _ in range(MOST_WORDS):
            if not reader.has_more():
                break
            self.tally.words += 1
            try:
                self._turn(reader)
            except HandoffFormatError as error:
                self.tally.refused[str(error).partition(":")[0].partition(" ")[2][:14]] += 1
            self._send()
        for key in self.heard:
            self.places.leave(key)
        left = (self.places.n_taken, self.places.n_waiting, self.places.awaited_bytes)
        assert left == (0, 0, 0), f"places that nobody holds: {left}"

    def _turn(self, reader: Reader) -> None:
        deed = reader.byte() % 11
        key = RequestKey(make_handle(INCARNATION, reader.byte() % 4), reader.byte() % 2)
        if deed == 0:
            self._pass_time(reader.byte() / 20)
        elif deed == 1:
            self.ledger.reserve(key, 1.0, self.now)
        elif deed == 2 and key not in self.opened:
            self.opened.add(key)
            self.book.open(TARGET, Handoff(self._state(key), ()), 5.0, self.now)
        elif deed == 3 and key not in self.asked:
            self.asked.add(key)
            self.asks.open(TARGET, key, Wish(64, 3), 5.0, self.now)
        elif deed == 4:
            reader.pick([self.book.connection_lost, self.asks.connection_lost])(ADDRESS, self.now)
        elif deed == 5:
            self.book.cancel(key)
            self.asks.leave(key, self.now)
        elif deed == 6:
            self._ask(reader, key)
        elif deed in (7, 8):
            self._answer(reader, key)
        else:
            self._offer(reader, key)

    def _pass_time(self, seconds: float) -> None:
        self.now += seconds
        for key in self.ledger.expire(self.now):
            self.ledger.give_up(key, self.now)
        for offer in self.book.overdue(self.now, (ADDRESS,)):
            self.book.give_up(offer, self.now)
        self.asks.overdue(self.now)
        self.places.expire(self.now)
        self._grant()

    def _send(self) -> None:
        """Say all that is due, as a connection that takes everything does."""
        for address in self.asks.unsaid_at():
            while (message := self.asks.next_unsaid(address)) is not None:
                encode_ask(message)
                self.asks.said(message)
        for address in self.book.waiting_at():
            while (offer := self.book.next_to_send(address, self.now)) is not None:
                encode_offer(offer.handoff)
                self.book.sent(offer)

    def _grant(self) -> None:
        for key in self.places.grant(self.now):
            encode_answer(Answer(*key, AnswerKind.GRANTED))
        assert self.places.n_taken >= 0
        assert self.places.awaited_bytes >= 0

    def _ask(self, reader: Reader, key: RequestKey) -> None:
        fields: list[Any] = ["ask", *key, reader.number(), reader.number(), 0]
        if reader.byte() % 4 == 0:
            fields[reader.byte() % 6] = reader.pick([reader.number(), -1, "withdraw", None, 1.5])
        frames = [b"BKA1", msgspec.msgpack.encode(fields)]
        ask = decode_ask(frames if reader.byte() % 8 else [b"BKA1", reader.bytes()])
        self.tally.events += 1
        self.heard.add(ask.key)
        if isinstance(ask, Ask):
            wish = Wish(ask.kv_bytes, ask.n_tokens, ask.priority, ask.turn)
            sender = reader.pick("ab")
            if self.places.ask(ask.key, wish, self.now, sender) is Reply.FULL:
                last = self.places.displace(sender)
                assert last != ask.key
                if last is not None:
                    self.places.turn_away(last)
                    assert self.places.ask(ask.key, wish, self.now, sender) is Reply.QUEUED
        else:
            self.places.leave(ask.key)
        self._grant()

    def _answer(self, reader: Reader, key: RequestKey) -> None:
        fields: list[Any] = [*key, reader.byte() % 7, reader.number(), ""]
        if reader.byte() % 4 == 0:
            fields[reader.byte() % 5] = reader.pick([reader.number(), -1, "x", None, [], 1.5])
        frames = [b"BKV1", msgspec.msgpack.encode(fields)]
        answer = decode_answer(frames if reader.byte() % 8 else [b"BKV1", reader.bytes()])
        if reader.byte() % 2:
            self.tally.events += self.book.answer(ADDRESS, answer, self.now) is not None
        else:
            self.tally.events += self.asks.answer(answer, self.now) is not None

    def _offer(self, reader: Reader, key: RequestKey) -> None:
        state: dict[str, Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(self._state(key)))
        while reader.byte() % 3 == 0 and reader.has_more():
            name = reader.pick(HandoffState.__struct_fields__)
            state[name] = reader.pick(
                [reader.number(), -1, float("nan"), "x", [], [reader.number()], None]
            )
        n_frames, n_bytes = reader.likely(2) % 8, reader.likely(64) % 256
        frames = [b"BKV1", msgspec.msgpack.encode(state), *[bytes(n_bytes)] * n_frames]
        handoff = decode_offer(frames if reader.byte() % 8 else [b"BKV1", reader.bytes()])
        got = RequestKey(handoff.state.handle, handoff.state.attempt)
        self.tally.events += 1
        self.heard.add(got)
        wish = Wish(n_frames * n_bytes, handoff.state.n_cached)
        self.places.arrive(got, wish, reader.pick("ab"))
        self.ledger.arrive(got, self.now)
        encode_answer(Answer(*got, AnswerKind.RECEIVED))
        encode_offer(handoff)
        reader.pick([self.ledger.imported, self.ledger.close, self.ledger.give_up])(got, self.now)
        reader.pick([self.places.imported, self.places.leave])(got)
        self._grant()

    @staticmethod
    def _state(key: RequestKey) -> HandoffState:
        return HandoffState(
            *key,
            model_fingerprint="m",
            dtype="float32",
            n_layers=1,
            kv_heads=1,
            block_size=8,
            head_dim=2,
            n_cached=2,
            prompt_token_ids=(1, 2),
            sampling=SamplingParams(seed=1),
            logprobs_k=-1,
            first_token=3,
        )


MACHINES = {"gateway": GatewayMachine, "worker": WorkerMachine, "kv": KvMachine}
