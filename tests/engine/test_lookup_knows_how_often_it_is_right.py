"""What lookup proposed is judged by the tokens that came, whether a step verified it or not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_worker.engine.lookup import Lookup
from baton_worker.engine.ngram import NgramIndex, NgramSizes

SIZES = NgramSizes(1, 2)
LOOP = [4, 5, 6] * 40


def test_of_a_request_of_which_nothing_is_known_half_are_taken_to_be_right() -> None:
    lookup = Lookup(SIZES)
    assert lookup.propose([4, 5, 4], (), 3) == (5, 4, 5)
    assert lookup.gain_tokens(2) == pytest.approx(0.5**2 + 0.5**3)
    assert lookup.gain_tokens(0) == 0.0


def test_text_that_repeats_itself_is_expected_to_go_on() -> None:
    lookup = Lookup(SIZES)
    for length in range(4, len(LOOP)):
        lookup.propose(LOOP[:length], (), 3)
    assert lookup.gain_tokens(3) > 2.9


def test_text_that_seems_to_repeat_itself_and_does_not_is_expected_to_stop() -> None:
    lookup, text = Lookup(SIZES), [4]
    for other in range(10, 60):  # behind each 4 stands something else
        text += [other, 4]
        lookup.propose(text, (), 3)
    assert lookup.gain_tokens(3) < 0.01


def test_a_draft_behind_one_that_was_wrong_counts_as_wrong() -> None:
    rejected, right = Lookup(SIZES), Lookup(SIZES)
    for lookup in (rejected, right):
        assert lookup.propose([4, 5, 6, 4], (5,), 1) == (6,)
    rejected.propose([4, 5, 6, 4, 9], (), 1)
    right.propose([4, 5, 6, 4, 5, 6], (), 1)
    assert rejected.gain_tokens(1) < 0.5**2 < right.gain_tokens(1)


def test_a_proposal_is_judged_once() -> None:
    lookup = Lookup(SIZES)
    assert lookup.propose([4, 5, 4], (), 1) == (5,)
    text = [4, 5, 4, 5]
    lookup.propose(text, (), 1)
    for other in range(10, 20):  # nothing is found behind these
        text.append(other)
        lookup.propose(text, (), 1)
    assert lookup.gain_tokens(1) == pytest.approx(0.4921875**2)


@given(
    pieces=st.lists(
        st.tuples(
            st.lists(st.integers(0, 3), min_size=1, max_size=4),
            st.lists(st.integers(0, 3), max_size=2),
        ),
        min_size=1,
        max_size=12,
    ),
    count=st.integers(1, 5),
)
def test_it_proposes_what_its_index_does_and_expects_no_more_than_it_proposes(
    pieces: list[tuple[list[int], list[int]]], count: int
) -> None:
    lookup, index, seen = Lookup(SIZES), NgramIndex(SIZES), list[int]()
    for piece, drafts in pieces:
        seen += piece
        assert lookup.propose(seen, drafts, count) == index.propose(seen, drafts, count)
        assert 0.0 <= lookup.gain_tokens(count) <= count
