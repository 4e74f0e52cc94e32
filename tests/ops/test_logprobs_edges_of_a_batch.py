"""Empty batches, rows that want nothing, a row count below capacity, and tensors of a framework."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import baton_ops
from baton_ops import oracle


@pytest.mark.parametrize("shape", [(0, 0), (0, 100), (3, 100)])
def test_no_tokens_give_empty_columns(shape: tuple[int, int]) -> None:
    empty = np.empty(0, np.int32)
    got = baton_ops.logprobs(np.zeros(shape, np.float32), empty, empty)
    assert [column.shape for column in got] == [(0,)] * 4


def test_rows_without_logprobs_write_nothing() -> None:
    got = baton_ops.logprobs(
        np.zeros((3, 10), np.float32), np.zeros(3, np.int32), np.full(3, -1, np.int32)
    )
    assert [column.shape for column in got] == [(0,)] * 4


def test_columns_follow_the_rows_that_want_them() -> None:
    logits = np.log(np.array([[1, 2, 3, 4], [4, 3, 2, 1], [1, 1, 1, 7]], np.float32))
    got = baton_ops.logprobs(logits, np.array([0, 1, 2], np.int32), np.array([2, -1, 1], np.int32))
    np.testing.assert_allclose(np.exp(got.logprob), [0.1, 0.1], rtol=1e-6)
    np.testing.assert_array_equal(got.rank, [4, 4])
    np.testing.assert_array_equal(got.topk_token, [3, 2, 3])
    np.testing.assert_allclose(np.exp(got.topk_logprob), [0.4, 0.3, 0.7], rtol=1e-6)


def test_num_rows_leaves_later_rows_alone() -> None:
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((4, 30)).astype(np.float32)
    token, k = np.array([1, 2, -9, -9], np.int32), np.array([2, 1, 64, 64], np.int32)
    out = baton_ops.LogprobColumns(
        np.full(4, 7, np.float32),
        np.full(4, 7, np.int32),
        np.full(9, 7, np.int32),
        np.full(9, 7, np.float32),
    )
    num_rows = np.array([2], np.int32)
    baton_ops.logprobs_into(logits, token, k, out, offsets=baton_ops.offsets(k), num_rows=num_rows)
    want = oracle.logprobs(logits, token[:2], k[:2])
    np.testing.assert_array_equal(out.rank, [*want.rank, 7, 7])
    np.testing.assert_array_equal(out.topk_token, [*want.topk_token, 7, 7, 7, 7, 7, 7])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_paddle_tensors_are_read_in_place(
    paddle: ModuleType, assert_columns_match: Callable[..., None], dtype: str
) -> None:
    rng = np.random.default_rng(5)
    logits = paddle.to_tensor(rng.standard_normal((6, 333)).astype(dtype))
    arrays: dict[str, Any] = {
        "token": np.array([3, 300], np.int32),
        "k": np.array([4, 0], np.int32),
        "row_index": np.array([5, 1], np.int32),
    }
    got = baton_ops.logprobs(logits, **{n: paddle.to_tensor(a) for n, a in arrays.items()})
    assert_columns_match(got, oracle.logprobs(logits.numpy(), **arrays))
    sliced = logits[:, 10:210]
    arrays["token"] = np.array([3, 199], np.int32)
    got = baton_ops.logprobs(sliced, **arrays)
    assert_columns_match(got, oracle.logprobs(sliced.numpy(), **arrays))


def test_paddle_outputs_are_written_in_place(paddle: ModuleType) -> None:
    logits = np.random.default_rng(6).standard_normal((2, 77)).astype(np.float32)
    token, k = np.array([3, 4], np.int32), np.array([1, 2], np.int32)
    out = tuple(
        paddle.zeros([n], dtype)
        for n, dtype in [(2, "float32"), (2, "int32"), (3, "int32"), (3, "float32")]
    )
    baton_ops.logprobs_into(logits, token, k, out, offsets=baton_ops.offsets(k))
    for got, want in zip(out, baton_ops.logprobs(logits, token, k), strict=True):
        np.testing.assert_array_equal(got.numpy(), want)
