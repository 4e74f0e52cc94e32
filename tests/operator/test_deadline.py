"""What one look at a clock charges to a rollout, second by second."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_operator.planning.deadline import Verdict, Waited, charged, piece_seconds


@pytest.mark.parametrize(
    ("deadline", "piece"), [(1, 1), (19, 1), (20, 1), (39, 1), (40, 2), (380, 19), (400, 20)]
)
def test_a_piece_is_a_twentieth_and_no_less_than_a_second(deadline, piece):
    assert piece_seconds(deadline) == piece


def test_waiting_begins_at_the_first_look_and_the_next_is_due_when_a_piece_is_full():
    assert charged(Waited(), 100, 50.9, is_waiting=True) == Verdict(Waited(0, 50), 100, 5)


@pytest.mark.parametrize("since", [1, 1000])
def test_a_running_piece_stays_as_it_is_until_it_is_full(since):
    waited = Waited(10, since)
    for passed in range(5):
        verdict = charged(waited, 100, since + passed + 0.5, is_waiting=True)
        assert verdict == Verdict(waited, 90 - passed, 5 - passed)
    full = charged(waited, 100, since + 5, is_waiting=True)
    assert full == Verdict(Waited(15, since + 5), 85, 5)


@pytest.mark.parametrize(("now", "passed"), [(999, 0), (1000.9, 0), (1001, 1), (9999, 5)])
def test_an_end_of_waiting_charges_what_passed_and_a_piece_at_most(now, passed):
    ended = charged(Waited(10, 1000), 100, now, is_waiting=False)
    assert ended == Verdict(Waited(10 + passed), 90 - passed, None)


def test_a_clock_that_went_back_starts_the_piece_again():
    assert charged(Waited(10, 1000), 100, 999, is_waiting=True) == Verdict(Waited(10, 999), 90, 5)


@pytest.mark.parametrize(("seconds", "left"), [(97, 3), (99, 1), (100, 0), (101, -1)])
def test_the_last_look_is_due_at_the_deadline_and_a_late_one_at_once(seconds, left):
    verdict = charged(Waited(seconds), 100, 7, is_waiting=True)
    assert verdict == Verdict(Waited(seconds, 7), left, max(left, 0))


@given(
    st.integers(1, 3000),
    st.lists(st.tuples(st.integers(-500, 500), st.booleans()), max_size=30),
)
def test_no_look_charges_more_than_a_piece_and_all_no_more_than_passed(deadline, looks):
    """Wherever the clock jumps; what runs and is not full yet may be taken back by a jump."""
    waited, now, passed, piece = Waited(), 10_000, 0, piece_seconds(deadline)
    for step, is_waiting in looks:
        now, passed = now + step, passed + max(step, 0)
        verdict = charged(waited, deadline, now, is_waiting=is_waiting)
        assert waited.seconds <= verdict.waited.seconds <= min(waited.seconds + piece, passed)
        running = deadline - verdict.left_seconds - verdict.waited.seconds
        assert 0 <= running < piece
        assert (verdict.look_in_seconds is None) == (verdict.waited.since == 0) == (not is_waiting)
        waited = verdict.waited
