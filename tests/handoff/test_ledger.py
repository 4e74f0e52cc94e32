"""The ledger makes the order of Reserve, handoff and Abort irrelevant, and never over-promises."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton_worker.handoff.ledger import HandoffLedger, OfferVerdict
from baton_worker.identity import RequestKey, make_handle

KEY = RequestKey(make_handle(3, 1), 0)


@pytest.fixture
def ledger() -> HandoffLedger:
    return HandoffLedger(capacity=2, memory_seconds=20.0)


def test_a_reserved_handoff_is_admitted_once_and_a_repeat_is_known(ledger):
    assert ledger.reserve(KEY, 5.0, now=0.0)
    assert ledger.arrive(KEY, now=1.0) is OfferVerdict.ADMIT
    assert ledger.arrive(KEY, now=1.1) is OfferVerdict.ALREADY_PENDING
    ledger.imported(KEY, now=1.2)
    assert ledger.arrive(KEY, now=2.0) is OfferVerdict.ALREADY_IMPORTED
    assert ledger.n_open == 0


def test_a_handoff_that_outruns_its_reservation_is_admitted(ledger):
    assert ledger.arrive(KEY, now=0.0) is OfferVerdict.ADMIT
    assert ledger.reserve(KEY, 5.0, now=0.1)
    ledger.expire(now=100.0)
    assert ledger.arrive(KEY, now=100.0) is OfferVerdict.ALREADY_PENDING


def test_a_handoff_after_its_abort_is_turned_away(ledger):
    ledger.reserve(KEY, 5.0, now=0.0)
    ledger.abort(KEY, now=0.5)
    assert ledger.arrive(KEY, now=1.0) is OfferVerdict.ABORTED
    ledger.close(KEY, now=2.0)
    assert ledger.arrive(KEY, now=3.0) is OfferVerdict.CLOSED


def test_what_failed_here_is_no_abort_because_one_follows(ledger):
    ledger.reserve(KEY, 5.0, now=0.0)
    assert ledger.expire(now=5.0) == (KEY,)
    ledger.abort(KEY, now=6.0)
    assert ledger.arrive(KEY, now=7.0) is OfferVerdict.CLOSED


def test_what_was_refused_for_want_of_room_is_that_behind_an_abort_too(ledger):
    for n in range(3):
        ledger.reserve(RequestKey(n, 0), 5.0, now=0.0)
    ledger.abort(RequestKey(2, 0), now=1.0)
    assert ledger.arrive(RequestKey(2, 0), now=2.0) is OfferVerdict.FULL


def test_a_reservation_without_a_handoff_expires_once_and_stays_closed(ledger):
    ledger.reserve(KEY, 5.0, now=0.0)
    assert ledger.expire(now=4.9) == ()
    assert ledger.expire(now=5.0) == (KEY,)
    assert ledger.expire(now=5.1) == ()
    assert ledger.arrive(KEY, now=6.0) is OfferVerdict.CLOSED


def test_only_a_pending_handoff_is_given_up_and_a_repeat_is_turned_away(ledger):
    assert not ledger.give_up(KEY, 0.0)
    ledger.reserve(KEY, 10.0, 0.0)
    assert not ledger.give_up(KEY, 0.0)
    ledger.arrive(KEY, 1.0)
    assert ledger.give_up(KEY, 2.0)
    assert ledger.n_open == 0
    assert ledger.arrive(KEY, 3.0) is OfferVerdict.CLOSED


def test_everything_is_forgotten_in_the_end(ledger):
    ledger.reserve(KEY, 5.0, now=0.0)
    ledger.arrive(KEY, now=1.0)
    ledger.imported(KEY, now=1.0)
    ledger.expire(now=21.0)
    assert ledger.n_entries == 0


def test_a_full_ledger_refuses_reservations_and_unreserved_handoffs(ledger):
    keys = [RequestKey(make_handle(3, i), 0) for i in range(3)]
    assert [ledger.reserve(key, 5.0, now=0.0) for key in keys] == [True, True, False]
    assert ledger.arrive(keys[2], now=0.0) is OfferVerdict.FULL
    assert ledger.arrive(keys[0], now=0.0) is OfferVerdict.ADMIT


def test_a_place_that_was_refused_is_not_given_when_another_becomes_free(ledger):
    keys = [RequestKey(make_handle(3, i), 0) for i in range(3)]
    for key in keys:
        ledger.reserve(key, 5.0, now=0.0)
    ledger.close(keys[0], now=1.0)
    assert ledger.arrive(keys[2], now=1.0) is OfferVerdict.FULL
    assert ledger.n_open == 1


def test_a_refusal_is_forgotten_like_everything(ledger):
    ledger.refuse(KEY, now=0.0)
    assert ledger.knows(KEY)
    assert ledger.expire(now=20.0) == ()
    assert not ledger.knows(KEY)


def test_a_lost_gateways_reservations_are_found(ledger):
    other = RequestKey(make_handle(4, 1), 0)
    ledger.reserve(KEY, 5.0, now=0.0)
    ledger.reserve(other, 5.0, now=0.0)
    assert ledger.reserved_by(3) == (KEY,)
    ledger.arrive(KEY, now=1.0)
    assert ledger.reserved_by(3) == ()


def test_a_turn_looks_at_what_is_due_and_not_at_all_that_is_remembered(counted_time):
    ledger = HandoffLedger(capacity=2, memory_seconds=60.0)
    counted_time.compared = 0
    for n in range(60_000):
        ledger.close(RequestKey(make_handle(3, n), 0), now=n * 0.001)
        ledger.expire(counted_time(n * 0.001))
    assert counted_time.compared <= 2 * 60_000, "one look at the next, whatever is remembered"
    counted_time.compared = 0
    assert ledger.expire(counted_time(60.0095)) == ()
    assert ledger.n_entries == 60_000 - 10
    assert counted_time.compared <= 20


def test_what_was_put_again_is_due_at_its_last_time_alone():
    ledger = HandoffLedger(capacity=2, memory_seconds=20.0)
    for n in range(1000):
        ledger.close(KEY, now=float(n))
    ledger.expire(now=1000.0)
    assert ledger.knows(KEY)
    ledger.expire(now=1019.0)
    assert not ledger.knows(KEY)


class LedgerMachine(RuleBasedStateMachine):
    """A key is admitted at most once while it is remembered, and the capacity always holds."""

    keys = st.integers(1, 5).map(lambda i: RequestKey(make_handle(1, i), 0))

    def __init__(self) -> None:
        super().__init__()
        self.ledger = HandoffLedger(capacity=3, memory_seconds=1e9)
        self.now = 0.0
        self.admitted: set[RequestKey] = set()
        self.pending: set[RequestKey] = set()
        self.refused: set[RequestKey] = set()

    @rule(key=keys, deadline=st.floats(0.1, 5))
    def reserve(self, key, deadline):
        if not self.ledger.reserve(key, deadline, self.now):
            self.refused.add(key)

    @rule(key=keys)
    def arrive(self, key):
        if self.ledger.arrive(key, self.now) is OfferVerdict.ADMIT:
            assert key not in self.admitted
            assert key not in self.refused
            self.admitted.add(key)
            self.pending.add(key)

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def finish(self, data):
        key = data.draw(st.sampled_from(sorted(self.pending)))
        self.pending.discard(key)
        data.draw(st.sampled_from([self.ledger.imported, self.ledger.close]))(key, self.now)

    @rule(seconds=st.floats(0.1, 10))
    def pass_time(self, seconds):
        self.now += seconds
        self.ledger.expire(self.now)

    @invariant()
    def capacity_holds(self):
        assert 0 <= self.ledger.n_open <= 3
        assert self.ledger.n_open >= len(self.pending)


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_handoff_waits_for_ten_minutes_unless_told_otherwise() -> None:
    ledger = HandoffLedger(capacity=1, memory_seconds=1.0)
    assert ledger.arrive(KEY, 0.0) is OfferVerdict.ADMIT
    assert ledger.expire(599.5) == ()
    assert ledger.expire(600.0) == (KEY,)
