"""An allowance that time refills: who stays within it is never cut off, who does not is at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton_worker.link.pace import Pace

A, B = b"a", b"b"


def test_one_message_beyond_the_burst_is_one_too_many() -> None:
    pace = Pace(burst=3, per_second=1.0)
    assert [pace.exceeded(A, 0.0) for _ in range(4)] == [False, False, False, True]


def test_time_refills_to_the_burst_and_no_further() -> None:
    pace = Pace(burst=2, per_second=4.0)
    assert not pace.exceeded(A, 0.0)
    assert not pace.exceeded(A, 0.0)
    assert not pace.exceeded(A, 0.25)
    assert pace.exceeded(A, 0.25)
    assert [pace.exceeded(B, at) for at in (0.0, 100.0, 100.0, 100.0)] == [False] * 3 + [True]


def test_connections_have_an_allowance_each() -> None:
    pace = Pace(burst=1, per_second=1.0)
    assert not pace.exceeded(A, 0.0)
    assert not pace.exceeded(B, 0.0)
    assert pace.exceeded(A, 0.0)


def test_no_more_connections_are_remembered_than_some() -> None:
    pace = Pace(burst=1, per_second=1e-9)
    routes = [number.to_bytes(4, "big") for number in range(4098)]
    assert not any(pace.exceeded(route, 0.0) for route in routes[:4097])
    assert pace.exceeded(routes[1], 0.0), "4,096 are remembered; who is cut off is not"
    assert not pace.exceeded(routes[4097], 0.0)
    assert pace.exceeded(routes[2], 0.0)
    assert not pace.exceeded(routes[0], 0.0), "the oldest was forgotten, and begins anew"


def test_a_connection_may_say_20_000_messages_at_once_and_4_000_a_second() -> None:
    pace = Pace()
    assert not any(pace.exceeded(A, 0.0) for _ in range(20_000))
    assert not any(pace.exceeded(A, 1.0) for _ in range(4_000))
    assert pace.exceeded(A, 1.0)
    assert not any(pace.exceeded(B, 0.0) for _ in range(20_000))
    assert pace.exceeded(B, 0.0)


@given(gaps=st.lists(st.floats(0.0, 3.0), max_size=200), burst=st.integers(1, 20))
def test_who_keeps_to_the_rate_is_never_cut_off(gaps: list[float], burst: int) -> None:
    pace, now = Pace(burst=burst, per_second=8.0), 0.0
    for gap in gaps:
        now += 0.125 + gap
        assert not pace.exceeded(A, now)


@given(gaps=st.lists(st.floats(0.0, 0.1), min_size=60, max_size=200), burst=st.integers(1, 20))
def test_nobody_says_more_than_burst_and_rate_allow(gaps: list[float], burst: int) -> None:
    pace, now = Pace(burst=burst, per_second=8.0), 0.0
    for said, gap in enumerate(gaps, 1):
        now += gap
        if pace.exceeded(A, now):
            break
        assert said <= burst + 8.0 * now + 1e-6
