"""Sampled verification equals the definition, draw by draw, and refuses what is no distribution."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import baton_ops
from baton_ops import oracle


def _case(seed: int, counts: list[int], vocab: int, sparse: bool) -> dict[str, np.ndarray]:
    """Return arguments with non-normalised rows: weights are small integers over 16, so that sums
    are exact in any order and no draw depends on rounding."""
    rng = np.random.default_rng(seed)
    draft_count = np.array(counts, np.int32)
    cu_rows = np.concatenate(([0], np.cumsum(draft_count + 1))).astype(np.int32)
    n_rows, k_max = int(cu_rows[-1]), max(counts, default=0)

    def weights(*shape: int) -> np.ndarray:
        w = rng.integers(1, 17, (*shape, vocab))
        w[rng.random(w.shape) < (0.9 if sparse else 0.0)] = 0
        w[..., rng.integers(vocab)] = 4
        return (w / 16).astype(np.float32)

    return {
        "probs": weights(n_rows),
        "uniform": rng.integers(0, 2**20, n_rows) / 2**20,
        "draft": rng.integers(0, vocab, (len(counts), k_max)).astype(np.int32),
        "draft_count": draft_count,
        "cu_rows": cu_rows,
        "draft_probs": weights(len(counts), k_max),
        "residual_uniform": rng.integers(0, 2**20, n_rows) / 2**20,
    }


CASES = {
    "seed": st.integers(0, 2**32),
    "counts": st.lists(st.integers(0, 4), max_size=5),
    "vocab": st.sampled_from([1, 2, 7, 8, 9, 127, 128, 129, 300]),
    "sparse": st.booleans(),
}


def _assert_equal(got: baton_ops.Verification, want: baton_ops.Verification) -> None:
    np.testing.assert_array_equal(got.token, want.token)
    np.testing.assert_array_equal(got.n_accepted, want.n_accepted)


@settings(deadline=None, max_examples=300)
@given(**CASES)
def test_point_mass_drafts(seed: int, counts: list[int], vocab: int, sparse: bool) -> None:
    arguments = _case(seed, counts, vocab, sparse)
    del arguments["draft_probs"], arguments["residual_uniform"]
    # Half of the drafts are what the target will say, so that runs of acceptance occur.
    target = [
        oracle.sample(p, u)
        for p, u in zip(arguments["probs"].astype(float), arguments["uniform"], strict=True)
    ]
    for b, count in enumerate(counts):
        for i in range(count):
            if (seed + b + i) % 2:
                arguments["draft"][b, i] = target[arguments["cu_rows"][b] + i]
    _assert_equal(baton_ops.verify_sampled(**arguments), oracle.verify_sampled(**arguments))


@settings(deadline=None, max_examples=300)
@given(**CASES)
def test_drafts_with_a_distribution(seed: int, counts: list[int], vocab: int, sparse: bool) -> None:
    arguments = _case(seed, counts, vocab, sparse)
    _assert_equal(baton_ops.verify_sampled(**arguments), oracle.verify_sampled(**arguments))


def test_rows_with_a_stride_and_a_real_vocabulary() -> None:
    rng = np.random.default_rng(0)
    wide = rng.random((8, 103_500)).astype(np.float32)
    arguments = {
        "probs": wide[:, :103_424],
        "uniform": rng.random(8),
        "draft": np.zeros((2, 3), np.int32),
        "draft_count": np.full(2, 3, np.int32),
        "cu_rows": np.array([0, 4, 8], np.int32),
    }
    _assert_equal(baton_ops.verify_sampled(**arguments), oracle.verify_sampled(**arguments))


@pytest.mark.parametrize("uniform", [0.0, np.nextafter(1.0, 0.0)])
def test_a_token_without_probability_is_never_emitted(uniform: float) -> None:
    probs = np.zeros((2, 300), np.float32)
    probs[:, [40, 170]] = 0.5
    arguments: dict[str, Any] = {
        "probs": probs,
        "uniform": np.full(2, uniform),
        "draft": np.array([[7]], np.int32),
        "draft_count": np.array([1], np.int32),
        "cu_rows": np.array([0, 2], np.int32),
    }
    want = 40 if uniform == 0 else 170
    got = baton_ops.verify_sampled(**arguments)
    np.testing.assert_array_equal(got.token, [[want, -1]])
    got = baton_ops.verify_sampled(
        **arguments,
        draft_probs=np.full((1, 1, 300), 1 / 300, np.float32),
        residual_uniform=np.full(2, uniform),
    )
    np.testing.assert_array_equal(got.token, [[want, -1]])


def test_equal_distributions_accept_every_draft() -> None:
    rng = np.random.default_rng(2)
    p = rng.random((1, 50)).astype(np.float32)
    got = baton_ops.verify_sampled(
        np.repeat(p, 4, axis=0),
        np.full(4, np.nextafter(1.0, 0.0)),
        np.array([[3, 1, 4]], np.int32),
        np.array([3], np.int32),
        np.array([0, 4], np.int32),
        draft_probs=np.repeat(p * 2, 3, axis=0)[None],
        residual_uniform=np.zeros(4),
    )
    np.testing.assert_array_equal(got.n_accepted, [3])


@pytest.mark.parametrize("bad", [np.nan, -0.25, np.inf, 0.0])
def test_refuses_a_row_that_is_no_distribution(bad: float) -> None:
    arguments = _case(1, [0, 1], 20, sparse=False)
    if bad == 0.0:
        arguments["probs"][1] = 0
    else:
        arguments["probs"][1, 3] = bad
    with pytest.raises(ValueError, match=r"probs\[1\] must be non-negative with a positive"):
        baton_ops.verify_sampled(**arguments)
    arguments = _case(1, [0, 1], 20, sparse=False)
    arguments["draft_probs"][1, 0, 3] = np.nan
    with pytest.raises(ValueError, match=r"draft_probs\[1, 0\] must be non-negative"):
        baton_ops.verify_sampled(**arguments)


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("uniform", np.array([0.1, 1.0, 0.2]), ValueError, r"uniform\[1\] must be in \[0, 1\)"),
        ("uniform", np.array([0.1, np.nan, 0]), ValueError, r"uniform\[1\] must be in \[0, 1\)"),
        ("uniform", np.zeros(3, np.float32), TypeError, "uniform must be float64, got float32"),
        ("probs", np.ones((3, 20)), TypeError, "probs must be float32, got float64"),
        ("draft", np.array([[0], [20]], np.int32), ValueError, r"draft .*\[1\] must be in \[0, 19"),
        ("residual_uniform", None, ValueError, "draft_probs and residual_uniform must be given"),
        ("residual_uniform", np.array([0, 0, -0.1]), ValueError, r"residual_uniform\[2\] must"),
        ("draft_probs", np.ones((2, 1, 9), np.float32), ValueError, r"draft_probs.shape\[2\] must"),
    ],
)
def test_refuses(name: str, value: Any, error: type[Exception], message: str) -> None:
    arguments = _case(1, [0, 1], 20, sparse=False) | {name: value}
    with pytest.raises(error, match=message):
        baton_ops.verify_sampled(**arguments)
