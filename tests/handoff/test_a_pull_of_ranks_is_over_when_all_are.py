"""Reads of several ranks are one pull: it is over when none is under way, and lost when one is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_worker.handoff.nixl_agent import NixlError
from baton_worker.handoff.nixl_pulls import _together

ENDS = st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=6)


@given(ends=ENDS)
def test_it_ends_with_the_last_and_fails_with_the_first_that_failed(
    ends: list[tuple[int, bool]],
) -> None:
    """Each read takes so many turns, and comes or fails then."""
    over: list[int] = []

    def read(number: int) -> Iterator[None]:
        turns, has_come = ends[number]
        for _ in range(turns):
            yield
        over.append(number)
        if not has_come:
            raise NixlError(str(number))

    work, failure = _together([read(number) for number in range(len(ends))]), ""
    try:
        n_turns = sum(1 for _ in work)
    except NixlError as error:
        failure = str(error)
    else:
        assert n_turns == max(turns for turns, _ in ends)
    assert sorted(over) == list(range(len(ends)))
    failed = [number for number in over if not ends[number][1]]
    assert failure == (str(failed[0]) if failed else "")


def test_nothing_to_read_is_over_at_once() -> None:
    with pytest.raises(StopIteration):
        next(iter(_together([])))
