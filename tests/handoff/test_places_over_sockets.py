"""Asks cross real sockets: granted, queued, refused, asked again, taken back."""

from __future__ import annotations

import time

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from baton_worker.config import HandoffConfig
from baton_worker.handoff.api import HandoffArrived, HandoffDelivered, HandoffFailed, HandoffGranted
from baton_worker.handoff.frames import (
    ASK_MAGIC,
    Ask,
    HandoffFormatError,
    Withdrawal,
    decode_answer,
    decode_ask,
    encode_ask,
)
from baton_worker.handoff.places import PlaceLimits
from baton_worker.handoff.room import Amount, Wish
from baton_worker.identity import RequestKey
from baton_worker.messages import DecodeTarget
from baton_worker.records.columns import ErrorCode

WISH = Wish(4608, 20)


def key(n: int) -> RequestKey:
    return RequestKey((1 << 40) + n, 0)


def one_slot(asks: int = 8, queue_seconds: float = 600.0, **over: int) -> PlaceLimits:
    limits = {"slots": 1, "receive_bytes": 1 << 30, "kv_tokens": 1 << 20} | over
    return PlaceLimits(**limits, asks=asks, queue_seconds=queue_seconds)


def test_a_place_is_granted_at_once_and_the_next_when_its_request_has_left(
    handoff_end, make_handoff
):
    prefill, decode = handoff_end(), handoff_end(places=one_slot())
    for n in (1, 2, 3):
        prefill.transport.ask(decode.target, key(n), WISH, 60.0)
    assert prefill.next().key == key(1)
    prefill.transport.offer(decode.target, make_handoff(handle=key(1).handle), 60.0)
    assert isinstance(decode.next(), HandoffArrived)
    decode.transport.acknowledge(key(1))
    assert isinstance(prefill.next(), HandoffDelivered)
    prefill.transport.leave(key(1))  # handed over: the place is decode's to give back
    decode.transport.leave(key(1))
    assert prefill.next().key == key(2)
    prefill.transport.leave(key(2))  # ended at its first token
    assert prefill.next().key == key(3)
    assert decode.value("baton_handoff_waiting_asks") == 0
    assert prefill.value("baton_handoff_place_seconds_count") == 3


def test_a_full_line_refuses_and_a_request_that_is_over_too(handoff_end):
    prefill, decode = handoff_end(), handoff_end(places=one_slot(asks=1))
    decode.transport.leave(key(9), code=None)
    for n in (1, 2, 3, 9):
        prefill.transport.ask(decode.target, key(n), WISH, 60.0)
    events = [prefill.next() for _ in range(3)]
    assert isinstance(events[0], HandoffGranted)
    failed = {event.key: event.code for event in events if isinstance(event, HandoffFailed)}
    assert failed == {key(3): ErrorCode.DECODE_FULL, key(9): ErrorCode.HANDOFF_REFUSED}
    assert {event.key for event in events[1:] if event.is_over} == {key(9)}
    for reason, n in (("cancelled", 1), ("decode_full", 1), ("handoff_refused", 0)):
        assert prefill.value("baton_handoff_outcomes_total", outcome=reason) == n, reason
    for reason, n in (("over", 1), ("decode_full", 1), ("handoff_refused", 0)):
        assert decode.value("baton_handoff_refused_total", reason=reason) == n, reason


def test_what_decode_gave_up_by_itself_is_refused_as_a_failure_when_it_comes_again(handoff_end):
    prefill, decode = handoff_end(), handoff_end()
    decode.transport.refuse(key(1), ErrorCode.INVALID_REQUEST, "another model's")
    decode.transport.leave(key(1), code=None)  # by whoever was told of it
    prefill.transport.ask(decode.target, key(1), WISH, 60.0)
    event = prefill.next()
    assert (event.key, event.code, event.is_over) == (key(1), ErrorCode.INVALID_REQUEST, False)
    assert prefill.value("baton_handoff_outcomes_total", outcome="invalid_request") == 1
    assert prefill.value("baton_handoff_outcomes_total", outcome="cancelled") == 0


def test_what_was_refused_for_being_aborted_is_nobodys_failure_when_it_comes_again(handoff_end):
    """An offer came while the engine still had the request to end, and its connection broke."""
    prefill, decode = handoff_end(), handoff_end()
    decode.transport.refuse(key(1), None, "the request is over")
    decode.transport.leave(key(1), code=None)  # with the row that ends it
    prefill.transport.ask(decode.target, key(1), WISH, 60.0)
    event = prefill.next()
    assert (event.key, event.is_over) == (key(1), True)
    assert prefill.value("baton_handoff_outcomes_total", outcome="cancelled") == 1
    assert prefill.value("baton_handoff_outcomes_total", outcome="handoff_refused") == 0


def test_who_asks_where_decode_has_said_that_it_is_full_is_refused_as_that(handoff_end):
    """The gateway hears of it by decode, prefill by its ask: as load, by both."""
    prefill, decode = handoff_end(), handoff_end()
    decode.transport.leave(key(1), code=ErrorCode.DECODE_FULL)
    prefill.transport.ask(decode.target, key(1), WISH, 60.0)
    event = prefill.next()
    assert (event.key, event.code, event.is_over) == (key(1), ErrorCode.DECODE_FULL, False)
    for outcome, n in (("decode_full", 1), ("handoff_refused", 0), ("cancelled", 0)):
        assert prefill.value("baton_handoff_outcomes_total", outcome=outcome) == n, outcome


@pytest.fixture
def greedy_at():
    """Return how to connect, from a host of its own, somebody who may ask for anything."""
    with zmq.Context() as context:
        made = []

        def connect(endpoint: str) -> zmq.Socket[bytes]:
            made.append(context.socket(zmq.DEALER))
            made[-1].connect(endpoint.replace("tcp://", "tcp://127.0.0.9:0;"))
            return made[-1]

        yield connect
        for socket in made:
            socket.close(linger=0)


def say_asks(socket: zmq.Socket[bytes], numbers: range) -> None:
    for n in numbers:
        socket.send_multipart(encode_ask(Ask(*key(n), kv_bytes=10, n_tokens=10)))


def test_who_asks_for_all_that_there_is_keeps_nobody_out(handoff_end, greedy_at):
    places = PlaceLimits(8, 1 << 30, 1 << 20, 100, 600.0, Amount(1, 1 << 20, 1 << 20))
    prefill, decode = handoff_end(), handoff_end(places=places)
    greedy = greedy_at(decode.transport.endpoint)
    say_asks(greedy, range(1000, 1100))
    for _ in range(100):
        assert greedy.poll(60_000)
        greedy.recv_multipart()
    for n in (1, 2):
        prefill.transport.ask(decode.target, key(n), WISH, 60.0)
    assert prefill.next().key == key(1), "the reserve"
    greedy.send_multipart(encode_ask(Withdrawal(*key(1000))))
    assert prefill.next().key == key(2), "92 of the other's stood before it"
    held_up = "baton_handoff_places_held_up_total"
    assert decode.value(held_up, reason="order") + decode.value(held_up, reason="slots") > 90


def test_who_fills_the_line_is_turned_away_for_another(handoff_end, greedy_at):
    prefill, decode = handoff_end(), handoff_end(places=one_slot(asks=8, slots=2))
    greedy = greedy_at(decode.transport.endpoint)
    say_asks(greedy, range(1000, 1010))
    for _ in range(10):
        assert greedy.poll(60_000)
        greedy.recv_multipart()
    prefill.transport.ask(decode.target, key(1), WISH, 60.0)
    assert greedy.poll(60_000)
    refused = decode_answer(greedy.recv_multipart())
    assert (refused.key, refused.error) == (key(1009), ErrorCode.DECODE_FULL)
    greedy.send_multipart(encode_ask(Withdrawal(*key(1000))))
    assert prefill.next().key == key(1)
    assert decode.value("baton_handoff_places_held_up_total", reason="displaced") == 1


def test_a_line_survives_the_decode_process_that_held_it(handoff_end, kept_address):
    """Its successor at the same address is asked again, by those who wait and no others."""
    at_its_address = HandoffConfig(bind=kept_address)
    prefill, first = handoff_end(), handoff_end(at_its_address, places=one_slot())
    target = first.target
    for n in (1, 2):
        prefill.transport.ask(target, key(n), WISH, 60.0)
    assert prefill.next().key == key(1)
    first.close()
    second = handoff_end(at_its_address, places=one_slot())
    assert second.transport.endpoint == target.kv_endpoint
    granted = prefill.next()
    assert isinstance(granted, HandoffGranted)
    assert granted.key == key(2)


def test_nobody_at_the_address_ends_an_ask_at_its_deadline(handoff_end):
    prefill = handoff_end()
    prefill.transport.ask(DecodeTarget("decode-9", "tcp://127.0.0.1:9"), key(1), WISH, 0.3)
    failed = prefill.next()
    assert isinstance(failed, HandoffFailed)
    assert failed.code is ErrorCode.HANDOFF_TIMEOUT
    prefill.transport.ask(DecodeTarget("decode-9", "no endpoint"), key(2), WISH, 60.0)
    assert prefill.next().code is ErrorCode.HANDOFF_PEER_LOST


def test_who_stands_in_line_for_too_long_is_told(handoff_end, make_handoff):
    prefill, decode = handoff_end(), handoff_end(places=one_slot(queue_seconds=0.2))
    prefill.transport.offer(decode.target, make_handoff(handle=key(1).handle), 60.0)
    assert isinstance(decode.next(), HandoffArrived)
    prefill.transport.ask(decode.target, key(2), WISH, 60.0)
    failed = prefill.next()
    assert (failed.key, failed.code) == (key(2), ErrorCode.DECODE_FULL)
    assert decode.value("baton_handoff_places_expired_total") == 1


def test_kv_that_never_asked_and_finds_no_memory_is_refused_and_nothing_of_it_kept(
    handoff_end, make_handoff
):
    prefill, decode = handoff_end(), handoff_end(places=one_slot(receive_bytes=5000))
    for n in (1, 2):
        prefill.transport.offer(decode.target, make_handoff(handle=key(n).handle), 60.0)
    assert isinstance(decode.next(), HandoffArrived)
    refused = prefill.next()
    assert (refused.key, refused.code) == (key(2), ErrorCode.DECODE_FULL)
    assert decode.events.empty()
    assert decode.value("baton_handoff_awaited_bytes") == 4608


def test_an_offer_that_cannot_be_read_gives_its_place_to_the_next(handoff_end, make_handoff):
    prefill, decode = handoff_end(), handoff_end(places=one_slot())
    for n in (1, 2):
        prefill.transport.ask(decode.target, key(n), WISH, 60.0)
    assert prefill.next().key == key(1)
    prefill.transport.offer(decode.target, make_handoff(handle=key(1).handle, n_layers=2), 60.0)
    told = {type(event): event.key for event in (prefill.next(), prefill.next())}
    assert told == {HandoffFailed: key(1), HandoffGranted: key(2)}  # over two connections


@given(
    st.one_of(
        st.builds(
            Ask,
            st.integers(1, 2**64 - 1),
            st.integers(0, 255),
            st.integers(1, 1 << 48),
            st.integers(1, 1 << 24),
            st.integers(-(2**31), 2**31),
            st.integers(0, 1 << 40),
        ),
        st.builds(Withdrawal, st.integers(1, 2**64 - 1), st.integers(0, 255)),
    )
)
def test_an_ask_round_trips(message):
    assert decode_ask(encode_ask(message)) == message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("handle", 0),
        ("handle", -1),
        ("attempt", 256),
        ("kv_bytes", 0),
        ("kv_bytes", (1 << 48) + 1),
        ("n_tokens", 0),
        ("n_tokens", 1 << 25),
        ("turn", -1),
        ("turn", (1 << 40) + 1),
    ],
)
def test_an_ask_out_of_range_is_refused_by_name(field, value):
    message = msgspec.structs.replace(Ask(1, 0, 1, 1), **{field: value})
    with pytest.raises(HandoffFormatError, match=f"{field} is {value}"):
        decode_ask(encode_ask(message))


class AskOfBefore(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """An ask as the version before knew it."""

    handle: int
    attempt: int
    kv_bytes: int
    n_tokens: int
    priority: int = 0


def test_the_version_before_reads_an_ask_and_is_read():
    magic, said = encode_ask(Ask(7, 1, 100, 10, -2, 5))
    assert msgspec.msgpack.decode(said, type=AskOfBefore) == AskOfBefore(7, 1, 100, 10, -2)
    older = msgspec.msgpack.encode(AskOfBefore(7, 1, 100, 10, -2))
    assert decode_ask([magic, older]) == Ask(7, 1, 100, 10, -2, 0)


@given(st.lists(st.binary(max_size=60), max_size=3))
def test_random_bytes_only_ever_raise_the_declared_error(frames):
    for candidate in (frames, [ASK_MAGIC, *frames]):
        try:
            decode_ask(candidate)
        except HandoffFormatError:
            continue


@pytest.mark.slow
def test_the_first_of_a_line_longer_than_any_is_told_when_its_turn_comes(handoff_end):
    """How many may wait is configured; whoever does is remembered, with where to answer."""
    n_asks = 10_000
    prefill, decode = handoff_end(), handoff_end(places=one_slot(asks=n_asks))
    for n in range(n_asks):
        prefill.transport.ask(decode.target, key(n), WISH, 600.0)
    assert prefill.next().key == key(0)
    waiting = "baton_handoff_waiting_asks"
    deadline = time.monotonic() + 120.0
    while decode.value(waiting) < n_asks - 1:
        assert time.monotonic() < deadline, f"{decode.value(waiting)} wait"
        time.sleep(0.02)
    prefill.transport.leave(key(0))
    assert prefill.next().key == key(1)
