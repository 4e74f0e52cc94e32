"""Greedy verification accepts the longest prefix of drafts that the target agrees with."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import baton_ops
from baton_ops import oracle


@given(
    counts=st.lists(st.integers(0, 5), max_size=8),
    spare=st.integers(0, 2),
    seed=st.integers(0, 2**32),
    vocab=st.integers(1, 3),
)
def test_any_batch(counts: list[int], spare: int, seed: int, vocab: int) -> None:
    rng = np.random.default_rng(seed)
    draft_count = np.array(counts, np.int32)
    cu_rows = np.concatenate(([0], np.cumsum(draft_count + 1))).astype(np.int32)
    target = rng.integers(0, vocab, cu_rows[-1]).astype(np.int32)
    draft = rng.integers(0, vocab, (len(counts), max(counts, default=0) + spare)).astype(np.int32)
    got = baton_ops.verify_greedy(target, draft, draft_count, cu_rows)
    want = oracle.verify_greedy(target, draft, draft_count, cu_rows)
    np.testing.assert_array_equal(got.n_accepted, want.n_accepted)
    np.testing.assert_array_equal(got.token, want.token)


def test_by_hand() -> None:
    got = baton_ops.verify_greedy(
        np.array([5, 6, 7, 5, 9, 7, 4], np.int32),
        np.array([[5, 6], [5, 6], [1, 1]], np.int32),
        np.array([2, 2, 0], np.int32),
        np.array([0, 3, 6, 7], np.int32),
    )
    np.testing.assert_array_equal(got.n_accepted, [2, 1, 0])
    np.testing.assert_array_equal(got.token, [[5, 6, 7], [5, 9, -1], [4, -1, -1]])


@pytest.mark.parametrize(
    ("draft", "draft_count", "cu_rows", "message"),
    [
        ([[1, 2]], [3], [0, 4], r"draft_count\[0\] must be in \[0, 2\], got 3"),
        ([[1, 2]], [-1], [0, 0], r"draft_count\[0\] must be in \[0, 2\], got -1"),
        ([[1, -2]], [2], [0, 3], r"draft \(flattened\)\[1\] must be in .*, got -2"),
        ([[1, 2]], [2], [1, 4], r"cu_rows\[0\] must be in \[0, 0\], got 1"),
        ([[1, 2]], [2], [0, 4], r"cu_rows\[1\] must be in \[3, 3\], got 4"),
        ([[1, 2]], [1], [0, 2], r"cu_rows\[1\] must be the number of target rows 3, got 2"),
        ([[1, 2]], [2], [0, 3, 3], r"cu_rows.shape\[0\] must be 2, got 3"),
        ([[1, 2]], [2, 2], [0, 3], r"draft_count.shape\[0\] must be 1, got 2"),
    ],
)
def test_refuses(
    draft: list[list[int]], draft_count: list[int], cu_rows: list[int], message: str
) -> None:
    arrays = [np.array(a, np.int32) for a in (draft, draft_count, cu_rows)]
    with pytest.raises(ValueError, match=message):
        baton_ops.verify_greedy(np.zeros(3, np.int32), *arrays)


def test_writes_where_it_is_told() -> None:
    out = (np.full(1, -7, np.int32), np.full((1, 3), -7, np.int32))
    arrays = [np.array(a, np.int32) for a in ([5, 9, 7], [[5, 6]], [2], [0, 3])]
    assert baton_ops.verify_greedy(*arrays, out=out) is out
    np.testing.assert_array_equal(out[0], [1])
    np.testing.assert_array_equal(out[1], [[5, 9, -1]])


class OnCuda(np.ndarray):
    """An array that says it is on a CUDA device."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)


def test_device_tensors_need_a_place_for_the_result() -> None:
    target = np.zeros(3, np.int32).view(OnCuda)
    arrays = [np.array(a, np.int32) for a in ([[5, 6]], [2], [0, 3])]
    with pytest.raises(ValueError, match="out must be given"):
        baton_ops.verify_greedy(target, *arrays)
