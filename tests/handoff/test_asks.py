"""An ask is heard once, keeps its place over broken connections, and ends with its request."""

from __future__ import annotations

from baton_worker.handoff.api import HandoffFailed, HandoffGranted
from baton_worker.handoff.asks import AskBook
from baton_worker.handoff.frames import Answer, AnswerKind, Ask, Withdrawal
from baton_worker.handoff.offers import Address
from baton_worker.handoff.room import Wish
from baton_worker.identity import RequestKey
from baton_worker.messages import DecodeTarget
from baton_worker.records.columns import ErrorCode

DECODE, AT = DecodeTarget("decode-0", "tcp://d0:1"), Address("tcp://d0:1", "")
KEY, SECOND = RequestKey(1 << 40, 0), RequestKey((1 << 40) + 1, 0)
WISH = Wish(100, 10, -2)


def opened(*keys: RequestKey, deadline: float = 10.0) -> AskBook:
    book = AskBook()
    for one in keys:
        book.open(DECODE, one, WISH, deadline, 0.0)
    return book


def say_all(book: AskBook) -> list[Ask | Withdrawal]:
    said = []
    while (message := book.next_unsaid(AT)) is not None:
        book.said(message)
        said.append(message)
    return said


def answer(book: AskBook, kind: AnswerKind, now: float, of: RequestKey = KEY):
    return book.answer(Answer(*of, int(kind), int(ErrorCode.DECODE_FULL), "full"), now)


def test_asks_are_said_once_and_in_order():
    book = opened(KEY, SECOND)
    assert book.unsaid_at() == [AT]
    assert say_all(book) == [Ask(*KEY, 100, 10, -2), Ask(*SECOND, 100, 10, -2)]
    assert book.unsaid_at() == []


def test_a_place_may_be_long_in_coming_once_decode_has_answered():
    book = opened(KEY)
    say_all(book)
    assert answer(book, AnswerKind.QUEUED, 9.0) is None
    assert book.overdue(500.0) == []
    assert book.next_event_at() is None
    assert answer(book, AnswerKind.GRANTED, 500.0) == HandoffGranted(KEY, 500.0)
    assert answer(book, AnswerKind.GRANTED, 501.0) is None


def test_decode_is_silent_about_an_ask_after_a_second_or_when_the_connection_broke():
    book = opened(KEY, SECOND)
    say_all(book)
    assert [book.is_unanswered(KEY, now) for now in (0.9, 1.0)] == [False, True]
    answer(book, AnswerKind.QUEUED, 0.5)
    assert not book.is_unanswered(KEY, 500.0)
    assert not book.is_unanswered(RequestKey(1 << 41, 0), 500.0), "it is none"
    book.connection_lost(AT, 0.7)
    assert book.is_unanswered(KEY, 0.7)
    assert book.is_unanswered(SECOND, 0.7)
    answer(book, AnswerKind.GRANTED, 0.8)
    book.leave(SECOND, 0.8)
    assert not book.is_unanswered(KEY, 500.0)
    assert not book.is_unanswered(SECOND, 500.0), "it is over, and was counted"


def test_decodes_silence_ends_an_ask_and_decode_is_told():
    book = opened(KEY)
    say_all(book)
    assert book.overdue(9.9) == []
    (failed,) = book.overdue(10.0)
    assert (failed.key, failed.code) == (KEY, ErrorCode.HANDOFF_TIMEOUT)
    assert say_all(book) == [Withdrawal(*KEY)]
    assert book.addresses() == frozenset()


def test_an_ask_that_was_never_said_leaves_nothing_to_take_back():
    book = opened(KEY, SECOND)
    book.leave(KEY, 1.0)
    assert say_all(book) == [Ask(*SECOND, 100, 10, -2)]
    (failed,) = opened(KEY).overdue(10.0)
    assert failed.code is ErrorCode.HANDOFF_TIMEOUT


def test_a_broken_connection_is_asked_over_again():
    book = opened(KEY, SECOND)
    say_all(book)
    answer(book, AnswerKind.QUEUED, 1.0)
    answer(book, AnswerKind.GRANTED, 1.0, SECOND)
    book.connection_lost(AT, 100.0)
    assert book.overdue(109.9) == [], "its time begins when the connection ended"
    assert say_all(book) == [Ask(*KEY, 100, 10, -2)], "and a place that was granted is not asked"
    assert answer(book, AnswerKind.GRANTED, 110.0) == HandoffGranted(KEY, 110.0)


def test_decode_that_does_not_come_back_fails_who_waited_in_its_line():
    book = opened(KEY)
    say_all(book)
    answer(book, AnswerKind.QUEUED, 1.0)
    book.connection_lost(AT, 100.0)
    (failed,) = book.overdue(110.0)
    assert failed.code is ErrorCode.HANDOFF_TIMEOUT


def test_a_refusal_ends_it_with_its_code():
    book = opened(KEY)
    say_all(book)
    assert answer(book, AnswerKind.REFUSED, 1.0) == HandoffFailed(
        KEY, ErrorCode.DECODE_FULL, "full"
    )
    book.leave(KEY, 1.0)
    assert say_all(book) == []


def test_a_place_that_is_not_needed_is_given_back_whatever_was_answered():
    for kind in (None, AnswerKind.QUEUED, AnswerKind.GRANTED):
        book = opened(KEY)
        say_all(book)
        if kind is not None:
            answer(book, kind, 1.0)
        book.leave(KEY, 2.0)
        book.leave(KEY, 2.0)
        assert answer(book, AnswerKind.GRANTED, 2.0) is None, "nobody is told any more"
        assert say_all(book) == [Withdrawal(*KEY)]
        assert book.addresses() == frozenset()


def test_a_place_of_a_request_that_decode_has_is_decodes_matter():
    book = opened(KEY)
    say_all(book)
    answer(book, AnswerKind.GRANTED, 1.0)
    book.forget(KEY)
    book.leave(KEY, 2.0)
    assert say_all(book) == []
    assert book.next_event_at() is None


def test_what_cannot_be_taken_back_in_time_is_forgotten():
    book = opened(KEY)
    say_all(book)
    book.leave(KEY, 5.0)
    assert book.overdue(15.0) == []
    assert book.addresses() == frozenset()


def test_an_address_that_is_none_fails_all_that_asked_there():
    book = opened(KEY, SECOND)
    failed = book.fail(AT, "no such address")
    assert [one.key for one in failed] == [KEY, SECOND]
    assert {one.code for one in failed} == {ErrorCode.HANDOFF_PEER_LOST}
    assert book.unsaid_at() == []


def test_only_who_was_asked_can_answer():
    book = opened(KEY)
    assert book.is_for_another(KEY, Address("tcp://d1:1", ""))
    assert book.is_for_another(KEY, AT._replace(public_key="another"))
    assert not book.is_for_another(KEY, AT)
    assert not book.is_for_another(SECOND, AT)
