"""Whatever proposes, emitted tokens are distributed as the target's probabilities.

Fixed seeds; the thresholds are chi-square quantiles at 1 - 1e-6, so an exact sampler passes and a
control shows that a wrong distribution of the same size would not.
"""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import chdtri

import baton_ops

TRIALS = 100_000
VOCAB = 11
DRAFTS = 2
_RNG = np.random.default_rng(100)
# No entry is tiny, so that every expected count suits the chi-square.
P = (_RNG.dirichlet(np.ones(VOCAB), DRAFTS + 1) / 2 + 0.5 / VOCAB).astype(np.float32)
Q = (_RNG.dirichlet(np.ones(VOCAB), DRAFTS) / 2 + P[:DRAFTS] / 2).astype(np.float32)
THRESHOLD = chdtri(VOCAB - 1, 1e-6)
"""Of a chi-square with so many degrees of freedom what one draw in a million exceeds. (The same of
`scipy.stats`, whose import takes each test process half a second.)
"""


def _statistic(token: np.ndarray, p: np.ndarray) -> float:
    expected = p.astype(np.float64) / p.sum(dtype=np.float64) * len(token)
    return float(((np.bincount(token, minlength=VOCAB) - expected) ** 2 / expected).sum())


def _layout() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (probs, draft_count, cu_rows) of TRIALS equal requests."""
    probs = np.tile(P, (TRIALS, 1))
    cu_rows = np.arange(TRIALS + 1, dtype=np.int32) * (DRAFTS + 1)
    return probs, np.full(TRIALS, DRAFTS, np.int32), cu_rows


def _drafts(rng: np.random.Generator, q: np.ndarray) -> np.ndarray:
    columns = [rng.choice(VOCAB, TRIALS, p=row / row.sum()) for row in q.astype(np.float64)]
    return np.stack(columns, axis=1).astype(np.int32)


def _assert_exact_at_every_position(got: baton_ops.Verification) -> None:
    for i in range(DRAFTS + 1):
        reached = got.n_accepted >= i
        assert reached.sum() > 500
        assert _statistic(got.token[reached, i], P[i]) < THRESHOLD


def test_the_control_a_wrong_distribution_is_told_apart() -> None:
    draft = _drafts(np.random.default_rng(1), Q)
    assert _statistic(draft[:, 0], P[0]) > 10 * THRESHOLD
    assert _statistic(draft[:, 0], Q[0]) < THRESHOLD


@pytest.mark.parametrize("proposer", ["greedy", "random", "stubborn"])
def test_point_mass_drafts(proposer: str) -> None:
    probs, draft_count, cu_rows = _layout()
    rng = np.random.default_rng(2)
    draft = {
        "greedy": np.tile(P[:DRAFTS].argmax(axis=1).astype(np.int32), (TRIALS, 1)),
        "random": _drafts(rng, Q),
        "stubborn": np.full((TRIALS, DRAFTS), P[0].argmax(), np.int32),
    }[proposer]
    got = baton_ops.verify_sampled(probs, rng.random(len(probs)), draft, draft_count, cu_rows)
    _assert_exact_at_every_position(got)


def test_drafts_with_a_distribution() -> None:
    probs, draft_count, cu_rows = _layout()
    rng = np.random.default_rng(3)
    got = baton_ops.verify_sampled(
        probs,
        rng.random(len(probs)),
        _drafts(rng, Q),
        draft_count,
        cu_rows,
        draft_probs=np.tile(Q, (TRIALS, 1, 1)),
        residual_uniform=rng.random(len(probs)),
    )
    _assert_exact_at_every_position(got)
    # Acceptance is the overlap of p and q (Leviathan et al. 2023, theorem 3.5): within 5 sigma.
    overlap = float(np.minimum(P[0], Q[0]).sum())
    accepted = float((got.n_accepted >= 1).mean())
    assert abs(accepted - overlap) < 5 * np.sqrt(overlap * (1 - overlap) / TRIALS)


def test_point_mass_tokens_do_not_depend_on_the_drafts() -> None:
    probs, draft_count, cu_rows = _layout()
    rng = np.random.default_rng(4)
    uniform = rng.random(len(probs))
    a, b = (
        baton_ops.verify_sampled(probs, uniform, _drafts(rng, q), draft_count, cu_rows)
        for q in (Q, np.full_like(Q, 1 / VOCAB))
    )
    both = np.minimum(a.n_accepted, b.n_accepted)
    assert (a.n_accepted != b.n_accepted).any()
    for i in range(DRAFTS + 1):
        common = both >= i
        np.testing.assert_array_equal(a.token[common, i], b.token[common, i])
    none = baton_ops.verify_sampled(
        probs[:: DRAFTS + 1].copy(),
        uniform[:: DRAFTS + 1].copy(),
        np.empty((TRIALS, 0), np.int32),
        np.zeros(TRIALS, np.int32),
        np.arange(TRIALS + 1, dtype=np.int32),
    )
    np.testing.assert_array_equal(none.token[:, 0], a.token[:, 0])
