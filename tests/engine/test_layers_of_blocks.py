"""Which layers are told, and what of blocks is copied: each layer that is wanted once, no other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_worker.engine.kv.layers import (
    count_layers,
    each_block,
    layer_runs,
    marked_layers,
    runs_of,
    spans_of,
)

N_LAYERS = 6
BLOCKS = st.lists(
    st.tuples(st.integers(2, 30), st.integers(2, 30), st.integers(0, 5), st.integers(1, 6)),
    min_size=1,
    max_size=20,
    unique_by=(lambda one: one[0], lambda one: one[1]),
)


@pytest.mark.parametrize(
    ("n_layers", "n_tokens", "marks"),
    [
        (1, 2048, ()),
        (2, 2048, (1,)),
        (3, 2048, (2,)),
        (4, 2048, (2, 3)),
        (8, 2048, (4, 6, 7)),
        (36, 1024, (18, 27, 32)),
        (36, 1023, (18,)),
        (61, 2048, (31, 46, 54)),
        (1, 5, ()),
    ],
)
def test_what_is_left_behind_a_word_becomes_less(
    n_layers: int, n_tokens: int, marks: tuple[int, ...]
) -> None:
    assert marked_layers(n_layers, n_tokens) == marks


@given(n_layers=st.integers(1, 200), n_tokens=st.integers(1, 4096))
def test_no_word_says_nothing_and_none_says_all(n_layers: int, n_tokens: int) -> None:
    marks = marked_layers(n_layers, n_tokens)
    assert list(marks) == sorted(set(marks))
    assert all(0 < mark < n_layers for mark in marks)


@given(BLOCKS)
def test_each_layer_that_is_missing_is_copied_once_from_its_place(
    drawn: Sequence[tuple[int, int, int, int]],
) -> None:
    theirs, blocks = [one[0] for one in drawn], [one[1] for one in drawn]
    done = [min(one[2], one[3]) for one in drawn]
    wanted = [one[3] for one in drawn]
    spans = spans_of(done, wanted, N_LAYERS)
    copied = [
        (there + n, here + n, layer)
        for some in layer_runs(theirs, blocks, spans, N_LAYERS)
        for there, here, count in some.runs.tolist()
        for n in range(count)
        for layer in range(some.start, some.stop)
    ]
    places = zip(theirs, blocks, done, wanted, strict=True)
    meant = [(t, b, layer) for t, b, low, high in places for layer in range(low, high)]
    assert sorted(copied) == sorted(meant)
    assert count_layers(len(blocks), spans, N_LAYERS) == len(meant)


@given(BLOCKS)
def test_whole_blocks_need_no_spans(drawn: Sequence[tuple[int, int, int, int]]) -> None:
    n_blocks = len(drawn)
    assert spans_of([0] * n_blocks, [N_LAYERS] * n_blocks, N_LAYERS) is None
    assert count_layers(n_blocks, None, N_LAYERS) == n_blocks * N_LAYERS


@given(BLOCKS)
def test_runs_are_taken_apart_block_by_block(drawn: Sequence[tuple[int, int, int, int]]) -> None:
    theirs, blocks = [one[0] for one in drawn], [one[1] for one in drawn]
    apart = each_block(runs_of(theirs, blocks))
    np.testing.assert_array_equal(apart, np.array([theirs, blocks, [1] * len(blocks)]).T)
