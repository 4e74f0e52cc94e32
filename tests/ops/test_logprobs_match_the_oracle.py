"""Logprobs, ranks and top-k equal the fp64 definition for any shape, dtype, k, stride and value."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import baton_ops
from baton_ops import oracle

# Around every boundary of the kernel: vector 8, group 128, block 1,024.
VOCABS = st.one_of(
    st.integers(1, 40),
    st.sampled_from([63, 64, 65, 127, 128, 129, 255, 257, 1023, 1024, 1025, 1161, 2048, 3000]),
)
SPECIALS = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 3e38, -3e38, 1e-42], np.float32)
EACH_ISA = settings(
    deadline=None, max_examples=600, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


class Case(NamedTuple):
    logits: np.ndarray
    token: np.ndarray
    k: np.ndarray
    row_index: np.ndarray | None
    inv_temp: np.ndarray | None
    rank_mode: baton_ops.RankMode


def _values(draw: st.DrawFn, rng: np.random.Generator, rows: int, vocab: int) -> np.ndarray:
    kind = draw(st.sampled_from(["spread", "ties", "offset", "masked", "special"]))
    x = rng.standard_normal((rows, vocab)) * draw(st.sampled_from([0.1, 3.0, 30.0]))
    if kind == "ties":
        x = np.round(x)
    elif kind == "offset":
        x += draw(st.sampled_from([1e4, -1e4]))
    elif kind == "masked":
        x[rng.random(x.shape) < draw(st.sampled_from([0.3, 0.97, 1.0]))] = -np.inf
    elif kind == "special":
        here = rng.random(x.shape) < draw(st.sampled_from([0.02, 0.5, 1.0]))
        x[here] = rng.choice(SPECIALS, int(here.sum()))
    return x.astype(np.float32)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    n_rows, vocab, n_tokens = draw(st.integers(1, 5)), draw(VOCABS), draw(st.integers(0, 6))
    gathers = draw(st.booleans()) or n_tokens > n_rows
    k_max = min(vocab, draw(st.sampled_from([0, 1, 5, 20, 64])))
    return Case(
        _values(draw, rng, n_rows, vocab),
        rng.integers(0, vocab, n_tokens).astype(np.int32),
        rng.integers(-1, k_max + 1, n_tokens).astype(np.int32),
        rng.integers(0, n_rows, n_tokens).astype(np.int32) if gathers else None,
        (10 ** rng.uniform(-2, 6, n_tokens)).astype(np.float32) if draw(st.booleans()) else None,
        draw(st.sampled_from(baton_ops.RankMode)),
    )


def _with_stride(logits: np.ndarray, padding: int) -> np.ndarray:
    """Return the same values as a view into wider, poisoned rows."""
    rows, vocab = logits.shape
    wide = np.full((rows, vocab + padding), 7e7 if logits.dtype == np.float32 else 6e4)
    wide = wide.astype(logits.dtype)
    wide[:, :vocab] = logits
    return wide[:, :vocab]


@pytest.mark.slow
@EACH_ISA
@given(case=cases(), dtype=st.sampled_from([np.float32, np.float16]), padding=st.integers(0, 9))
def test_numpy_logits(
    isa: str,
    poisoned_logprobs: Callable[..., Any],
    assert_columns_match: Callable[..., None],
    case: Case,
    dtype: type,
    padding: int,
) -> None:
    with np.errstate(over="ignore"):
        logits = _with_stride(case.logits.astype(dtype), padding)
    _, token, k, *rest = case
    options = dict(zip(["row_index", "inv_temp", "rank_mode"], rest, strict=True))
    got = poisoned_logprobs(logits, token, k, **options)
    assert_columns_match(got, oracle.logprobs(logits, token, k, **options))


@pytest.mark.slow
@settings(EACH_ISA, max_examples=200)
@given(case=cases())
def test_bfloat16_logits_of_paddle(
    isa: str,
    paddle: ModuleType,
    poisoned_logprobs: Callable[..., Any],
    assert_columns_match: Callable[..., None],
    case: Case,
) -> None:
    logits = paddle.to_tensor(case.logits).cast("bfloat16")
    _, token, k, *rest = case
    options = dict(zip(["row_index", "inv_temp", "rank_mode"], rest, strict=True))
    got = poisoned_logprobs(logits, token, k, **options)
    rounded = logits.cast("float32").numpy()
    assert_columns_match(got, oracle.logprobs(rounded, token, k, **options))


@pytest.mark.parametrize("vocab", [32_000, 103_424, 151_937])
def test_rows_of_real_vocabularies(
    isa: str,
    poisoned_logprobs: Callable[..., Any],
    assert_columns_match: Callable[..., None],
    vocab: int,
) -> None:
    rng = np.random.default_rng(vocab)
    logits = (rng.standard_normal((4, vocab)) * 4).astype(np.float32)
    token = rng.integers(0, vocab, 4).astype(np.int32)
    k = np.array([0, 5, 20, 64], np.int32)
    got = poisoned_logprobs(logits, token, k)
    assert_columns_match(got, oracle.logprobs(logits, token, k))
