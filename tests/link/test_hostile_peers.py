"""Peers that speak nonsense, too much, or too loud harm only themselves."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from functools import partial
from urllib.parse import urlsplit

import msgspec
import pytest
import zmq

from baton_worker.identity import Role
from baton_worker.link import switchboard
from baton_worker.link.api import GatewayUp, RowsRefused, StepReceived, WorkerDown, WorkerUp
from baton_worker.link.pace import Pace
from baton_worker.link.parts import FrameWriter, StepPart
from baton_worker.records.control import (
    Ack,
    ErrorNotice,
    Hello,
    Welcome,
    Who,
    decode_control,
    encode_control,
)
from baton_worker.records.layout import MAX_FRAME_BYTES


class RawWorker:
    """A DEALER without manners, and a writer of correct frames to spoil."""

    def __init__(self, dealer: zmq.Socket[bytes], info: object) -> None:
        self.dealer = dealer
        self.info = info
        self.writer = FrameWriter(Role.DECODE, info.semantic_hash)

    def greet(self, epoch: int = 9) -> None:
        self.dealer.send(
            encode_control(Hello(epoch, 1, 1, 1, 0, msgspec.msgpack.encode(self.info)))
        )
        self.expect(Welcome)

    def expect(self, kind: type) -> object:
        for _ in range(100):
            assert self.dealer.poll(60_000), f"no {kind.__name__} came"
            message = decode_control(self.dealer.recv())
            if isinstance(message, kind):
                return message
        pytest.fail(f"no {kind.__name__} among 100 messages")

    def acknowledged(self, seq: int) -> None:
        for _ in range(100):
            if self.expect(Ack).ack_seq >= seq:
                return
        pytest.fail(f"{seq} was not acknowledged")


@pytest.fixture
def gateway(start_gateway):
    return start_gateway(dead_after_seconds=600.0)  # a raw worker sends no heartbeats


@pytest.fixture
def call(gateway, new_info) -> Iterator[Callable[..., RawWorker]]:
    """Return how to connect a raw worker; one may be made not to come back."""
    with zmq.Context() as context, contextlib.ExitStack() as dealers:

        def connect(*, comes_back: bool = True) -> RawWorker:
            dealer = dealers.enter_context(context.socket(zmq.DEALER))
            dealer.linger = 0
            if not comes_back:
                dealer.reconnect_ivl = -1
            dealer.connect(gateway.link.endpoint)
            return RawWorker(dealer, new_info("raw"))

        yield connect


@pytest.fixture
def raw(call: Callable[..., RawWorker]) -> RawWorker:
    return call()


@pytest.fixture
def neighbour(gateway, start_worker, columns) -> Callable[[], None]:
    """A well-behaved worker, to be asked at the end whether it still works."""
    worker = start_worker(gateway.link.endpoint)
    worker.log.wait_for(GatewayUp)

    def still_works() -> None:
        worker.link.publish(77, columns(77, [4242]), 1)
        gateway.log.wait(lambda log: 4242 in gateway.rows())
        assert worker.log.of(RowsRefused) == []
        downs = gateway.log.of(WorkerDown)
        assert [down for down in downs if down.worker_id == "decode-0"] == []

    return still_works


def test_garbage_before_a_greeting_is_counted_and_ignored(
    gateway, raw: RawWorker, neighbour, read_metric
) -> None:
    for garbage in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(4096), b"PDT1" + bytes(60)):
        raw.dealer.send(garbage)
    raw.dealer.send_multipart([b"two", b"frames"])
    raw.greet()
    neighbour()
    name = "baton_link_malformed_messages_total"
    assert read_metric(gateway.factory, name, reason="frame_size") == 2
    assert read_metric(gateway.factory, name, reason="magic") == 1
    assert read_metric(gateway.factory, name, reason="frames") == 1


def test_a_port_scan_is_survived(gateway, neighbour) -> None:
    address = urlsplit(gateway.link.endpoint)
    for _ in range(20):
        with socket.create_connection((address.hostname, address.port)) as stranger:
            stranger.sendall(b"\x16\x03\x01 not zmtp at all" * 10)
    neighbour()


def test_records_before_a_greeting_are_asked_who(raw: RawWorker, columns) -> None:
    raw.dealer.send(raw.writer.write([StepPart(columns(77, [1]), 1)], 9, 1, 0))
    assert raw.expect(Who).epoch == 77


def test_a_corrupt_record_is_refused_and_its_replacement_unblocks_the_stream(
    gateway, raw: RawWorker, neighbour, columns
) -> None:
    raw.greet()
    frames = [raw.writer.write([StepPart(columns(77, [seq]), seq)], 9, seq, 0) for seq in (1, 2, 3)]
    raw.dealer.send(frames[0])
    raw.dealer.send(frames[1][:-1] + b"\xff")
    raw.dealer.send(frames[2])
    notice = raw.expect(ErrorNotice)
    assert (notice.first_seq, notice.last_seq, notice.reason) == (2, 2, "body_crc")
    raw.dealer.send(raw.writer.blank(9, 2))
    raw.dealer.send(frames[2])
    raw.acknowledged(3)
    assert gateway.rows() == [1, 3]
    neighbour()


def test_a_worker_that_sends_corrupt_records_without_end_is_shut_out(
    gateway, raw: RawWorker, neighbour, columns
) -> None:
    raw.greet()
    bad = raw.writer.write([StepPart(columns(77, [1]), 1)], 9, 1, 0)[:-1] + b"\xff"
    for _ in range(10):
        raw.dealer.send(bad)
    (down,) = gateway.log.wait_for(WorkerDown)
    assert (down.worker_id, down.reason) == ("raw", "quarantined: body_crc")
    for reason in iter(lambda: raw.expect(ErrorNotice).reason, "quarantined"):
        assert reason == "body_crc"
    neighbour()


def test_a_message_beyond_the_limit_costs_its_sender_the_connection_only(
    gateway, raw: RawWorker, neighbour
) -> None:
    raw.greet()
    raw.dealer.send(bytes(MAX_FRAME_BYTES + 1))
    raw.dealer.send(encode_control(Ack(77, 1, 0, 8, 1 << 20)))
    neighbour()
    raw.greet()
    assert [up.worker_id for up in gateway.log.of(WorkerUp)].count("raw") >= 1


def test_rows_that_no_record_can_carry_are_named_and_the_link_goes_on(
    gateway, start_worker, columns
) -> None:
    worker = start_worker(gateway.link.endpoint)
    worker.log.wait_for(GatewayUp)
    impossible = columns(77, [5])
    impossible.token[0] = 9999
    worker.link.publish(77, columns(77, [1]), 1)
    worker.link.publish(77, impossible, 2)
    (refused,) = worker.log.wait_for(RowsRefused)
    assert [key.handle & 0xFF for key in refused.keys] == [5]
    assert refused.reason == "token_range"
    worker.link.publish(77, columns(77, [2]), 3)
    gateway.log.wait(lambda log: gateway.rows() == [1, 2])
    assert len(gateway.log.of(StepReceived)) == 2


def test_a_record_that_the_gateway_refuses_ends_its_requests_only(
    gateway, start_worker, columns, new_info
) -> None:
    worker = start_worker(gateway.link.endpoint)
    worker.log.wait_for(GatewayUp)
    worker.link.set_info(new_info(vocab_size=100))
    gateway.log.wait_for(WorkerUp, 2)
    worker.link.publish(77, columns(77, [7]), 1)
    worker.link.publish(77, columns(77, [150]), 2)
    worker.link.publish(77, columns(77, [8]), 3)
    (refused,) = worker.log.wait_for(RowsRefused)
    assert ([key.handle & 0xFF for key in refused.keys], refused.reason) == ([150], "token_range")
    gateway.log.wait(lambda log: gateway.rows() == [7, 8])


def test_a_flood_of_messages_that_are_of_no_use_ends_its_connection_alone(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, read_metric
) -> None:
    monkeypatch.setattr(switchboard, "Pace", partial(Pace, burst=500, per_second=0.0))
    gateway, call, neighbour = map(request.getfixturevalue, ("gateway", "call", "neighbour"))
    raw = call(comes_back=False)  # and floods no second connection
    monitoring = raw.dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    raw.greet()
    ack = encode_control(Ack(77, 1, 0, 0, 0))
    raw.dealer.sndtimeo = 100
    for _ in range(2000):
        if monitoring.poll(0):
            break
        with contextlib.suppress(zmq.Again):
            raw.dealer.send(ack)
    assert monitoring.poll(60_000), "the connection was not ended"
    raw.dealer.disable_monitor()
    monitoring.close(linger=0)
    (down,) = gateway.log.wait_for(WorkerDown)
    assert (down.worker_id, down.reason) == ("raw", "flood")
    name = "baton_link_malformed_messages_total"
    assert read_metric(gateway.factory, name, reason="flood") == 1
    neighbour()
