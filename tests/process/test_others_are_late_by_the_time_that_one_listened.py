"""Who is silent for so long as one listened is late, and nobody for what lay there unheard.

The time between looks is drawn, and with it what stood still and what did not. What was said before
a look is heard before the next one: that is all that a look promises.
"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from baton_worker.listening import ListeningClock

MOST, CATCH_UP, LIMIT = 1.0, 2.0, 2.0
NEARLY = 1e-6
PASSED = st.one_of(st.just(0.1), st.floats(0.0, MOST), st.floats(1.001, 60.0))
LOOKS = st.lists(PASSED, min_size=1, max_size=40)
PART = st.floats(0.0, 1.0)


class History:
    """What a clock said at each look, of which the first is before all that passed."""

    def __init__(self, passed, start=0.0):
        self.passed, self.clocks = passed, []
        self.nows = list(itertools.accumulate(passed, initial=start))
        self.clock = ListeningClock(start, most_seconds=MOST, catch_up_seconds=CATCH_UP)
        self.seconds, self.judged, self.was_still, self.ats = [0.0], [0.0], [False], []
        for before, now in itertools.pairwise(self.nows):
            self.ats.append([self.clock.at(before + tenth * (now - before) / 10)
                             for tenth in range(11)])  # fmt: skip
            self.was_still.append(self.clock.look(now))
            self.seconds.append(self.clock.seconds)
            self.judged.append(self.clock.judged)


AT = st.tuples(st.integers(0, 39), st.integers(0, 10))


@given(LOOKS)
def test_a_look_counts_a_second_at_most_and_readings_never_go_back(passed):
    told = History(passed)
    for (before, after), seconds in zip(itertools.pairwise(told.seconds), passed, strict=True):
        assert after - before == pytest.approx(min(seconds, MOST))
    for n, ats in enumerate(told.ats):
        steps = [told.seconds[n], *ats]
        assert all(a <= b + NEARLY for a, b in itertools.pairwise(steps))
        assert ats[-1] == pytest.approx(told.seconds[n + 1])
    assert sorted(told.judged) == told.judged
    assert all(judged <= seconds for judged, seconds in zip(told.judged, told.seconds, strict=True))
    assert told.was_still[1:] == [
        seconds > MOST for seconds in map(float.__sub__, told.nows[1:], told.nows)
    ]


@given(LOOKS, AT)
@example([1.5, 0.5] * 10, (0, 0))  # a stall every two seconds
@example([30.0] * 12, (0, 0))
def test_who_is_silent_for_its_limit_is_judged_whatever_stands_still(passed, at):
    assume(at[0] < len(passed))
    told = History(passed)
    began = told.ats[at[0]][at[1]]
    for seconds, judged in zip(told.seconds, told.judged, strict=True):
        if seconds - began >= LIMIT + CATCH_UP + 2 * MOST:
            assert judged - began >= LIMIT - NEARLY


@given(LOOKS, AT, AT)
def test_who_speaks_within_its_limit_is_judged_by_no_look_before_that_is_heard(passed, at, spoke):
    assume(at <= spoke and spoke[0] < len(passed))
    told = History(passed)
    began, ended = told.ats[at[0]][at[1]], told.ats[spoke[0]][spoke[1]]
    assume(ended - began < LIMIT)
    assert all(judged - began < LIMIT for judged in told.judged[: spoke[0] + 2])


@given(LOOKS, AT)
@example([0.1] * 19 + [30.0], (0, 0))  # a moment before its limit
def test_who_speaks_during_a_stall_is_not_blamed_for_it(passed, at):
    """Whoever was not late when it began, and waited for no longer than one stall may delay it."""
    assume(at[0] < len(passed))
    told = History(passed)
    began = told.ats[at[0]][at[1]]
    for n in range(at[0], len(passed)):
        was_late = (
            told.judged[n] - began >= LIMIT or told.seconds[n] - began >= LIMIT + CATCH_UP + MOST
        )
        if passed[n] > MOST + NEARLY and not was_late:
            assert told.judged[n + 1] - began < LIMIT


@given(st.floats(1.001, 1000.0), st.lists(st.floats(0.0, 0.3), min_size=30, max_size=60))
def test_behind_a_stall_nobody_is_judged_before_there_was_time_to_catch_up(stall, passed):
    told = History([0.1, stall, *passed])
    for seconds, judged in zip(told.seconds[2:], told.judged[2:], strict=True):
        if seconds - told.seconds[2] < CATCH_UP - NEARLY:
            assert judged <= told.seconds[1] + NEARLY, "by nothing that passed since it began"


@given(st.lists(st.floats(0.0, MOST / 2), max_size=60))
def test_without_stalls_who_is_late_is_judged_one_look_later(passed):
    told = History(passed)
    assert told.judged[1:] == told.seconds[:-1]


def test_what_was_heard_late_is_a_stall_though_looks_came_in_time():
    clock = ListeningClock(5.0, most_seconds=MOST, catch_up_seconds=CATCH_UP)
    assert not clock.look(5.1, 1.0)
    assert clock.look(5.2, 1.1)
    assert (clock.seconds, clock.judged) == (pytest.approx(5.2), 5.0)
    for n in range(3, 30):
        clock.look(5.0 + 0.1 * n)
        is_over = clock.seconds >= 5.2 + CATCH_UP
        assert clock.judged == (pytest.approx(4.9 + 0.1 * n) if is_over else 5.0)
