"""Handoffs over real sockets: delivered, refused, timed out, answered again, never torn."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from prometheus_client import CollectorRegistry

from baton_worker.config import CurveConfig, HandoffConfig
from baton_worker.handoff import asks, offers
from baton_worker.handoff.api import (
    HandoffArrived,
    HandoffDelivered,
    HandoffEvent,
    HandoffFailed,
)
from baton_worker.handoff.frames import AnswerKind, encode_offer
from baton_worker.handoff.metrics import HandoffMetrics
from baton_worker.handoff.offers import OfferBook, address_of
from baton_worker.handoff.places import PlaceLimits
from baton_worker.handoff.room import Wish
from baton_worker.handoff.security import kv_security
from baton_worker.handoff.zmq_transport import ZmqKvTransport
from baton_worker.identity import RequestKey
from baton_worker.link.curve import generate_key_files
from baton_worker.messages import DecodeTarget
from baton_worker.metrics import MetricFactory
from baton_worker.records.columns import ErrorCode

KEY = RequestKey(1 << 40, 0)


class End:
    """One process's transport with its events in a queue."""

    def __init__(
        self,
        curve: CurveConfig | None = None,
        bind: str = "tcp://127.0.0.1:0",
        before_event: Callable[[HandoffEvent], None] = lambda event: None,
        is_started: bool = True,
    ) -> None:
        self.registry = CollectorRegistry()
        self.context: zmq.Context[Any] = zmq.Context()
        self.refusals: queue.Queue[str] = queue.Queue()
        self._metrics = metrics = HandoffMetrics(MetricFactory(self.registry, "m", "mixed"))
        security = kv_security(
            curve or CurveConfig(enabled=False),
            self.context,
            self._refuse,
            takes_offers=True,
        )
        self.public_key = security.public_key
        self.transport = ZmqKvTransport(
            HandoffConfig(bind=bind),
            metrics,
            context=self.context,
            security=security,
            places=PlaceLimits(16, 1 << 30, 1 << 20, 1024, 600.0),
        )
        self.events: queue.Queue[HandoffEvent] = queue.Queue()
        self._before_event = before_event
        if is_started:
            self.start()

    def start(self) -> None:
        self.transport.start(self._keep)

    def _refuse(self, reason: str) -> None:
        self._metrics.handshake_refused(reason)
        self.refusals.put(reason)

    def _keep(self, event: HandoffEvent) -> None:
        self._before_event(event)
        self.events.put(event)

    def next(self, seconds: float = 60.0) -> HandoffEvent:
        return self.events.get(timeout=seconds)

    def value(self, name: str, **labels: str) -> float:
        labels = {"model": "m", "role": "mixed", **labels}
        return self.registry.get_sample_value(name, labels) or 0.0

    @property
    def target(self) -> DecodeTarget:
        return DecodeTarget("decode-0", self.transport.endpoint)

    def close(self) -> None:
        self.transport.close()
        self.context.term()


@pytest.fixture
def prefill() -> Iterator[End]:
    end = End()
    yield end
    end.close()


@pytest.fixture
def decode() -> Iterator[End]:
    end = End()
    yield end
    end.close()


def test_a_handoff_arrives_whole_and_is_delivered_on_acknowledgement(prefill, decode, make_handoff):
    handoff = make_handoff()
    prefill.transport.offer(decode.target, handoff, 60.0)
    arrived = decode.next()
    assert isinstance(arrived, HandoffArrived)
    assert arrived.handoff.state == handoff.state
    assert all(np.array_equal(a, b) for a, b in zip(arrived.handoff.kv, handoff.kv, strict=True))
    assert prefill.events.empty()
    decode.transport.acknowledge(KEY)
    outcome = prefill.next()
    assert isinstance(outcome, HandoffDelivered)
    assert outcome.key == KEY
    assert outcome.sent_bytes == sum(a.nbytes for a in handoff.kv)


def test_decodes_engine_is_told_first_and_what_it_says_at_once_comes_behind(
    prefill, make_handoff, monkeypatch
):
    said: list[Any] = []

    def take(event: HandoffEvent) -> None:
        said.append(type(event))
        decode.transport.acknowledge(KEY)

    decode = End(before_event=take, is_started=False)
    try:
        receiver = decode.transport._receiver
        answer = receiver._answer
        monkeypatch.setattr(receiver, "_answer", lambda one: (said.append(one.kind), answer(one)))
        decode.start()
        prefill.transport.offer(decode.target, make_handoff(), 60.0)
        assert isinstance(prefill.next(), HandoffDelivered)
        assert said == [HandoffArrived, AnswerKind.RECEIVED, AnswerKind.IMPORTED]
    finally:
        decode.close()


def test_a_refusal_carries_its_code(prefill, decode, make_handoff):
    prefill.transport.offer(decode.target, make_handoff(), 60.0)
    decode.next()
    decode.transport.refuse(KEY, ErrorCode.DECODE_FULL, "no room")
    outcome = prefill.next()
    assert outcome == HandoffFailed(KEY, ErrorCode.DECODE_FULL, "no room")
    assert decode.value("baton_handoff_refused_total", reason="decode_full") == 1


def test_silence_ends_at_the_deadline_and_does_not_hold_up_others(prefill, decode, make_handoff):
    nobody = DecodeTarget("decode-9", "tcp://127.0.0.1:9")
    silent, other = RequestKey((1 << 40) + 1, 0), RequestKey((1 << 40) + 2, 0)
    # Of two offers to nobody one is open for as long as it takes to deliver the other handoff.
    prefill.transport.offer(nobody, make_handoff(handle=silent.handle), 600.0)
    prefill.transport.offer(decode.target, make_handoff(handle=other.handle), 60.0)
    assert isinstance(decode.next(), HandoffArrived)
    decode.transport.acknowledge(other)
    assert isinstance(prefill.next(), HandoffDelivered)
    prefill.transport.offer(nobody, make_handoff(), 0.5)
    failed = prefill.next()
    assert isinstance(failed, HandoffFailed)
    assert (failed.key, failed.code) == (KEY, ErrorCode.HANDOFF_TIMEOUT)


def test_an_unusable_endpoint_fails_only_its_request(prefill, make_handoff):
    prefill.transport.offer(DecodeTarget("d", "not an endpoint"), make_handoff(), 5.0)
    failed = prefill.next()
    assert isinstance(failed, HandoffFailed)
    assert failed.code is ErrorCode.HANDOFF_PEER_LOST


def test_a_new_process_at_a_dead_decodes_address_is_reached_again(
    prefill, make_handoff, kept_address
):
    first = End(bind=kept_address)
    target = first.target
    prefill.transport.offer(target, make_handoff(), 60.0)
    assert isinstance(first.next(), HandoffArrived)
    first.close()
    second = End(bind=kept_address)
    try:
        # The gateway ends the dead process's requests; the next one goes to its successor.
        prefill.transport.cancel(KEY)
        prefill.transport.offer(target, make_handoff(), 60.0)
        assert isinstance(second.next(), HandoffArrived)
        second.transport.acknowledge(KEY)
        assert isinstance(prefill.next(), HandoffDelivered)
    finally:
        second.close()


def test_a_cancelled_offer_has_no_event(prefill, decode, make_handoff):
    prefill.transport.offer(decode.target, make_handoff(), 60.0)
    decode.next()
    prefill.transport.cancel(KEY)
    decode.transport.acknowledge(KEY)
    prefill.transport.offer(decode.target, make_handoff(handle=(1 << 40) + 2), 60.0)
    decode.next()
    decode.transport.acknowledge(RequestKey((1 << 40) + 2, 0))
    outcome = prefill.next()
    assert isinstance(outcome, HandoffDelivered)
    assert outcome.key.handle == (1 << 40) + 2
    prefill.transport.cancel(KEY)  # again, and one that is over: nothing of theirs is open
    prefill.transport.cancel(outcome.key)
    prefill.transport.offer(decode.target, make_handoff(handle=(1 << 40) + 3), 10.0)
    decode.next()
    assert prefill.value("baton_handoff_outcomes_total", outcome="cancelled") == 1
    assert prefill.value("baton_handoff_outcomes_total", outcome="delivered") == 1


def test_what_ends_while_decode_is_silent_about_it_is_told_apart_and_logged(
    prefill, decode, make_handoff, monkeypatch, caplog
):
    """As when the gateway gives up a decode worker that stands still, before prefill does."""
    for module in (offers, asks):
        monkeypatch.setattr(module, "PROMPT_SECONDS", -1.0)  # as if more had passed
    nobody = DecodeTarget("decode-9", "tcp://127.0.0.1:9")
    prefill.transport.offer(nobody, make_handoff(), 60.0)
    prefill.transport.ask(nobody, RequestKey(KEY.handle + 1, 0), Wish(10, 10), 60.0)
    prefill.transport.cancel(KEY)
    for n in (0, 1, 1):
        prefill.transport.leave(RequestKey(KEY.handle + n, 0))
    arrived = make_handoff(handle=KEY.handle + 2)
    prefill.transport.offer(decode.target, arrived, 60.0)
    decode.next()
    decode.transport.acknowledge(arrived.state.key)
    assert isinstance(prefill.next(), HandoffDelivered)
    assert prefill.value("baton_handoff_outcomes_total", outcome="unanswered") == 2
    assert prefill.value("baton_handoff_outcomes_total", outcome="cancelled") == 0
    assert "a request ended before decode had answered" in caplog.messages


@pytest.mark.parametrize(("waited", "outcome"), [(True, "unimported"), (False, "cancelled")])
def test_what_ends_while_its_kv_lies_at_decode_is_told_apart(
    prefill, decode, make_handoff, monkeypatch, waited, outcome
):
    """As when decode stands still behind RECEIVED, or has no slot: the request's end hides it."""
    applied, answers = OfferBook.answer, queue.Queue()

    def answered(book, address, answer, now):
        event = applied(book, address, answer, now)
        answers.put(answer.kind)
        return event

    monkeypatch.setattr(OfferBook, "answer", answered)
    monkeypatch.setattr(offers, "PROMPT_SECONDS", -1.0 if waited else 600.0)
    prefill.transport.offer(decode.target, make_handoff(), 60.0)
    decode.next()
    assert answers.get(timeout=60.0) == AnswerKind.RECEIVED
    prefill.transport.cancel(KEY)
    arrived = make_handoff(handle=KEY.handle + 2)
    prefill.transport.offer(decode.target, arrived, 60.0)
    decode.next()
    decode.transport.acknowledge(arrived.state.key)
    assert isinstance(prefill.next(), HandoffDelivered)
    for name in ("unimported", "cancelled", "unanswered"):
        counted = prefill.value("baton_handoff_outcomes_total", outcome=name)
        assert counted == (name == outcome)


def test_a_cancel_holds_for_an_answer_read_right_behind_another(decode, make_handoff):
    """The thread is reading answers when the cancel comes, and finds one more to read."""
    second = RequestKey((1 << 40) + 1, 0)
    third = RequestKey((1 << 40) + 2, 0)

    def cancel_the_second_once_the_first_is_delivered(event: HandoffEvent) -> None:
        if isinstance(event, HandoffDelivered) and event.key == KEY:
            prefill.transport.cancel(second)
            decode.transport.acknowledge(second)
            address = address_of(decode.target)
            assert prefill.transport._sender._carrying.to(address, time.monotonic()).poll(60_000)

    prefill = End(before_event=cancel_the_second_once_the_first_is_delivered)
    try:
        for key in (KEY, second, third):
            prefill.transport.offer(decode.target, make_handoff(handle=key.handle), 60.0)
            decode.next()
        decode.transport.acknowledge(KEY)
        outcomes = [prefill.next()]
        decode.transport.acknowledge(third)
        outcomes.append(prefill.next())
    finally:
        prefill.close()
    delivered = [event.key for event in outcomes if isinstance(event, HandoffDelivered)]
    assert delivered == [KEY, third]


def test_a_cancel_holds_for_an_offer_whose_deadline_passes_right_behind_anothers(make_handoff):
    """The thread is giving offers up when the cancel comes, and finds one more to give up."""
    keys = [RequestKey((1 << 40) + n, 0) for n in range(3)]

    def cancel_the_second_once_the_first_has_failed(event: HandoffEvent) -> None:
        if isinstance(event, HandoffFailed) and event.key == keys[0]:
            prefill.transport.cancel(keys[1])

    nobody = DecodeTarget("decode-9", "tcp://127.0.0.1:9")
    prefill = End(before_event=cancel_the_second_once_the_first_has_failed, is_started=False)
    for key in keys:
        prefill.transport.offer(nobody, make_handoff(handle=key.handle), 0.0)
    prefill.start()
    try:
        outcomes = [prefill.next(), prefill.next()]
    finally:
        prefill.close()
    failed = [event.key for event in outcomes if isinstance(event, HandoffFailed)]
    assert failed == [keys[0], keys[2]]
    assert prefill.events.empty()


def test_an_offer_that_had_arrived_is_made_again_when_its_connection_breaks(
    prefill, make_handoff, kept_address
):
    """Decode's word that the KV sits in its pool may have died with the connection."""
    other = RequestKey((1 << 40) + 1, 0)
    first = End(bind=kept_address)
    prefill.transport.offer(first.target, make_handoff(), 60.0)
    first.next()
    prefill.transport.offer(first.target, make_handoff(handle=other.handle), 60.0)
    first.next()
    first.transport.acknowledge(other)
    assert prefill.next().key == other, "what arrived before it was confirmed before it"
    first.close()
    second = End(bind=kept_address)
    try:
        again = second.next()
        assert isinstance(again, HandoffArrived)
        assert again.handoff.state.handle == KEY.handle
        second.transport.acknowledge(KEY)
        outcome = prefill.next()
    finally:
        second.close()
    assert isinstance(outcome, HandoffDelivered)
    assert outcome.key == KEY


def test_any_number_of_calls_may_wait_for_the_thread(make_handoff):
    """A gateway that is lost has all its requests cancelled in one go, whatever the thread does."""
    idle = End(is_started=False)
    for n in range(20_000):
        idle.transport.cancel(RequestKey(n, 0))
    idle.transport.refuse(KEY, ErrorCode.DECODE_FULL, "no room")
    idle.start()
    idle.close()
    assert not idle.transport._calls


def test_answers_do_not_wait_for_the_end_of_a_stream_of_offers(prefill, make_handoff):
    second = RequestKey((1 << 40) + 1, 0)
    waiting: list[bool] = []

    def acknowledge_while_another_offer_waits(event: HandoffEvent) -> None:
        if isinstance(event, HandoffArrived):
            waiting.append(KEY in decode.transport._receiver._routes)
            if len(waiting) == 1:
                decode.transport.acknowledge(KEY)
                prefill.transport.offer(decode.target, make_handoff(handle=second.handle), 60.0)
                assert decode.transport._receiver.router.poll(60_000)

    decode = End(before_event=acknowledge_while_another_offer_waits)
    try:
        prefill.transport.offer(decode.target, make_handoff(), 60.0)
        assert isinstance(prefill.next(), HandoffDelivered)
        decode.next()
        decode.next()
    finally:
        decode.close()
    assert waiting == [True, False], "the first was answered before the second was read"


def test_an_offer_that_is_malformed_but_names_its_request_is_refused_at_once(
    prefill, decode, make_handoff
):
    """Without an answer prefill would offer it again and again until its deadline."""
    prefill.transport.offer(decode.target, make_handoff(n_layers=2), 600.0)
    event = prefill.next()
    assert isinstance(event, HandoffFailed)
    assert (event.key, event.code) == (KEY, ErrorCode.HANDOFF_REFUSED)
    assert "KV frames" in event.message
    assert decode.value("baton_handoff_malformed_total") == 1


def test_an_offer_that_decode_has_heard_to_be_over_is_cancelled_and_no_failure(
    prefill, decode, make_handoff
):
    prefill.transport.offer(decode.target, make_handoff(), 60.0)
    decode.next()
    decode.transport.refuse(KEY, None, "the request is over")
    event = prefill.next()
    assert isinstance(event, HandoffFailed)
    assert event.is_over
    assert prefill.value("baton_handoff_outcomes_total", outcome="cancelled") == 1
    assert prefill.value("baton_handoff_outcomes_total", outcome="handoff_refused") == 0


def test_garbage_on_the_port_is_counted_and_harms_nobody(prefill, decode, make_handoff):
    context: zmq.Context[Any] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(decode.transport.endpoint)
    dealer.send_multipart([b"BKV1", b"\xff\x00garbage", b"x"])
    dealer.send(b"")
    # One connection keeps its order: once this has arrived, the garbage before it has been read.
    dealer.send_multipart(encode_offer(make_handoff()), copy=False)
    assert isinstance(decode.next(), HandoffArrived)
    assert decode.value("baton_handoff_malformed_total") == 2
    prefill.transport.offer(decode.target, make_handoff(handle=(1 << 40) + 3), 60.0)
    assert isinstance(decode.next(), HandoffArrived)
    dealer.close(0)
    context.term()


def curve_end(folder: Path, name: str, allowed: Path) -> tuple[End, str]:
    pair = generate_key_files(folder / f"{name}.public", folder / f"{name}.secret")
    config = CurveConfig(
        True,
        str(folder / f"{name}.public"),
        str(folder / f"{name}.secret"),
        str(folder / f"{name}.public"),
        str(allowed),
    )
    return End(config), pair.public.decode()


def test_curve_lets_the_listed_prefill_in_and_nobody_else(tmp_path, make_handoff):
    allowed = tmp_path / "allowed"
    allowed.write_text("")
    decode, _ = curve_end(tmp_path, "decode", allowed)
    friend, friend_key = curve_end(tmp_path, "friend", allowed)
    stranger, _ = curve_end(tmp_path, "stranger", allowed)
    allowed.write_text(friend_key + "\n")
    target = DecodeTarget("decode-0", decode.transport.endpoint, decode.public_key)
    try:
        stranger.transport.offer(target, make_handoff(handle=(1 << 40) + 7), 1.0)
        friend.transport.offer(target, make_handoff(), 60.0)
        arrived = decode.next()
        assert isinstance(arrived, HandoffArrived)
        assert arrived.handoff.state.handle == KEY.handle
        decode.transport.acknowledge(KEY)
        assert isinstance(friend.next(), HandoffDelivered)
        assert isinstance(stranger.next(), HandoffFailed)
        assert decode.refusals.get(timeout=60.0) == "unknown_key"
        refused = decode.value("baton_handoff_handshakes_refused_total", reason="unknown_key")
        assert refused >= 1
    finally:
        for end in (decode, friend, stranger):
            end.close()
