"""What the overload measurement makes of what it saw, on histories whose answer is known."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_faults import pace
from baton_faults.load import Log
from baton_faults.ordinary import Wrong, percentile
from baton_faults.saturation import overtaken_most


@given(st.permutations(range(12)))
def test_overtaking_counts_later_requests_that_were_told_before(order: list[int]) -> None:
    log = Log()
    for number, place in enumerate(order):
        log.asked_at[str(number)] = number
        log.first_at[str(number)] = place
    log.asked_at["never told"] = 5.5
    passed = [sum(later < place for later in order[n:]) for n, place in enumerate(order)]
    assert overtaken_most(log) == max(passed)


def test_gaps_are_those_between_one_workers_steps_in_the_time_that_is_asked_for(
    tmp_path: Path,
) -> None:
    journal = tmp_path / "pace"
    lines = [(10, "decode-0", 8), (12, "prefill-0", 9), (20, "decode-0", 19), (21, "lag", 7),
             (30, "decode-0", 24), (40, "decode-0", 39), (41, "lag", 3)]  # fmt: skip
    text = "".join(f"{at} {what} {value}\n" for at, what, value in lines)
    journal.write_text(text + "42 decode-0 4")
    found = pace.within(pace.read(journal), "decode-0", 10, 40)
    assert found.gaps == pytest.approx([11e-9, 5e-9])
    assert found.lags == pytest.approx([7e-9])


def test_a_percentile_is_a_value_that_was_seen() -> None:
    assert [percentile([3.0, 1.0, 2.0], share) for share in (0.0, 0.5, 0.99)] == [1.0, 2.0, 3.0]


def test_a_request_that_did_not_end_whole_is_told() -> None:
    log, wrong = Log(), Wrong()
    log.asked("a", (1, 2))
    log.tokens("a", 0, (1,))
    log.ended("a", "worker_lost", "it went away")
    assert wrong.judge("floods", log) == 1
    assert wrong.problems == ["floods: a: worker_lost: it went away"]
