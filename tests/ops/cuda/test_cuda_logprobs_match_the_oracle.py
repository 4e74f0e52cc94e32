"""CUDA logprobs, ranks and top-k equal the fp64 oracle's, and the CPU path's."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import baton_ops
from baton_ops import oracle
from baton_testing import draws

VOCABS = [1, 5, 255, 8_191, 32_000, 103_424]
KINDS = [
    "bulk",
    "flat",
    "peaked",
    "tied",
    "masked",
    "ascending",
    "constant",
    "offset",
    "signed_zeros",
    "not_a_number",
]
ROWS = 7


def assert_close(actual: npt.NDArray[np.float32], wanted: npt.NDArray[np.float32]) -> None:
    """Check the op's tolerance, with NaN equal to NaN."""
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(wanted))
    finite = ~np.isnan(wanted)
    difference = np.abs(actual[finite].astype(np.float64) - wanted[finite])
    assert (difference <= 2e-6 + 2e-7 * np.abs(wanted[finite].astype(np.float64))).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", VOCABS)
def test_rows_of_every_kind(
    torch: ModuleType,
    run_logprobs: Callable[..., Any],
    hard_rows: Callable[..., npt.NDArray[np.float32]],
    vocab: int,
    kind: str,
    dtype: str,
) -> None:
    rng = draws.new_rng()
    # An odd stride makes most rows unaligned.
    wide = np.full((ROWS, vocab + 3), 99.0, np.float32)
    wide[:, :vocab] = hard_rows(kind, ROWS, vocab)
    logits = torch.as_tensor(wide, device="cuda").to(getattr(torch, dtype))[:, :vocab]
    token = rng.integers(vocab, size=ROWS).astype(np.int32)
    k = np.minimum(np.array([64, 0, -1, 20, 1, 5, 33], np.int32), vocab)
    inv_temp = (0.2 + 2 * rng.random(ROWS)).astype(np.float32)
    mode = baton_ops.RankMode(int(rng.integers(2)))
    got = run_logprobs(logits, token, k, inv_temp=inv_temp, rank_mode=mode).columns
    host = logits.float().cpu().numpy()
    wanted = oracle.logprobs(host, token, k, inv_temp=inv_temp, rank_mode=mode)
    cpu = baton_ops.logprobs(host, token, k, inv_temp=inv_temp, rank_mode=mode)
    for other in (wanted, cpu):
        np.testing.assert_array_equal(got.rank, other.rank)
        np.testing.assert_array_equal(got.topk_token, other.topk_token)
    assert_close(got.logprob, wanted.logprob)
    assert_close(got.topk_logprob, wanted.topk_logprob)


def test_a_token_outside_the_vocabulary_has_no_logprob(
    torch: ModuleType, run_logprobs: Callable[..., Any]
) -> None:
    logits = torch.randn(2, 1000, device="cuda")
    got = run_logprobs(logits, np.array([1000, -1], np.int32), np.array([3, 3], np.int32)).columns
    assert np.isnan(got.logprob).all()
    assert (got.rank == 0).all()
    best = logits.topk(3, dim=1).indices.cpu().numpy()
    np.testing.assert_array_equal(got.topk_token, best.ravel())
