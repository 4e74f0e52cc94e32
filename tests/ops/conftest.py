"""Fixtures for the ops: each instruction set, poisoned outputs, tolerance, random rows."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import baton_ops

POISON_FLOAT = np.float32(12345.75)
POISON_INT = np.int32(-987654321)
GUARD = 3


@pytest.fixture(params=["avx2", "portable"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test once with each instruction set that this processor has."""
    try:
        baton_ops.set_isa(request.param)
    except ValueError:
        pytest.skip(f"this processor cannot run {request.param}")
    yield request.param
    baton_ops.set_isa("auto")


@pytest.fixture
def restored_threads() -> Iterator[None]:
    """Let the test change the thread count."""
    before = baton_ops.threads()
    yield
    baton_ops.set_threads(before)


@pytest.fixture(scope="session")
def paddle() -> ModuleType:
    """Paddle, whose import warns about build tools that nobody here needs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("paddle")


@pytest.fixture(scope="session")
def poisoned_logprobs() -> Callable[..., baton_ops.LogprobColumns]:
    """`logprobs_into` over poisoned outputs with a guard behind each, which must stay."""

    def run(logits: Any, token: Any, k: Any, **options: Any) -> baton_ops.LogprobColumns:
        places = baton_ops.offsets(k)
        sizes = [places.row[-1], places.row[-1], places.topk[-1], places.topk[-1]]
        poisons = [POISON_FLOAT, POISON_INT, POISON_INT, POISON_FLOAT]
        out = [np.full(size + GUARD, poison) for size, poison in zip(sizes, poisons, strict=True)]
        baton_ops.logprobs_into(logits, token, k, tuple(out), offsets=places, **options)
        for column, size, poison in zip(out, sizes, poisons, strict=True):
            assert (column[size:] == poison).all(), "wrote past the end"
            assert not (column[:size] == poison).any(), "left an entry unwritten"
        return baton_ops.LogprobColumns(*(c[:n] for c, n in zip(out, sizes, strict=True)))

    return run


@pytest.fixture(scope="session")
def assert_columns_match() -> Callable[[Any, Any], None]:
    """Ids and ranks exact; logprobs within 2e-6 + 2e-7 * |logprob| of the oracle."""

    def check(got: baton_ops.LogprobColumns, want: baton_ops.LogprobColumns) -> None:
        np.testing.assert_array_equal(got.rank, want.rank)
        np.testing.assert_array_equal(got.topk_token, want.topk_token)
        np.testing.assert_allclose(got.logprob, want.logprob, rtol=2e-7, atol=2e-6)
        np.testing.assert_allclose(got.topk_logprob, want.topk_logprob, rtol=2e-7, atol=2e-6)

    return check
