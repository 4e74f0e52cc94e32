"""Decode promises no more than it has, in the order of arrival, and gives back what has left."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from baton_worker.config import EngineConfig, HandoffConfig, ModelConfig, ProcessConfig
from baton_worker.engine.scheduling.waiting_queue import MAX_OVERTAKEN
from baton_worker.handoff.places import PlaceLimits, Places, Reply
from baton_worker.handoff.room import Amount, Wish
from baton_worker.identity import RequestKey, make_handle


def key(n: int, gateway: int = 3, attempt: int = 0) -> RequestKey:
    return RequestKey(make_handle(gateway, n), attempt)


def book(slots=2, receive_bytes=1000, kv_tokens=1000, asks=100, queue_seconds=60.0) -> Places:
    return Places(PlaceLimits(slots, receive_bytes, kv_tokens, asks, queue_seconds))


WISH = Wish(100, 10)


def ask_all(places: Places, *keys: RequestKey, wish: Wish = WISH) -> None:
    for one in keys:
        assert places.ask(one, wish, 0.0) is Reply.QUEUED


def test_slots_are_granted_in_the_order_of_arrival_and_again_as_requests_leave():
    places = book(slots=2)
    ask_all(places, *map(key, range(5)))
    assert places.grant(0.0) == [key(0), key(1)]
    assert places.grant(0.0) == []
    places.leave(key(1))
    assert places.grant(0.0) == [key(2)]
    places.leave(key(0))
    places.leave(key(2))
    assert places.grant(0.0) == [key(3), key(4)]


@pytest.mark.parametrize(
    ("max_running", "max_waiting", "ahead", "slots", "spare"),
    [
        (32, 1024, 8, 40, 5),
        (4, 1024, 8, 8, 1),
        (3, 1024, 8, 6, 0),
        (32, 10, 8, 40, 2),
        (32, 3, 8, 35, 0),
        (32, 1024, 0, 32, 4),
    ],
)
def test_no_more_are_promised_ahead_than_the_engine_takes(
    max_running, max_waiting, ahead, slots, spare
):
    config = ProcessConfig(
        model=ModelConfig("m"),
        engine=EngineConfig(max_running=max_running, max_waiting=max_waiting, block_size=8),
        handoff=HandoffConfig(ahead_requests=ahead, receive_bytes=72, queue_seconds=9.0),
    )
    asks = max_running + max_waiting
    kept = 9 if spare else 0
    reserve = Amount(spare, kept, 100)
    assert PlaceLimits.of(config, 100) == PlaceLimits(slots, 72 - kept, 800, asks, 9.0, reserve)


def test_a_slot_stays_taken_while_its_request_runs_and_its_bytes_do_not():
    places = book(slots=3, receive_bytes=150)
    ask_all(places, *map(key, range(4)))
    assert places.grant(0.0) == [key(0)], "memory for one"
    assert places.arrive(key(0), WISH) is Reply.GRANTED
    assert places.grant(0.0) == []
    places.imported(key(0))
    assert places.grant(0.0) == [key(1)]
    places.imported(key(1))
    assert places.grant(0.0) == [key(2)]
    places.imported(key(2))
    assert places.grant(0.0) == [], "all slots run"
    assert places.awaited_bytes == 0


def test_what_is_larger_than_all_memory_is_taken_alone():
    places = book(slots=4, receive_bytes=150)
    ask_all(places, key(0))
    ask_all(places, key(1), wish=Wish(10_000, 10))
    ask_all(places, key(2))
    assert places.grant(0.0) == [key(0)], "the large one is not passed by the small one behind it"
    places.imported(key(0))
    assert places.grant(0.0) == [key(1)]
    places.imported(key(1))
    assert places.grant(0.0) == [key(2)]


def test_prompts_that_the_pool_cannot_hold_together_wait():
    places = book(slots=4, kv_tokens=25)
    ask_all(places, *map(key, range(3)))
    assert places.grant(0.0) == [key(0), key(1)]
    places.imported(key(0))
    assert places.grant(0.0) == [], "an imported one holds its blocks until it leaves"
    places.leave(key(0))
    assert places.grant(0.0) == [key(2)]


@pytest.mark.parametrize(
    ("wish", "fits"), [(Wish(900, 15), True), (Wish(901, 15), False), (Wish(900, 16), False)]
)
def test_the_last_byte_and_the_last_token_are_promised_and_not_one_more(wish, fits):
    places = book(receive_bytes=1000, kv_tokens=25)
    ask_all(places, key(0))
    ask_all(places, key(1), wish=wish)
    assert places.grant(0.0) == [key(0), key(1)][: 1 + fits]


def test_who_tells_no_priority_has_the_middle_one():
    places = book(slots=3)
    ask_all(places, key(0), wish=Wish(100, 10, 0))
    ask_all(places, key(1), wish=Wish(100, 10))
    ask_all(places, key(2), wish=Wish(100, 10, 0))
    assert places.grant(0.0) == [key(0), key(1), key(2)]


def test_lower_priority_values_go_first_and_nobody_waits_for_ever():
    places = book(slots=1)
    ask_all(places, key(0))
    places.grant(0.0)
    ask_all(places, key(1), wish=WISH._replace(priority=5))
    served = [key(0)]
    for n in range(2, MAX_OVERTAKEN + 10):
        ask_all(places, key(n))
        places.leave(served[-1])
        served += places.grant(0.0)
    assert served[:3] == [key(0), key(2), key(3)]
    assert served.index(key(1)) == MAX_OVERTAKEN + 1


def test_handles_say_nothing_of_the_order():
    places = book(slots=1)
    ask_all(places, key(9), key(3, gateway=4), key(5), key(2))
    order = places.grant(0.0)
    for _ in range(3):
        places.leave(order[-1])
        order += places.grant(0.0)
    assert order == [key(9), key(3, gateway=4), key(5), key(2)]


def test_asks_that_prefill_workers_made_out_of_order_are_granted_in_the_gateways():
    places = book(slots=1)
    for n, turn in ((0, 1), (4, 5), (2, 3), (3, 4), (1, 2)):
        ask_all(places, key(n), wish=WISH._replace(turn=turn))
    order = places.grant(0.0)
    for _ in range(4):
        places.leave(order[-1])
        order += places.grant(0.0)
    assert order == [key(n) for n in range(5)]


def test_who_tells_no_turn_stands_behind_all_who_came():
    places = book(slots=2)
    ask_all(places, key(0), wish=Wish(100, 10, turn=5))
    ask_all(places, key(1), wish=Wish(100, 10))
    assert places.grant(0.0) == [key(0), key(1)]


def test_an_ask_that_is_repeated_keeps_its_place():
    places = book(slots=1)
    ask_all(places, key(0), key(1), key(2))
    assert places.grant(0.0) == [key(0)]
    assert places.ask(key(0), WISH, 1.0) is Reply.GRANTED
    assert places.ask(key(1), WISH, 1.0) is Reply.QUEUED
    assert places.n_waiting == 2
    places.leave(key(0))
    assert places.grant(1.0) == [key(1)]


def test_a_request_that_has_left_gets_no_place_any_more():
    places = book()
    places.leave(key(0))
    assert places.ask(key(0), WISH, 0.0) is Reply.OVER
    assert places.arrive(key(0), WISH) is Reply.OVER
    assert places.ask(key(0, attempt=1), WISH, 0.0) is Reply.QUEUED


def test_of_requests_that_have_left_the_last_8192_are_remembered():
    places = book()
    for n in range(8193):
        places.leave(key(n))
        assert places.ask(key(0), WISH, 0.0) is (Reply.OVER if n < 8192 else Reply.QUEUED)
    assert places.ask(key(1), WISH, 0.0) is Reply.OVER


def test_the_line_has_an_end():
    places = book(slots=1, asks=2)
    ask_all(places, key(0), key(1))
    places.grant(0.0)
    ask_all(places, key(2))
    assert places.ask(key(3), WISH, 0.0) is Reply.FULL


def test_kv_that_never_asked_is_taken_while_there_is_memory():
    places = book(slots=1, receive_bytes=250)
    assert places.arrive(key(0), WISH) is Reply.GRANTED
    assert places.arrive(key(1), WISH) is Reply.GRANTED, "an older prefill worker knows no slots"
    assert places.arrive(key(2), WISH) is Reply.FULL
    ask_all(places, key(3))
    assert places.grant(0.0) == []
    places.leave(key(0))
    places.leave(key(1))
    assert places.grant(0.0) == [key(3)]


def test_who_is_refused_for_want_of_memory_is_in_line_no_more():
    """It came without its turn, and is told that this is the end: nothing may wait for it."""
    places = book(slots=3, receive_bytes=150)
    ask_all(places, key(0), key(1), key(2))
    assert places.grant(0.0) == [key(0)]
    assert places.arrive(key(1), WISH) is Reply.FULL
    assert places.n_waiting == 1
    places.imported(key(0))
    assert places.grant(0.0) == [key(2)], "and not whom nobody will send"
    assert places.ask(key(1), WISH, 0.0) is Reply.OVER


def test_who_is_turned_away_gives_its_place_back_unless_it_is_here():
    places = book(slots=2)
    ask_all(places, key(0), key(1), key(2))
    assert places.grant(0.0) == [key(0), key(1)]
    places.arrive(key(0), WISH)
    for one in map(key, range(4)):
        places.turn_away(one)
    assert (places.n_taken, places.n_waiting, places.awaited_bytes) == (1, 0, 100)
    assert places.arrive(key(0), WISH) is Reply.GRANTED


def test_who_waits_or_does_not_come_for_too_long_is_told_and_gives_its_place_back():
    places = book(slots=1, queue_seconds=60.0)
    ask_all(places, key(0), key(1))
    places.grant(10.0)
    assert places.expire(59.9) == []
    assert places.expire(60.0) == [key(1)], "in line since 0"
    assert places.expire(70.0) == [key(0)], "granted at 10"
    assert places.n_taken == places.n_waiting == 0
    ask_all(places, key(2))
    assert places.grant(70.0) == [key(2)]
    places.arrive(key(2), WISH)
    assert places.expire(1e9) == [], "what has come is bounded by its own queue"


class PlacesMachine(RuleBasedStateMachine):
    """Whatever comes in whatever order, nothing is promised twice and all is given back."""

    keys = st.integers(1, 8).map(key)

    def __init__(self) -> None:
        super().__init__()
        self.places = book(slots=3, receive_bytes=300, kv_tokens=60, queue_seconds=20.0)
        self.now = 0.0
        self.granted: set[RequestKey] = set()
        self.wishes: dict[RequestKey, Wish] = {}

    @rule(one=keys, size=st.integers(1, 400), priority=st.integers(-1, 1))
    def ask(self, one, size, priority):
        reply = self.places.ask(one, Wish(size, 20, priority), self.now)
        assert (reply is Reply.GRANTED) == (one in self.granted)
        if reply is Reply.QUEUED:
            self.wishes.setdefault(one, Wish(size, 20, priority))

    @rule()
    def grant(self):
        for one in self.places.grant(self.now):
            assert one in self.wishes
            assert one not in self.granted
            self.granted.add(one)
        asked = [one for one in self.wishes if one not in self.granted]
        assert not asked or self.granted, "whoever is first goes when nobody is here"

    @rule(one=keys)
    def arrive(self, one):
        reply = self.places.arrive(one, self.wishes.get(one, WISH))
        if reply is Reply.GRANTED:
            self.granted.add(one)
            self.wishes.setdefault(one, WISH)
        elif reply is Reply.FULL:
            assert one not in self.granted
            self.wishes.pop(one, None)

    @rule(one=keys)
    def turn_away(self, one):
        was_there = self.places.n_taken + self.places.n_waiting
        self.places.turn_away(one)
        if self.places.n_taken + self.places.n_waiting < was_there:
            self.granted.discard(one)
            del self.wishes[one]

    @rule(one=keys)
    def imported(self, one):
        self.places.imported(one)

    @rule(one=keys)
    def leave(self, one):
        self.places.leave(one)
        self.granted.discard(one)
        self.wishes.pop(one, None)

    @rule(seconds=st.floats(0.1, 15))
    def pass_time(self, seconds):
        self.now += seconds
        for one in self.places.expire(self.now):
            self.granted.discard(one)
            del self.wishes[one]

    @invariant()
    def it_counts_right(self):
        assert self.places.n_taken == len(self.granted)
        assert self.places.n_waiting == len(self.wishes) - len(self.granted)
        assert self.places.awaited_bytes >= 0

    def teardown(self):
        for one in map(key, range(1, 9)):
            self.places.leave(one)
        assert self.places.awaited_bytes == self.places.n_taken == self.places.n_waiting == 0
        self.places.ask(key(99), Wish(10**9, 10**9), self.now)
        assert self.places.grant(self.now) == [key(99)]


PlacesMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestPlaces = PlacesMachine.TestCase
