"""Prompts that decode computes itself get places in the order of arrival, of the same room as all
others: none of what was promised, and nothing that other senders would have had to share.
"""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_testing.processes import wait_until
from baton_worker.handoff.api import HandoffFailed, HandoffGranted
from baton_worker.handoff.places import PlaceLimits, Places, Reply
from baton_worker.handoff.room import Amount, Wish
from baton_worker.handoff.shares import OWN
from baton_worker.identity import RequestKey, make_handle
from baton_worker.records.columns import ErrorCode

WISH, OWN_WISH = Wish(10, 10), Wish(0, 10)


def key(n: int) -> RequestKey:
    return RequestKey(make_handle(3, n), 0)


def limits(slots=4, kv_tokens=1000, asks=100, queue_seconds=60.0) -> PlaceLimits:
    return PlaceLimits(slots, 1000, kv_tokens, asks, queue_seconds, Amount(2, 100, 100))


def ask(places: Places, *wanted: tuple[int, str]) -> list[int]:
    """Ask in this order, and return who has places then."""
    for n, sender in wanted:
        wish = OWN_WISH if sender == OWN else WISH
        assert places.ask(key(n), wish, 0.0, sender) is Reply.QUEUED
    return numbers(places.grant(0.0))


def numbers(keys: list[RequestKey]) -> list[int]:
    known = {key(n): n for n in range(200)}
    return [known[one] for one in keys]


def test_own_prompts_take_what_is_left_and_wait_behind_those_that_came_before():
    places = Places(limits(slots=3))
    assert ask(places, (0, "p"), (1, "p"), (2, OWN), (3, "p"), (4, OWN)) == [0, 1, 2]
    assert (places.why_waiting(key(3)), places.why_waiting(key(4))) == ("slots", "order")
    for leaving, next_one in ((2, 3), (0, 4)):
        places.leave(key(leaving))
        assert numbers(places.grant(0.0)) == [next_one]


def test_own_prompts_make_nobody_greedy_and_find_no_reserve():
    places = Places(limits(slots=4))
    assert ask(places, *((n, "p") for n in range(6))) == [0, 1, 2, 3]
    assert ask(places, (100, OWN)) == []
    assert places.why_waiting(key(100)) == "order"
    places.leave(key(0))
    assert numbers(places.grant(0.0)) == [4], "the other has no rival, whatever it holds"
    assert places.why_waiting(key(5)) == "slots"


def test_the_reserve_is_for_senders_whom_a_greedy_one_keeps_out_and_not_for_own_prompts():
    places = Places(limits(slots=4))
    assert ask(places, *((n, "greedy") for n in range(6))) == [0, 1, 2, 3]
    assert ask(places, (100, OWN)) == []
    assert ask(places, (101, "q")) == [101], "the other holds more than its share now"
    assert ask(places, (102, OWN)) == []


def test_own_prompts_need_none_of_the_memory_for_kv_that_comes():
    places = Places(PlaceLimits(4, 15, 1000, 100, 60.0))
    assert ask(places, (0, "p"), (1, OWN), (2, OWN)) == [0, 1, 2]
    assert places.awaited_bytes == 10
    assert ask(places, (3, "p")) == []
    assert sorted(numbers(places.expire(1e9))) == [0, 3], "own ones are here: none of it is late"
    assert places.n_taken == 2


def test_own_prompts_count_in_the_pool():
    places = Places(limits(kv_tokens=25))
    assert ask(places, (0, "p"), (1, OWN), (2, OWN), (3, "p")) == [0, 1]
    assert places.why_waiting(key(2)) == "tokens"
    places.leave(key(1))
    assert numbers(places.grant(0.0)) == [2]


@pytest.mark.parametrize(("n_own", "n_theirs"), [(5, 0), (5, 3), (2, 4), (1, 1)])
def test_a_full_line_makes_room_by_the_last_of_whoever_has_most_in_it(n_own, n_theirs):
    places = Places(limits(slots=1, asks=n_own + n_theirs))
    assert ask(places, (0, "p")) == [0]
    ask(places, *((n, OWN) for n in range(1, 1 + n_own)))
    ask(places, *((100 + n, "p") for n in range(n_theirs)))
    assert places.ask(key(199), WISH, 0.0, "newcomer") is Reply.FULL
    last_of_most = {(5, 0): 5, (5, 3): 5, (2, 4): 103}.get((n_own, n_theirs))
    assert places.displace("newcomer") == (last_of_most and key(last_of_most))


@given(
    st.lists(st.tuples(st.sampled_from(["ask", "own", "leave"]), st.integers(0, 50)), max_size=60),
    st.integers(1, 5),
    st.integers(10, 60),
)
def test_whoever_comes_and_goes_no_more_is_promised_than_there_is(events, slots, kv_tokens):
    places = Places(limits(slots, kv_tokens))
    arrived: list[int] = []
    placed: set[int] = set()
    for number, (event, which) in enumerate(events):
        if event == "leave":
            here = sorted({*arrived} | placed)
            if here:
                gone = here[which % len(here)]
                places.leave(key(gone))
                placed.discard(gone)
                arrived = [n for n in arrived if n != gone]
        else:
            wish, sender = (WISH, "p") if event == "ask" else (OWN_WISH, OWN)
            assert places.ask(key(number), wish, 0.0, sender) is Reply.QUEUED
            arrived.append(number)
        for one in numbers(places.grant(0.0)):
            assert one == arrived.pop(0), "in the order of arrival, whoever asks"
            placed.add(one)
        assert len(placed) <= slots
        assert len(placed) * 10 <= kv_tokens
        assert places.n_taken == len(placed)
        is_room = len(placed) < slots and (len(placed) + 1) * 10 <= kv_tokens
        assert not (arrived and is_room), "nothing is kept from who is next"


# Over the transport, whose thread has the line.


def test_an_own_ask_is_granted_in_its_turn_and_its_place_goes_back(handoff_end):
    prefill, decode = handoff_end(), handoff_end(places=limits(slots=1))
    decode.transport.ask_here(key(1), OWN_WISH)
    granted = decode.next()
    assert isinstance(granted, HandoffGranted)
    assert (granted.key, granted.kv_stays) == (key(1), False)
    prefill.transport.ask(decode.target, key(2), WISH, 60.0)
    prefill.transport.ask(decode.target, key(3), WISH, 60.0)
    n_waiting = partial(decode.value, "baton_handoff_waiting_asks")
    wait_until("both are in line", n_waiting, lambda count: count == 2)
    decode.transport.ask_here(key(4), OWN_WISH)
    decode.transport.leave(key(1))
    assert prefill.next().key == key(2)
    prefill.transport.leave(key(2))
    assert prefill.next().key == key(3)
    prefill.transport.leave(key(3))
    assert decode.next().key == key(4)
    assert decode.value("baton_handoff_own_prompts_total") == 2


def test_an_own_ask_fails_aloud_when_the_line_is_full_or_it_is_over(handoff_end):
    decode = handoff_end(places=limits(slots=1, asks=1))
    decode.transport.leave(key(9))
    for n in (1, 2, 3, 9):
        decode.transport.ask_here(key(n), OWN_WISH)
    events = [decode.next() for _ in range(3)]
    assert isinstance(events[0], HandoffGranted)
    failed = {one.key: one.code for one in events if isinstance(one, HandoffFailed)}
    assert failed == {key(3): ErrorCode.DECODE_FULL, key(9): ErrorCode.HANDOFF_REFUSED}
    assert decode.value("baton_handoff_places_held_up_total", reason="line") == 1


def test_an_own_ask_that_makes_room_in_a_full_line_fails_aloud(handoff_end):
    prefill, decode = handoff_end(), handoff_end(places=limits(slots=1, asks=3))
    for n in (1, 2, 3, 4):
        decode.transport.ask_here(key(n), OWN_WISH)
    assert decode.next().key == key(1)
    prefill.transport.ask(decode.target, key(5), WISH, 60.0)
    failed = decode.next()
    assert isinstance(failed, HandoffFailed)
    assert (failed.key, failed.code) == (key(4), ErrorCode.DECODE_FULL)
    for n in (1, 2, 3):
        decode.transport.leave(key(n))
    assert {decode.next().key, decode.next().key} == {key(2), key(3)}
    granted = prefill.next()
    assert isinstance(granted, HandoffGranted)
    assert granted.key == key(5)


def test_an_own_ask_that_waits_too_long_fails_and_one_that_left_says_nothing(handoff_end):
    decode = handoff_end(places=limits(slots=1, queue_seconds=0.2))
    for n in (1, 2, 3):
        decode.transport.ask_here(key(n), OWN_WISH)
    assert decode.next().key == key(1)
    decode.transport.leave(key(2))
    failed = decode.next()
    assert (failed.key, failed.code) == (key(3), ErrorCode.DECODE_FULL)
    assert decode.value("baton_handoff_places_taken") == 1
    decode.transport.leave(key(1))
    decode.transport.ask_here(key(5), OWN_WISH)
    assert decode.next().key == key(5), "and nothing of who left"
    assert decode.transport._receiver._own_asked_at == {}
