"""No sender of KV keeps decode from the others, and none is hindered while nobody is."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from baton_worker.handoff.places import PlaceLimits, Places, Reply
from baton_worker.handoff.room import NOTHING, Amount, Room, Wish
from baton_worker.handoff.shares import TOLERANCE, Shares
from baton_worker.identity import RequestKey, make_handle

WISH = Wish(10, 10)
RESERVE = Amount(2, 100, 100)


def key(n: int) -> RequestKey:
    return RequestKey(make_handle(3, n), 0)


def keys(*numbers: int) -> list[RequestKey]:
    return [key(n) for n in numbers]


def book(
    slots=8, receive_bytes=1000, kv_tokens=1000, asks=100, reserve: Amount = RESERVE
) -> Places:
    return Places(PlaceLimits(slots, receive_bytes, kv_tokens, asks, 60.0, reserve))


def asked(places: Places, sender: str, numbers: range, wish: Wish = WISH) -> list[RequestKey]:
    """Let a sender ask, and return what was granted then."""
    for n in numbers:
        assert places.ask(key(n), wish, 0.0, sender) is Reply.QUEUED
    return places.grant(0.0)


def test_one_sender_alone_may_have_all_but_the_reserve():
    places = book(slots=8)
    assert asked(places, "a", range(20)) == keys(*range(8))
    assert places.why_waiting(key(8)) == "slots"
    assert places.why_waiting(key(9)) == "order"


def test_a_newcomer_finds_the_reserve_and_then_goes_before_who_has_too_much():
    places = book(slots=8)
    asked(places, "greedy", range(20))
    assert asked(places, "honest", range(100, 110)) == [key(100)], "one, while it holds nothing"
    assert places.why_waiting(key(8)) == "share"
    order = []
    for n in range(8):
        places.leave(key(n))
        order += places.grant(0.0)
    honest, greedy = order.count, [one for one in order if one in keys(*range(8, 20))]
    assert order[:3] == keys(101, 102, 103), "then it holds 5 of 8, which is 1/2 + 1/8"
    assert greedy == keys(8, 9, 10, 11, 12), "its own order stays, and it is not shut out"
    assert honest(key(104)) == 0


def test_the_reserve_stays_while_nobody_has_too_much():
    """Many honest senders: that one of them holds nothing changes nobody's order."""
    places = book(slots=4)
    for n, sender in enumerate("abcdefg"):
        places.ask(key(n), WISH, 0.0, sender)
    assert places.grant(0.0) == keys(0, 1, 2, 3)
    places.leave(key(2))
    assert places.grant(0.0) == [key(4)]


def test_senders_as_uneven_as_chance_makes_them_are_served_in_the_order_of_arrival():
    places = book(slots=16)
    for n in range(9):
        places.ask(key(n), WISH, 0.0, "a")
    for n in range(9, 16):
        places.ask(key(n), WISH, 0.0, "b")
    for n in range(16, 24):
        places.ask(key(n), WISH, 0.0, "ab"[n % 2])
    served = places.grant(0.0)
    for n in range(8):
        places.leave(key(2 * n))
        served += places.grant(0.0)
    assert served == keys(*range(24))


@pytest.mark.parametrize(
    "wish", [Wish(10, 10, priority=-(2**31)), Wish(10, 10, turn=1)], ids=["priority", "turn"]
)
def test_neither_urgency_nor_an_early_number_takes_more_than_the_share(wish):
    places = book(slots=8)
    asked(places, "greedy", range(20), wish)
    asked(places, "honest", range(100, 110))
    places.leave(key(0))
    assert places.grant(0.0) == [key(101)]


@pytest.mark.parametrize("wish", [Wish(300, 1), Wish(1, 300)], ids=["bytes", "tokens"])
def test_a_share_counts_what_is_held_most_of(wish):
    places = book(slots=100)
    assert asked(places, "greedy", range(5), wish) == keys(0, 1, 2)
    small = wish._replace(kv_bytes=wish.kv_bytes // 3, n_tokens=wish.n_tokens // 3 or 1)
    assert asked(places, "honest", range(100, 105), small)
    assert places.why_waiting(key(3)) == "share"


def test_one_huge_request_keeps_nobody_out():
    places = book()
    assert asked(places, "greedy", range(2), Wish(1 << 48, 1 << 24)) == [key(0)]
    assert asked(places, "honest", range(100, 102)) == [key(100)]
    places.leave(key(100))
    assert places.grant(0.0) == [key(101)]


def test_without_a_reserve_a_newcomer_is_the_next():
    places = book(slots=2, reserve=NOTHING)
    asked(places, "greedy", range(5))
    assert asked(places, "honest", range(100, 101)) == []
    places.leave(key(0))
    assert places.grant(0.0) == [key(100)]


def test_what_only_one_sender_wants_it_gets_whatever_it_holds():
    places = book(slots=8)
    asked(places, "greedy", range(20))
    assert asked(places, "honest", range(100, 101)) == [key(100)]
    places.leave(key(0))
    assert places.grant(0.0) == [key(8)], "the other wants no more than it has"


def test_the_last_of_who_fills_the_line_makes_room_for_another():
    places = book(slots=1, asks=4, reserve=NOTHING)
    asked(places, "greedy", range(1))
    asked(places, "greedy", range(1, 5))
    assert places.ask(key(5), WISH, 0.0, "greedy") is Reply.FULL
    assert places.displace("greedy") is None
    assert places.ask(key(100), WISH, 0.0, "honest") is Reply.FULL
    assert places.displace("honest") == key(4)
    places.turn_away(key(4))
    assert places.ask(key(100), WISH, 0.0, "honest") is Reply.QUEUED
    assert places.displace("honest") == key(3)
    places.turn_away(key(3))
    assert places.ask(key(101), WISH, 0.0, "honest") is Reply.QUEUED
    assert places.displace("honest") is None, "two each"


def test_kv_that_never_asked_gets_no_more_than_the_share_of_its_sender():
    places = book(slots=8, receive_bytes=80, reserve=Amount(2, 20, 100))
    for n in range(8):
        assert places.arrive(key(n), WISH, "greedy") is Reply.GRANTED
    assert asked(places, "honest", range(100, 101)) == [key(100)]
    places.imported(key(0))
    assert places.arrive(key(8), WISH, "greedy") is Reply.FULL
    places.leave(key(100))
    assert places.arrive(key(9), WISH, "greedy") is Reply.GRANTED, "it is alone again"


def test_kv_that_never_asked_has_an_end_though_it_is_small():
    places = book(slots=2, asks=3, receive_bytes=1 << 30, reserve=Amount(1, 1, 1))
    replies = [places.arrive(key(n), Wish(1, 1), "a") for n in range(7)]
    assert replies == [Reply.GRANTED] * 6 + [Reply.FULL]


def shares(slots=1000, **held: tuple[Wish, ...]) -> Shares:
    """Return what senders hold of so many slots, 1000 bytes and 1000 tokens."""
    found = Shares(Room(Amount(slots, 1000, 1000)))
    for sender, wishes in held.items():
        for wish in wishes:
            found.took(sender, wish)
    return found


@pytest.mark.parametrize(
    ("bound", "one_more"),
    [
        ((Wish(0, 0),) * 625, Wish(0, 0)),
        ((Wish(625, 0), Wish(0, 0)), Wish(1, 0)),
        ((Wish(0, 625), Wish(0, 0)), Wish(0, 1)),
    ],
    ids=["slots", "bytes", "tokens"],
)
def test_of_two_senders_each_may_have_five_eighths_to_the_last(bound, one_more):
    """A half, and the eighth that is let pass."""
    *before, last = bound
    assert not shares(a=tuple(before), b=(Wish(0, 0),)).exceeds("a", last)
    at_the_bound = shares(a=bound, b=(Wish(0, 0),))
    assert at_the_bound.exceeds("a", one_more)
    assert not at_the_bound.is_anybody_greedy()
    assert shares(a=(*bound, one_more), b=(Wish(0, 0),)).is_anybody_greedy()


def test_one_slot_is_nobodys_excess_and_two_may_be():
    one = (Wish(0, 0),)
    assert not shares(slots=2, a=one, b=one, c=one).is_anybody_greedy()
    assert shares(slots=3, a=one * 2, b=one).is_anybody_greedy()


@pytest.mark.parametrize(("n_in_line", "makes_room"), [(1, False), (2, True)])
def test_a_newcomer_makes_room_in_a_line_where_another_has_two(n_in_line, makes_room):
    places = book(slots=1, asks=n_in_line, reserve=NOTHING)
    asked(places, "a", range(1))
    asked(places, "a", range(1, 1 + n_in_line))
    assert places.displace("newcomer") == (key(n_in_line) if makes_room else None)


@dataclass
class Request:
    sender: str
    wish: Wish
    has_place: bool = False
    is_imported: bool = False


class SharesMachine(RuleBasedStateMachine):
    """Senders ask, take and give back as they like; each grant is held against the definition."""

    slots, receive_bytes, kv_tokens = 8, 160, 400
    reserve = Amount(2, 40, 100)
    senders = st.sampled_from("abc")
    numbers = st.integers(1, 30)

    def __init__(self) -> None:
        super().__init__()
        self.places = Places(
            PlaceLimits(self.slots, self.receive_bytes, self.kv_tokens, 12, 1e9, self.reserve)
        )
        self.requests: dict[RequestKey, Request] = {}
        self.next_number = 100

    def part(self, sender: str, wish: Wish) -> float:
        """What part of all a sender would hold with a wish more, of what it holds most of."""
        held = [r for r in self.requests.values() if r.sender == sender and r.has_place]
        memory = sum(r.wish.kv_bytes for r in held if not r.is_imported) + wish.kv_bytes
        pool = sum(r.wish.n_tokens for r in held) + wish.n_tokens
        slots = len(held) + 1
        return max(slots / self.slots, memory / self.receive_bytes, pool / self.kv_tokens)

    def exceeds(self, sender: str, wish: Wish) -> bool:
        """Whether a sender with a place would have more than its share and the tolerance."""
        here = {r.sender for r in self.requests.values()}
        has_place = any(r.has_place for r in self.requests.values() if r.sender == sender)
        return has_place and len(here) > 1 and self.part(sender, wish) > 1 / len(here) + TOLERANCE

    def is_greedy(self, sender: str) -> bool:
        """Whether it has more now, and more than one place or too much memory or pool."""
        here = {r.sender for r in self.requests.values()}
        held = [r for r in self.requests.values() if r.sender == sender and r.has_place]
        slots = len(held) / self.slots if len(held) > 1 else 0
        memory = sum(r.wish.kv_bytes for r in held if not r.is_imported) / self.receive_bytes
        pool = sum(r.wish.n_tokens for r in held) / self.kv_tokens
        return len(here) > 1 and max(slots, memory, pool) > 1 / len(here) + TOLERANCE

    def firsts(self) -> list[tuple[RequestKey, str]]:
        """Return the first in line of each sender, in the order of arrival."""
        found: dict[str, RequestKey] = {}
        for one in self.waiting():
            found.setdefault(self.requests[one].sender, one)
        return [(one, sender) for sender, one in found.items()]

    def holds(self, sender: str) -> bool:
        return any(r.has_place for r in self.requests.values() if r.sender == sender)

    def waiting(self) -> list[RequestKey]:
        return [one for one, request in self.requests.items() if not request.has_place]

    @rule(sender=senders, size=st.integers(1, 60), tokens=st.integers(1, 90))
    def ask(self, sender, size, tokens):
        self.next_number += 1
        one = key(self.next_number)
        wish = Wish(size, tokens)
        reply = self.places.ask(one, wish, 0.0, sender)
        if reply is Reply.FULL:
            last = self.places.displace(sender)
            counts = [self.requests[w].sender for w in self.waiting()]
            most = max(map(counts.count, "abc"))
            assert (last is None) == (counts.count(sender) + 1 >= most)
            if last is None:
                return
            assert counts.count(self.requests.pop(last).sender) == most
            self.places.turn_away(last)
            reply = self.places.ask(one, wish, 0.0, sender)
        assert reply is Reply.QUEUED
        self.requests[one] = Request(sender, wish)

    @rule()
    def grant(self):
        for one in self.places.grant(0.0):
            within = [
                w for w, sender in self.firsts() if not self.exceeds(sender, self.requests[w].wish)
            ]
            if one in dict(self.firsts()) and one in within:
                is_new = not self.holds(self.requests[one].sender)
                assert one == within[0] or is_new, "the order of arrival"
            else:
                assert not within, "more than its share, while others want theirs"
            self.requests[one].has_place = True
        self.nothing_is_kept_that_somebody_may_have()

    def nothing_is_kept_that_somebody_may_have(self) -> None:
        held = [r for r in self.requests.values() if r.has_place]
        waiting = [self.requests[w] for w in self.waiting()]
        memory = sum(r.wish.kv_bytes for r in held if not r.is_imported)
        pool = sum(r.wish.n_tokens for r in held)
        assert not waiting or held
        assert not waiting or not all(
            len(held) < self.slots
            and memory + w.wish.kv_bytes <= self.receive_bytes
            and pool + w.wish.n_tokens <= self.kv_tokens
            for w in waiting
        )
        empty = {r.sender for r in waiting} - {r.sender for r in held}
        if empty and any(map(self.is_greedy, "abc")):
            assert len(held) > len(empty), "the reserve was left to nobody"
            assert self.places._reserve.n_taken, "a newcomer waits"

    @rule(one=numbers)
    def take_in(self, one):
        placed = [k for k, r in self.requests.items() if r.has_place and not r.is_imported]
        if placed:
            chosen = placed[one % len(placed)]
            assert self.places.arrive(chosen, self.requests[chosen].wish) is Reply.GRANTED
            self.places.imported(chosen)
            self.requests[chosen].is_imported = True

    @rule(one=numbers)
    def leave(self, one):
        here = [*self.requests]
        if here:
            chosen = here[one % len(here)]
            self.places.leave(chosen)
            del self.requests[chosen]

    @invariant()
    def it_counts_right(self):
        held = [r for r in self.requests.values() if r.has_place]
        assert self.places.n_taken == len(held) <= self.slots + self.reserve.slots
        assert self.places.n_waiting == len(self.requests) - len(held)
        awaited = sum(r.wish.kv_bytes for r in held if not r.is_imported)
        assert self.places.awaited_bytes == awaited
        assert awaited <= self.receive_bytes + self.reserve.kv_bytes + 60

    def teardown(self):
        for one in [*self.requests]:
            self.places.leave(one)
        assert self.places.awaited_bytes == self.places.n_taken == self.places.n_waiting == 0
        assert not self.places._shares.senders, "who has left is remembered for nothing"


SharesMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=60)
TestShares = SharesMachine.TestCase
