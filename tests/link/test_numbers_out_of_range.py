"""Whole frames that lie: no number or text of a peer ends another process or stays in its state."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
import zmq

from baton_worker.link import bounds
from baton_worker.link.api import GatewayUp, WorkerDown
from baton_worker.records.control import (
    AbortNotice,
    Ack,
    Bye,
    CommandFrame,
    ErrorNotice,
    Hello,
    Resume,
    Welcome,
    Who,
    decode_control,
    encode_control,
)
from baton_worker.records.errors import RecordError

TOP = (1 << 64) - 1
HELLO = Hello(9, 1, 1, 1, 0)
WELCOME = Welcome(9, 1, 1, 1, 8, 1 << 20, 77)
HONEST = [
    HELLO,
    Hello(9, 70, 5, 12, 77),
    WELCOME,
    Ack(9, 1, 0, 8, 1 << 20),
    Resume(9, 1, 1),
    Who(77, 0),
    Bye(9, 1),
    ErrorNotice(9, 0, 0, 0, "name_taken"),
    ErrorNotice(9, 1, 4, 4, "body_crc"),
    CommandFrame(77, 1, b"x"),
    AbortNotice(77, 0, 5, 0),
]
LIES = {
    "oldest 0": dataclasses.replace(HELLO, oldest_seq=0),
    "oldest of 2^64-1": dataclasses.replace(HELLO, oldest_seq=TOP, next_seq=TOP),
    "oldest behind next": dataclasses.replace(HELLO, oldest_seq=2),
    "commands 0": dataclasses.replace(HELLO, commands_expected=0),
    "commands of 2^64-1": dataclasses.replace(HELLO, commands_expected=TOP),
    "hello's incarnation": dataclasses.replace(HELLO, gateway_incarnation=1 << 24),
    "welcome expects 0": dataclasses.replace(WELCOME, expected_seq=0, credit_seq=0),
    "welcome expects 2^63": dataclasses.replace(WELCOME, expected_seq=1 << 63, credit_seq=1 << 63),
    "incarnation 0": dataclasses.replace(WELCOME, gateway_incarnation=0),
    "incarnation of 25 bits": dataclasses.replace(WELCOME, gateway_incarnation=1 << 24),
    "command 0": dataclasses.replace(WELCOME, commands_oldest=0),
    "commands next of 2^64-1": dataclasses.replace(WELCOME, commands_next=TOP, commands_oldest=TOP),
    "ack of 2^64-1": Ack(9, 1, TOP, 8, 8),
    "credit of 2^64-1": Ack(9, 1, 0, TOP, 8),
    "credit bytes of 2^64-1": Ack(9, 1, 0, 8, TOP),
    "resume at 0": Resume(9, 1, 0),
    "resume at 2^64-1": Resume(9, 1, TOP),
    "next of 2^64-1": Bye(9, TOP),
    "errors backwards": ErrorNotice(9, 1, 4, 3, "body_crc"),
    "a long reason": ErrorNotice(9, 1, 4, 4, "x" * 100_000),
    "command frame 0": CommandFrame(77, 0, b"x"),
    "command frame 2^64-1": CommandFrame(77, TOP, b"x"),
    "attempt 256": AbortNotice(77, 0, 5, 256),
}


@pytest.mark.parametrize("message", HONEST, ids=lambda message: type(message).__name__)
def test_what_honest_peers_say_is_in_bounds(message) -> None:
    bounds.check(decode_control(encode_control(message)))


@pytest.mark.parametrize("message", LIES.values(), ids=LIES.keys())
def test_what_no_honest_peer_could_say_is_refused_by_name(message) -> None:
    with pytest.raises(RecordError, match=r"field_range: .+ (is|before) "):
        bounds.check(decode_control(encode_control(message)))


@pytest.fixture
def stranger():
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    monitoring = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    yield dealer, monitoring
    dealer.disable_monitor()
    monitoring.close(linger=0)
    dealer.close()
    context.term()


@pytest.mark.parametrize("oldest", [0, TOP])
def test_a_hello_that_ended_the_gateway_ends_its_connection_alone(
    start_gateway, start_worker, new_info, columns, read_metric, stranger, oldest: int
) -> None:
    gateway = start_gateway()
    worker = start_worker(gateway.link.endpoint)
    worker.log.wait_for(GatewayUp)
    dealer, monitoring = stranger
    dealer.connect(gateway.link.endpoint)
    body = msgspec.msgpack.encode(new_info("stranger"))
    dealer.send(encode_control(Hello(9, oldest, oldest, 1, 0, body)))
    assert monitoring.poll(60_000), "the connection was not ended"
    gateway.log.wait_until(lambda: read_metric(gateway.factory, "baton_link_expelled_total") == 1)
    name = "baton_link_malformed_messages_total"
    assert read_metric(gateway.factory, name, reason="field_range") == 1
    worker.link.publish(77, columns(77, [4242]), 1)
    gateway.log.wait(lambda log: 4242 in gateway.rows())
    assert gateway.log.of(WorkerDown) == []


def test_a_worker_that_was_linked_and_then_lies_is_down_at_once(
    start_gateway, new_info, stranger
) -> None:
    gateway = start_gateway()
    dealer, monitoring = stranger
    dealer.connect(gateway.link.endpoint)
    body = msgspec.msgpack.encode(new_info("stranger"))
    dealer.send(encode_control(Hello(9, 1, 1, 1, 0, body)))
    dealer.send(encode_control(Resume(77, 1, TOP)))
    (down,) = gateway.log.wait_for(WorkerDown)
    assert (down.worker_id, down.reason) == ("stranger", "field_range")
    assert monitoring.poll(60_000)


@pytest.mark.parametrize("lie", ["commands next of 2^64-1", "incarnation 0", "ahead"])
def test_a_gateway_that_lies_is_left_and_the_worker_lives(
    start_worker, start_gateway, read_metric, lie: str
) -> None:
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.linger = 0
    port = router.bind_to_random_port("tcp://127.0.0.1")
    honest = start_gateway()
    worker = start_worker(honest.link.endpoint, f"tcp://127.0.0.1:{port}")
    try:
        assert router.poll(60_000)
        route, frame = router.recv_multipart()
        hello = decode_control(frame)
        ahead = dataclasses.replace(WELCOME, expected_seq=9, credit_seq=9)
        welcome = dataclasses.replace(LIES.get(lie, ahead), epoch=hello.epoch)
        router.send_multipart([route, encode_control(welcome)])
        worker.log.wait_until(lambda: read_metric(worker.factory, "baton_link_expelled_total") == 1)
        assert worker.link.refusals() == {f"tcp://127.0.0.1:{port}": "field_range"}
        assert worker.log.wait_for(GatewayUp)[0].endpoint == honest.link.endpoint
    finally:
        router.close()
        context.term()


@pytest.mark.parametrize(
    "facts",
    [
        {"worker_id": ""},
        {"worker_id": "x" * 254},
        {"worker_id": "two\nlines"},
        {"role": -1},
        {"vocab_size": 0},
        {"vocab_size": -5},
        {"max_running": 1 << 63},
        {"max_waiting": -1},
        {"model": "m" * 5000},
        {"features": ("f",) * 100},
        {"semantic_hash": -1},
    ],
    ids=str,
)
def test_what_a_worker_says_of_itself_is_held_to_ranges(
    new_info, start_gateway, stranger, facts
) -> None:
    gateway = start_gateway()
    dealer, monitoring = stranger
    dealer.connect(gateway.link.endpoint)
    body = msgspec.msgpack.encode(new_info(**facts))
    dealer.send(encode_control(Hello(9, 1, 1, 1, 0, body)))
    assert dealer.poll(60_000)
    notice = decode_control(dealer.recv())
    assert notice.reason == "hello_body"
    assert monitoring.poll(60_000), "and its connection ends"
