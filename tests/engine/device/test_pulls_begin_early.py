"""A pull gives the driver a few copies first, so that they run while the rest is given."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from baton_worker.engine.backends.torch.peer_memory import (
    FIRST_CALL,
    LATER_CALL_TIMES,
    calls_of,
)


@given(st.integers(0, 3000))
def test_each_piece_is_in_one_call_and_none_is_empty(count: int) -> None:
    pieces = np.arange(3 * count, dtype=np.int64).reshape(count, 3)
    calls = list(calls_of(pieces))
    assert all(len(call) for call in calls)
    assert np.array_equal(np.concatenate([pieces[:0], *calls]), pieces)


@given(st.integers(1, 3000))
def test_a_call_has_at_most_three_times_the_one_before(count: int) -> None:
    sizes = [len(call) for call in calls_of(np.zeros((count, 3), np.int64))]
    assert sizes[0] == min(count, FIRST_CALL)
    for before, call in pairwise(sizes):
        assert before < call <= LATER_CALL_TIMES * before or call == sizes[-1]
