"""Steps verify lookup's drafts where that emits more tokens a second, by what steps took."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_worker.engine.backends.device.pace import Pace

seconds = st.floats(1e-4, 1e-1)
each = st.floats(1.0, 6.0)


def _known(without_seconds: float, with_seconds: float, tokens_each: float = 1.0) -> Pace:
    pace = Pace()
    for _ in range(5):
        pace.note(4, False, without_seconds, tokens_each)
        pace.note(4, True, with_seconds, tokens_each + 1.0)
    return pace


@given(without=seconds, found=seconds, tokens=each, gain=st.floats(0.01, 5.0))
def test_it_is_worth_it_where_tokens_a_second_are_more(
    without: float, found: float, tokens: float, gain: float
) -> None:
    is_more = (tokens + gain) * without > tokens * found
    margin = abs((tokens + gain) * without / (tokens * found) - 1.0)
    if margin > 1e-9:
        assert _known(without, found, tokens).are_worth_rows(4, gain) == is_more


def test_without_anything_to_gain_no_rows_are_spent() -> None:
    assert not _known(1.0, 1e-9).are_worth_rows(4, 0.0)
    assert not Pace().are_worth_rows(4, 0.0)


def test_each_kind_is_tried_of_which_nothing_is_known() -> None:
    pace = Pace()
    assert pace.are_worth_rows(4, 0.5)
    pace.note(4, True, 1e-3, 1.5)
    assert not pace.are_worth_rows(4, 0.5)
    pace.note(4, False, 9e-4, 1.0)
    assert pace.are_worth_rows(4, 0.5)
    assert pace.are_worth_rows(8, 0.5), "other numbers of sequences are another matter"


def test_one_step_behind_a_rest_changes_nothing() -> None:
    pace = _known(1e-3, 1.2e-3)
    pace.note(4, True, 60.0, 1.0)
    assert pace.are_worth_rows(4, 0.5)


def test_what_was_known_long_ago_is_tried_again() -> None:
    said = [_known(1e-3, 5e-3)] * 1000
    tried = [pace.are_worth_rows(4, 0.5) for pace in said]
    runs = [len(list(run)) for worth, run in itertools.groupby(tried) if not worth]
    assert tried.count(True) == 3
    assert max(runs) == 256


@pytest.mark.parametrize("had_rows", [False, True])
def test_times_that_are_wrong_by_now_hold_for_no_more_than_two_tries(had_rows: bool) -> None:
    pace = _known(5e-3, 1e-3) if had_rows else _known(1e-3, 5e-3)
    for _ in range(2 * 257):
        worth = pace.are_worth_rows(4, 0.5)
        if worth != had_rows:  # by now the kind that is tried takes little
            pace.note(4, not had_rows, 0.4e-3, 1.0)
    assert pace.are_worth_rows(4, 0.5) != had_rows


def test_the_newest_steps_count() -> None:
    pace = _known(1e-3, 5e-3)
    for _ in range(3):
        pace.note(4, True, 1.1e-3, 1.5)
    assert pace.are_worth_rows(4, 0.5)
