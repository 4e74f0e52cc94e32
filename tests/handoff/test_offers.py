"""KV goes out once per connection, a window at a time, and only silence ends an offer."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_worker.engine.api import Handoff
from baton_worker.handoff.api import HandoffDelivered, HandoffFailed
from baton_worker.handoff.frames import Answer, AnswerKind
from baton_worker.handoff.offers import Address, OfferBook
from baton_worker.identity import RequestKey
from baton_worker.messages import DecodeTarget
from baton_worker.records.columns import ErrorCode

MB = 1 << 20
HERE, THERE = DecodeTarget("decode-0", "tcp://d0:1"), DecodeTarget("decode-1", "tcp://d1:1")
AT, OTHER = Address("tcp://d0:1", ""), Address("tcp://d1:1", "")


def key(n: int) -> RequestKey:
    return RequestKey((1 << 40) + n, 0)


@pytest.fixture
def sized(make_handoff):
    """Make a handoff that carries so many bytes."""

    def make(n: int, n_bytes: int):
        return dataclasses.replace(
            make_handoff(handle=key(n).handle), kv=(np.zeros(n_bytes, np.uint8),)
        )

    return make


def flush(book: OfferBook, at: Address, now: float) -> list[RequestKey]:
    """Send all that may go now."""
    sent = []
    while (offer := book.next_to_send(at, now)) is not None:
        book.sent(offer)
        sent.append(offer.key)
    return sent


def say(book: OfferBook, n: int, kind: AnswerKind, now: float, at: Address = AT):
    return book.answer(at, Answer(*key(n), int(kind)), now)


def test_what_is_on_the_wire_of_a_live_connection_is_never_sent_again(sized):
    book = OfferBook(64 * MB)
    book.open(HERE, sized(1, 60 * MB), 10.0, 0.0)
    book.connected(AT, 0.0)
    assert flush(book, AT, 0.0) == [key(1)]
    for tenths in range(1, 100):
        assert flush(book, AT, tenths / 10) == []
        assert book.overdue(tenths / 10, {AT}) == []
    assert book.flying_bytes == 60 * MB


def test_a_socket_never_holds_more_than_the_window_and_the_order_stays(sized):
    book = OfferBook(64 * MB)
    for n in range(6):
        book.open(HERE, sized(n, 30 * MB), 10.0, 0.0)
    book.open(THERE, sized(9, 1), 10.0, 0.0)
    book.connected(AT, 0.0)
    sent = flush(book, AT, 0.0)
    assert sent == [key(0), key(1)]
    assert flush(book, OTHER, 0.0) == [key(9)], "another's window is its own"
    for n in range(6):
        assert say(book, n, AnswerKind.RECEIVED, 1.5 * n) is None
        sent += flush(book, AT, 1.5 * n)
        assert book.flying_bytes <= 60 * MB + 1
    assert sent == [key(n) for n in range(6)]


def test_the_window_is_filled_to_its_last_byte_and_not_one_more(sized):
    book = OfferBook(100)
    for n, n_bytes in enumerate((60, 40, 1)):
        book.open(HERE, sized(n, n_bytes), 10.0, 0.0)
    assert flush(book, AT, 0.0) == [key(0), key(1)]
    assert say(book, 1, AnswerKind.RECEIVED, 1.0) is None
    assert flush(book, AT, 1.0) == [key(2)]
    assert say(book, 1, AnswerKind.RECEIVED, 1.0) is None, "once more"
    assert book.flying_bytes == 61


def test_a_socket_that_takes_nothing_is_tried_again_in_5_ms_or_on_the_next_connection(sized):
    book = OfferBook(100)
    book.open(HERE, sized(1, 10), 10.0, 0.0)
    book.open(HERE, sized(2, 10), 10.0, 0.0)
    book.open(THERE, sized(3, 10), 10.0, 0.0)
    book.blocked(book.next_to_send(AT, 2.0), 2.0)
    assert book.next_event_at() == 2.005
    assert book.waiting_at() == [AT, OTHER]
    assert flush(book, AT, 2.004) == []
    assert flush(book, OTHER, 2.004) == [key(3)], "another's socket is its own"
    assert book.next_to_send(AT, 2.005).key == key(1)
    book.connected(AT, 2.001)
    book.connected(Address("tcp://nobody:1", ""), 2.001)
    assert flush(book, AT, 2.001) == [key(1), key(2)]
    assert (book.next_event_at(), book.waiting_at()) == (10.0, [])


def test_what_is_larger_than_the_window_goes_alone(sized):
    book = OfferBook(MB)
    book.open(HERE, sized(1, 5 * MB), 10.0, 0.0)
    book.open(HERE, sized(2, 1), 10.0, 0.0)
    assert flush(book, AT, 0.0) == [key(1)]
    say(book, 1, AnswerKind.RECEIVED, 1.0)
    assert flush(book, AT, 1.0) == [key(2)]


def test_the_deadline_ends_when_decode_has_all_of_it(sized):
    book = OfferBook(64 * MB)
    book.open(HERE, sized(1, 100), 10.0, 0.0)
    book.connected(AT, 0.0)
    flush(book, AT, 0.0)
    say(book, 1, AnswerKind.RECEIVED, 9.9)
    assert book.overdue(1e6, {AT}) == [], "decode's queue may be long"
    assert book.next_event_at() is None
    event = say(book, 1, AnswerKind.IMPORTED, 1e6)
    assert isinstance(event, HandoffDelivered)
    assert event.transfer_seconds == pytest.approx(9.9)


def test_transfer_ends_with_the_first_receipt_or_else_with_the_import(sized):
    book = OfferBook(100)
    for n in (1, 2):
        book.open(HERE, sized(n, 10), 10.0, 1.0)
    flush(book, AT, 2.0)
    say(book, 1, AnswerKind.RECEIVED, 3.0)
    say(book, 1, AnswerKind.RECEIVED, 4.0)
    said = [say(book, n, AnswerKind.IMPORTED, 6.0) for n in (1, 2)]
    assert said == [
        HandoffDelivered(key(1), 5.0, 10, 2.0, decode="decode-0"),
        HandoffDelivered(key(2), 5.0, 10, 5.0, decode="decode-0"),
    ]
    assert say(book, 1, AnswerKind.IMPORTED, 7.0) is None


def test_silence_is_allowed_for_exactly_the_bytes_under_way(sized):
    book = OfferBook(2 * MB)
    for n, n_bytes in enumerate((MB, MB, MB // 2)):
        book.open(HERE, sized(n, n_bytes), 10.0, 0.0)
    book.connected(AT, 1.0)
    assert flush(book, AT, 1.0) == [key(0), key(1)]
    assert book.overdue(math.nextafter(13.0, 0.0), {AT}) == []
    assert [offer.key for offer in book.overdue(13.0, {AT})] == [key(0), key(1)]
    assert book.overdue(13.49, {AT}) == []
    (waiting,) = book.overdue(13.5, {AT})
    assert waiting.key == key(2), "its own bytes are to come"
    words = "decode-0 never confirmed the handoff, 13.5 s after it was offered (0 sends)"
    assert book.give_up(waiting, 13.5).message == words


def test_a_receipt_that_died_with_its_connection_says_nothing_of_the_next(sized):
    book = OfferBook(100)
    book.open(HERE, sized(1, 10), 10.0, 0.0)
    flush(book, AT, 0.0)
    book.connection_lost(AT, 1.0)
    book.connection_lost(OTHER, 1.0)
    assert say(book, 1, AnswerKind.RECEIVED, 1.0) is None
    assert flush(book, AT, 1.0) == [key(1)]
    (late,) = book.overdue(11.0, ())
    words = "decode-0 never confirmed the handoff, 11.0 s after it was offered (2 sends)"
    assert book.give_up(late, 11.0) == HandoffFailed(key(1), ErrorCode.HANDOFF_TIMEOUT, words)


def test_a_word_about_anothers_offer_changes_nothing_of_it(sized):
    book = OfferBook(100)
    book.open(HERE, sized(1, 10), 10.0, 0.0)
    book.open(THERE, sized(2, 10), 10.0, 0.0)
    flush(book, AT, 0.0)
    assert book.is_for_another(key(1), OTHER)
    assert not book.is_for_another(key(1), AT)
    assert not book.is_for_another(key(3), OTHER)
    assert say(book, 1, AnswerKind.IMPORTED, 1.0, OTHER) is None
    assert say(book, 1, AnswerKind.IMPORTED, 1.0, Address("tcp://nobody:1", "")) is None
    assert (book.n_open, book.flying_bytes) == (2, 10)
    assert isinstance(say(book, 1, AnswerKind.IMPORTED, 1.0), HandoffDelivered)


def test_a_refusal_ends_an_offer_with_decodes_words(sized):
    book = OfferBook(100)
    book.open(HERE, sized(1, 10), 10.0, 0.0)
    offer = book.next_to_send(AT, 0.0)
    book.sent(offer)
    assert book.holds(offer)
    told = Answer(*key(1), int(AnswerKind.REFUSED), int(ErrorCode.DECODE_FULL), "full")
    assert book.answer(AT, told, 1.0) == HandoffFailed(key(1), ErrorCode.DECODE_FULL, "full")
    assert not book.holds(offer)


def test_an_address_that_is_none_fails_all_its_offers_and_no_others(sized):
    book = OfferBook(100)
    for n, target in ((1, HERE), (2, THERE), (3, HERE)):
        book.open(target, sized(n, 10), 10.0, 0.0)
    assert book.fail(AT, "none") == [
        HandoffFailed(key(n), ErrorCode.HANDOFF_PEER_LOST, "none") for n in (1, 3)
    ]
    assert (book.n_open, book.addresses()) == (1, {OTHER})


def test_a_slow_connection_that_moves_fails_nothing_and_a_silent_one_does(sized):
    book = OfferBook(64 * MB)
    for n in range(20):
        book.open(HERE, sized(n, 30 * MB), 10.0, 0.0)
    book.connected(AT, 0.0)
    flush(book, AT, 0.0)
    now = 0.0
    for n in range(10):
        now += 15.0  # 2 MB/s
        assert book.overdue(now, {AT}) == []
        say(book, n, AnswerKind.RECEIVED, now)
        flush(book, AT, now)
    silent_until = now + 10.0 + 60.0  # a MiB a second is the least that is no silence
    assert book.overdue(silent_until - 0.1, {AT}) == []
    late = []
    while now < silent_until + 120.0:
        now += 1.0
        for offer in book.overdue(now, {AT}):
            assert book.give_up(offer, now).code is ErrorCode.HANDOFF_TIMEOUT
            late.append(offer.key)
    assert set(late) == {key(n) for n in range(10, 20)}, "and those that decode has wait on"
    assert book.n_open == 10


def test_without_a_connection_an_offer_ends_at_its_deadline_whatever_its_size(sized):
    book = OfferBook(64 * MB)
    book.open(HERE, sized(1, 60 * MB), 10.0, 0.0)
    assert book.next_event_at() == 10.0
    assert [offer.key for offer in book.overdue(10.0, ())] == [key(1)]


def test_a_broken_connection_sends_all_again_in_order_and_time_begins_anew(sized):
    book = OfferBook(100 * MB)
    for n in range(4):
        book.open(HERE, sized(n, 40 * MB), 10.0, 0.0)
    book.connected(AT, 0.0)
    assert flush(book, AT, 0.0) == [key(0), key(1)]
    say(book, 1, AnswerKind.RECEIVED, 1.0)
    assert flush(book, AT, 1.0) == [key(2)]
    book.connection_lost(AT, 8.0)
    assert book.flying_bytes == 0
    assert book.overdue(17.9, ()) == []
    book.connected(AT, 17.9)
    assert flush(book, AT, 17.9) == [key(0), key(1)]
    for n in (0, 1):
        say(book, n, AnswerKind.IMPORTED, 18.0)
    assert flush(book, AT, 18.0) == [key(2), key(3)]


def test_a_cancelled_offers_bytes_count_until_decode_has_them(sized):
    book = OfferBook(50 * MB)
    book.open(HERE, sized(1, 40 * MB), 10.0, 0.0)
    book.open(HERE, sized(2, 40 * MB), 10.0, 0.0)
    assert flush(book, AT, 0.0) == [key(1)]
    book.cancel(key(1))
    assert flush(book, AT, 0.1) == [], "the socket is still full of it"
    assert say(book, 1, AnswerKind.RECEIVED, 2.0) is None
    assert flush(book, AT, 2.0) == [key(2)]
    book.cancel(key(2))
    say(book, 2, AnswerKind.RECEIVED, 3.0)
    assert book.addresses() == frozenset()


def test_decode_is_silent_about_an_offer_after_a_second_and_what_its_bytes_take(sized):
    book = OfferBook(64 * MB)
    assert not book.is_unanswered(key(1), 99.0), "it is none"
    book.open(HERE, sized(1, 32 * MB), 10.0, 5.0)
    book.open(HERE, sized(2, 48 * MB), 10.0, 6.0)
    flush(book, AT, 6.0)
    assert [book.is_unanswered(key(1), now) for now in (7.9, 8.0)] == [False, True]
    assert [book.is_unanswered(key(2), now) for now in (11.9, 12.0)] == [False, True]
    say(book, 1, AnswerKind.RECEIVED, 20.0)
    assert not book.is_unanswered(key(1), 1000.0), "decode has it: the rest is its own line"
    assert [book.is_unanswered(key(2), now) for now in (23.9, 24.0)] == [False, True]


def test_an_offer_whose_connection_broke_is_unanswered_until_decode_has_it(sized):
    book = OfferBook(64 * MB)
    for n in (1, 2):
        book.open(HERE, sized(n, 1), 10.0, 0.0)
    flush(book, AT, 0.0)
    say(book, 1, AnswerKind.RECEIVED, 0.1)
    book.connection_lost(AT, 0.2)
    assert all(book.is_unanswered(key(n), 0.2) for n in (1, 2))
    book.connected(AT, 0.3)
    flush(book, AT, 0.3)
    say(book, 2, AnswerKind.RECEIVED, 0.4)
    assert [book.is_unanswered(key(n), 0.4) for n in (1, 2)] == [True, False]


def test_what_a_turn_costs_does_not_grow_with_what_waits(sized, counted_time):
    book = OfferBook(1 << 40)
    book.connected(AT, 0.0)
    for n in range(2000):
        book.open(HERE, sized(n, 1), 1e6, 0.0)
    flush(book, AT, 0.0)
    for turn in range(100):
        assert book.next_to_send(AT, counted_time(turn)) is None
        assert book.overdue(counted_time(turn), {AT}) == []
        assert book.next_event_at() == 1e6
    assert counted_time.compared <= 200


@pytest.mark.parametrize("kind", [AnswerKind.GRANTED, AnswerKind.QUEUED])
def test_a_word_about_places_lands_no_offer(sized, kind):
    """From a decode worker that is confused, or lies: the offer is still under way."""
    book = OfferBook(MB)
    book.open(HERE, sized(1, 1000), 10.0, 0.0)
    book.connected(AT, 0.0)
    flush(book, AT, 0.0)
    assert say(book, 1, kind, 1.0) is None
    assert book.flying_bytes == 1000
    assert book.overdue(10.5, {AT}) == []
    book.connection_lost(AT, 11.0)
    assert flush(book, AT, 11.0) == [key(1)]
    assert isinstance(say(book, 1, AnswerKind.IMPORTED, 12.0), HandoffDelivered)
    assert book.addresses() == frozenset()


STEPS = st.lists(
    st.tuples(st.sampled_from("ocsalud"), st.integers(1, 5), st.sampled_from(AnswerKind)),
    max_size=60,
)


@given(STEPS)
def test_every_offer_ends_once_whatever_is_said_and_breaks(steps):
    book, now, ends = OfferBook(40), 0.0, dict[RequestKey, int]()
    opened, standing = set[RequestKey](), set[Address]()
    for what, n, kind in steps:
        now += n / 2
        target, at = (HERE, AT) if n % 2 else (THERE, OTHER)
        match what:
            case "o" if key(n) not in opened:
                state = SimpleNamespace(key=key(n))
                book.open(target, Handoff(state, (np.zeros(10 * n, np.uint8),)), 5.0, now)
                opened.add(key(n))
            case "c":
                book.cancel(key(n))
            case "s":
                flush(book, at, now)
            case "a" if say(book, n, kind, now, at) is not None:
                ends[key(n)] = ends.get(key(n), 0) + 1
            case "l":
                standing.discard(at)
                book.connection_lost(at, now)
            case "u":
                standing.add(at)
                book.connected(at, now)
            case "d":
                for offer in book.overdue(now, standing):
                    book.give_up(offer, now)
                    ends[offer.key] = ends.get(offer.key, 0) + 1
    assert set(ends.values()) <= {1}
    for at in (AT, OTHER):
        book.connection_lost(at, now)
    for offer in book.overdue(now + 1000, set()):
        book.give_up(offer, now + 1000)
    assert (book.n_open, book.flying_bytes, book.addresses()) == (0, 0, frozenset())
