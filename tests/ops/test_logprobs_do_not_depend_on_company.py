"""A row's result is bitwise the same alone, in any batch, at any place and on any thread count."""

from __future__ import annotations

import numpy as np
import pytest

import baton_ops

VOCAB = 20_011
ROWS = 48  # enough work for the pool to take part


@pytest.fixture(scope="module")
def logits() -> np.ndarray:
    rng = np.random.default_rng(11)
    return (rng.standard_normal((ROWS, VOCAB)) * 5).astype(np.float32)


def _columns(logits: np.ndarray, rows: np.ndarray, k: int) -> list[np.ndarray]:
    token = (rows * 31 % VOCAB).astype(np.int32)
    out = baton_ops.logprobs(logits, token, np.full(len(rows), k, np.int32), row_index=rows)
    return [np.asarray(c).view(np.int32).reshape(len(rows), -1) for c in out]


@pytest.mark.usefixtures("isa", "restored_threads")
@pytest.mark.parametrize("threads", [2, 3, 7])
def test_thread_count(logits: np.ndarray, threads: int) -> None:
    rows = np.arange(ROWS, dtype=np.int32)
    baton_ops.set_threads(1)
    alone = _columns(logits, rows, 6)
    baton_ops.set_threads(threads)
    for _ in range(5):
        for a, b in zip(alone, _columns(logits, rows, 6), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.usefixtures("isa")
def test_batch_composition_and_order(logits: np.ndarray) -> None:
    rows = np.arange(ROWS, dtype=np.int32)
    shuffled = np.random.default_rng(1).permutation(rows)
    together = _columns(logits, rows, 6)
    for a, b in zip(together, _columns(logits, shuffled, 6), strict=True):
        np.testing.assert_array_equal(a[shuffled], b)
    for row in (0, 17, ROWS - 1):
        for a, b in zip(together, _columns(logits, rows[row : row + 1], 6), strict=True):
            np.testing.assert_array_equal(a[row : row + 1], b)


@pytest.mark.usefixtures("isa")
def test_memory_alignment(logits: np.ndarray) -> None:
    rows = np.arange(4, dtype=np.int32)
    want = _columns(logits, rows, 6)
    for shift in (1, 3, 6):
        wide = np.zeros((4, VOCAB + 8), np.float32)
        wide[:, shift : shift + VOCAB] = logits[:4]
        got = _columns(wide[:, shift : shift + VOCAB], rows, 6)
        for a, b in zip(want, got, strict=True):
            np.testing.assert_array_equal(a, b)


def test_instruction_sets_agree_within_the_tolerance(logits: np.ndarray) -> None:
    rows = np.arange(8, dtype=np.int32)
    token, k = np.zeros(8, np.int32), np.full(8, 6, np.int32)
    results = []
    try:
        for name in ("auto", "portable"):
            baton_ops.set_isa(name)
            results.append(baton_ops.logprobs(logits, token, k, row_index=rows))
    finally:
        baton_ops.set_isa("auto")
    np.testing.assert_array_equal(results[0].topk_token, results[1].topk_token)
    np.testing.assert_allclose(results[0].logprob, results[1].logprob, rtol=4e-7, atol=4e-6)
