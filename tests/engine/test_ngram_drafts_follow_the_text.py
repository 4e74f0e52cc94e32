"""Prompt lookup proposes what followed the latest occurrence of the longest known ending."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_worker.engine.ngram import NgramIndex, NgramSizes

tokens = st.integers(0, 3)


def by_search(sizes: NgramSizes, seen: list[int], drafts: list[int], count: int) -> list[int]:
    """Return the proposal by looking at every place of the text, longest n-gram first."""
    ending = seen + drafts
    for size in range(sizes.longest, sizes.shortest - 1, -1):
        if size > len(ending) or size > min(len(seen), sizes.longest) + len(drafts):
            continue
        for end in range(len(seen) - 1, size - 1, -1):
            if seen[end - size : end] == ending[-size:]:
                out = list(ending)
                for position in range(end, end + count):
                    out.append(out[position])
                return out[len(ending) :]
    return []


@given(
    pieces=st.lists(st.lists(tokens, min_size=1, max_size=9), min_size=1, max_size=6),
    drafts=st.lists(tokens, max_size=3),
    shortest=st.integers(1, 3),
    more=st.integers(0, 3),
    count=st.integers(1, 5),
)
def test_a_growing_index_equals_a_search_of_the_whole_text(
    pieces: list[list[int]], drafts: list[int], shortest: int, more: int, count: int
) -> None:
    sizes = NgramSizes(shortest, shortest + more)
    index, seen = NgramIndex(sizes), list[int]()
    for piece in pieces:
        seen += piece
        proposed = index.propose(seen, drafts, count)
        assert list(proposed) == by_search(sizes, seen, drafts, count)


def test_a_loop_is_continued_beyond_its_own_end() -> None:
    index = NgramIndex(NgramSizes(2, 3))
    assert index.propose([7, 8, 9, 7, 8, 9], (), 5) == (7, 8, 9, 7, 8)


def test_the_longer_match_wins_over_the_later_one() -> None:
    index = NgramIndex(NgramSizes(1, 3))
    assert index.propose([1, 2, 3, 50, 9, 3, 60, 1, 2, 3], (), 1) == (50,)


def test_text_without_repetition_proposes_nothing() -> None:
    index = NgramIndex(NgramSizes(2, 4))
    assert index.propose(list(range(40)), (), 5) == ()
    assert index.propose([5], (), 5) == ()


def test_nothing_is_proposed_when_nothing_is_wanted() -> None:
    assert NgramIndex(NgramSizes(1, 2)).propose([1, 1, 1], (), 0) == ()


@pytest.mark.parametrize(("shortest", "longest"), [(0, 2), (3, 2)])
def test_sizes_that_are_no_range_are_refused(shortest: int, longest: int) -> None:
    with pytest.raises(ValueError, match=f"{shortest}..{longest} tokens"):
        NgramSizes(shortest, longest)
