"""What lookup proposed is judged by the tokens that came, whether a step verified it or not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_worker.engine.lookup import Lookup
from baton_worker.engine.ngram import NgramIndex, NgramSizes

LOOP = [4, 5, 6] * 40


def _found(lookup: Lookup, tokens: list[int], before: tuple[int, ...], count: int) -> list[int]:
    """Note what lookup would find in these tokens."""
    found = NgramIndex(NgramSizes(1, 2)).propose(tokens, before, count)
    lookup.note(tokens, len(before), found)
    return list(found)


def test_of_a_request_of_which_nothing_is_known_half_are_taken_to_be_right() -> None:
    lookup = Lookup()
    assert lookup.gain_tokens() == 0.0
    assert _found(lookup, [4, 5, 4], (), 2) == [5, 4]
    assert lookup.gain_tokens() == pytest.approx(0.5**2 + 0.5**3)
    assert _found(lookup, [4, 5, 4, 9], (), 2) == []
    assert lookup.gain_tokens() == 0.0


def test_text_that_repeats_itself_is_expected_to_go_on() -> None:
    lookup = Lookup()
    for length in range(4, len(LOOP)):
        _found(lookup, LOOP[:length], (), 3)
    assert lookup.gain_tokens() > 2.9


def test_text_that_seems_to_repeat_itself_and_does_not_is_expected_to_stop() -> None:
    lookup, text = Lookup(), [4]
    for other in range(10, 60):  # behind each 4 stands something else
        text += [other, 4]
        _found(lookup, text, (), 3)
    assert lookup.gain_tokens() < 0.01


def test_a_draft_behind_one_that_was_wrong_counts_as_wrong() -> None:
    rejected, right = Lookup(), Lookup()
    for lookup in (rejected, right):
        assert _found(lookup, [4, 5, 6, 4], (5,), 1) == [6]
    _found(rejected, [4, 5, 6, 4, 9, 4], (), 1)
    _found(right, [4, 5, 6, 4, 5, 6], (), 1)
    assert 0.0 < rejected.gain_tokens() < 0.5**2 < right.gain_tokens()


def test_a_proposal_is_judged_once() -> None:
    lookup = Lookup()
    assert _found(lookup, [4, 5, 4], (), 1) == [5]
    text = [4, 5, 4, 5]
    _found(lookup, text, (), 1)
    for other in range(10, 20):  # nothing is found behind these
        text.append(other)
        _found(lookup, text, (), 1)
    assert _found(lookup, [*text, 4], (), 1) == [5]
    assert lookup.gain_tokens() == pytest.approx(0.4921875**2)


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
def test_it_expects_no_more_than_was_found(
    pieces: list[tuple[list[int], list[int]]], count: int
) -> None:
    lookup, seen = Lookup(), list[int]()
    for piece, drafts in pieces:
        seen += piece
        found = _found(lookup, seen, tuple(drafts), count)
        assert 0.0 <= lookup.gain_tokens() <= len(found)
