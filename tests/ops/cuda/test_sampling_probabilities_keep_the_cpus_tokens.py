"""The device's sampler keeps the tokens that the CPU's does, whoever else is in the batch."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from baton_ops import sampling
from baton_testing import draws
from baton_worker.engine.sampling.logits_processing import truncated

KINDS = ("bulk", "flat", "peaked", "tied", "ascending", "constant", "offset", "signed_zeros")
VOCABS = (1, 3, 1_000, 4_096, 4_097, 32_003, 151_936)


class Rows:
    """One sequence per row, with its settings; all defaults change nothing."""

    def __init__(self, torch: ModuleType, logits: npt.NDArray[np.float32]) -> None:
        count = len(logits)
        self.torch, self.logits = torch, logits
        self.temperature = np.ones(count, np.float32)
        self.top_p = np.ones(count, np.float64)
        self.min_p = np.zeros(count, np.float32)
        self.top_k = np.zeros(count, np.int32)
        self.cu_rows = np.arange(count + 1, dtype=np.int32)

    def params(self) -> sampling.RowParams:
        columns = (self.temperature, self.top_p, self.min_p, self.top_k, self.cu_rows)
        return sampling.RowParams(*(self.torch.as_tensor(c, device="cuda") for c in columns))

    def run(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.uint8]]:
        torch = self.torch
        logits = torch.as_tensor(self.logits, device="cuda")
        probs = torch.full_like(logits, -777)
        broken = torch.zeros(len(logits), dtype=torch.uint8, device="cuda")
        sampling.probabilities_into(logits, self.params(), probs, broken)
        return probs.cpu().numpy(), broken.cpu().numpy()

    def untruncated(self) -> npt.NDArray[np.float32]:
        """Return what the device makes of the rows without top_k and top_p."""
        whole = Rows(self.torch, self.logits)
        whole.temperature, whole.min_p = self.temperature, self.min_p
        return whole.run()[0]

    def wanted(self) -> npt.NDArray[np.float32]:
        """Return the CPU's truncation of the device's own weights: no rounding stands between."""
        vocab = self.logits.shape[1]
        top_k = np.where(self.top_k > 0, self.top_k, vocab).astype(np.int64)
        weights = self.untruncated()
        limited = np.flatnonzero((top_k < vocab) | (self.top_p < 1.0))
        if len(limited):
            weights[limited] = truncated(weights[limited], top_k[limited], self.top_p[limited])
        return weights


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("kind", [*KINDS, "masked"])
def test_weights_are_the_cpus_up_to_rounding(
    torch: ModuleType, hard_rows: Callable[..., Any], kind: str, vocab: int
) -> None:
    logits = hard_rows(kind, 9, vocab)
    logits[:, vocab // 2] = np.maximum(logits[:, vocab // 2], np.float32(-3e4))
    rows = Rows(torch, logits)
    rows.temperature[:] = np.array([1, 0.3, 0.7, 1e-30, 1e30, 1.7, 1e-45, 2, 1], np.float32)
    rows.min_p[::2] = 0.03
    probs, broken = rows.run()
    with np.errstate(over="ignore", under="ignore"):
        scaled = (logits - logits.max(axis=1, keepdims=True)) / rows.temperature[:, None]
        wanted = np.exp(scaled)
    near = np.isclose(wanted, rows.min_p[:, None], rtol=1e-5) & (rows.min_p[:, None] > 0)
    wanted[wanted < rows.min_p[:, None]] = 0
    probs[near], wanted[near] = 0, 0
    np.testing.assert_allclose(probs, wanted, rtol=1e-6, atol=1e-37)
    assert not broken.any()


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("kind", KINDS)
def test_truncation_is_the_cpus_bit_for_bit(
    torch: ModuleType, hard_rows: Callable[..., Any], kind: str, vocab: int
) -> None:
    settings = [
        (top_k, top_p, min_p)
        for top_k in (0, 1, 2, 50, vocab - 1, vocab + 5)
        for top_p in (1e-12, 0.1, 0.5, 0.9, 0.999, 1 - 1e-6, 1.0)
        for min_p in (0.0, 0.02)
    ]
    picked = settings if vocab < 100_000 else settings[::4]
    rows = Rows(torch, hard_rows(kind, len(picked), vocab))
    for row, (top_k, top_p, min_p) in enumerate(picked):
        rows.top_k[row], rows.top_p[row], rows.min_p[row] = top_k, top_p, min_p
    rows.temperature[1::3] = 0.6
    rows.temperature[2::3] = 1e6
    probs, broken = rows.run()
    wanted = rows.wanted()
    different = (probs != wanted).any(axis=1)
    assert not different.any(), [picked[row] for row in np.flatnonzero(different)][:5]
    assert probs.tobytes() == wanted.tobytes()
    assert not broken.any()


def test_ten_equal_tokens_lose_none_or_five_of_them(torch: ModuleType) -> None:
    rows = Rows(torch, np.zeros((6, 10), np.float32))
    rows.top_p[:] = [0.5, 0.9, 1.0, 0.05, 0.0, 0.9]
    rows.top_k[:] = [0, 0, 0, 0, 0, 5]
    kept = rows.run()[0]
    assert kept.sum(axis=1).tolist() == [6, 10, 10, 1, 1, 5]
    assert (np.diff(kept, axis=1) <= 0).all(), "ties go to the lower id"


def test_a_cut_through_ties_of_several_blocks(torch: ModuleType) -> None:
    vocab = 151_936
    rows = Rows(torch, np.zeros((5, vocab), np.float32))
    rows.top_k[:] = [1, 20_000, 75_968, vocab - 1, 0]
    rows.top_p[:] = [1, 1, 1, 1, 0.7]
    kept = rows.run()[0]
    wanted = [1, 20_000, 75_968, vocab - 1, int(0.7 * vocab) + 1]
    for row, count in zip(kept, wanted, strict=True):
        assert row[:count].all()
        assert not row[count:].any()


@pytest.mark.parametrize("vocab", [5, 4_097, 32_003, 151_936])
def test_temperature_zero_is_the_argmax_alone(
    torch: ModuleType, hard_rows: Callable[..., Any], vocab: int
) -> None:
    logits = hard_rows("tied", 7, vocab)
    rows = Rows(torch, logits)
    rows.temperature[:] = 0
    rows.top_p[:] = 0.5
    probs, broken = rows.run()
    assert (probs.argmax(axis=1) == logits.argmax(axis=1)).all()
    assert (probs.sum(axis=1) == 1).all()
    assert (probs.max(axis=1) == 1).all()
    assert not broken.any()


@pytest.mark.parametrize("vocab", [5, 4_097, 151_936])
def test_a_broken_row_is_told_and_is_still_a_distribution(torch: ModuleType, vocab: int) -> None:
    logits = draws.new_rng().standard_normal((6, vocab)).astype(np.float32)
    logits[0, vocab // 2] = np.nan
    logits[1, vocab - 1] = -np.nan
    logits[2, 0] = np.inf
    logits[3] = -np.inf
    logits[4, 1:] = -np.inf
    rows = Rows(torch, logits)
    rows.top_p[:] = 0.9
    rows.top_k[:] = 3
    probs, broken = rows.run()
    assert broken.tolist() == [1, 1, 1, 1, 0, 0]
    assert (probs[:4].sum(axis=1) == 1).all()
    assert (probs >= 0).all()


@pytest.mark.parametrize("vocab", [1_001, 32_003, 151_936])
def test_a_rows_bits_do_not_depend_on_company(
    torch: ModuleType, hard_rows: Callable[..., Any], vocab: int
) -> None:
    count = 260
    rows = Rows(torch, hard_rows("bulk", count, vocab))
    rng = draws.new_rng()
    rows.temperature[:] = rng.choice([0, 0.6, 1, 1.3], size=count)
    rows.top_p[:] = rng.choice([0.3, 0.95, 1], size=count)
    rows.top_k[:] = rng.choice([0, 40, 1_000], size=count)
    rows.min_p[:] = rng.choice([0, 0.001], size=count)
    whole = rows.run()[0]
    for row in (0, 1, 17, 131, 259):
        alone = Rows(torch, rows.logits[row : row + 1])
        for name in ("temperature", "top_p", "top_k", "min_p"):
            getattr(alone, name)[0] = getattr(rows, name)[row]
        assert alone.run()[0].tobytes() == whole[row].tobytes()


def test_rows_of_nobody_are_left_alone_and_one_may_work_in_place(torch: ModuleType) -> None:
    logits = draws.new_rng().standard_normal((7, 32_003)).astype(np.float32)
    rows = Rows(torch, logits)
    rows.cu_rows = np.array([0, 3, 3, 5], np.int32)
    for name in ("temperature", "top_p", "top_k", "min_p"):
        setattr(rows, name, getattr(rows, name)[:3])
    rows.temperature[:] = [1, 9, 0.5]
    rows.top_k[:] = [10, 1, 20]
    probs = rows.run()[0]
    assert (probs[5:] == -777).all()
    assert (probs[:5] > 0).sum(axis=1).tolist() == [10, 10, 10, 20, 20]
    on_device = torch.as_tensor(logits, device="cuda")
    broken = torch.zeros(7, dtype=torch.uint8, device="cuda")
    sampling.probabilities_into(on_device, rows.params(), on_device, broken)
    np.testing.assert_array_equal(on_device.cpu().numpy()[:5], probs[:5])
    np.testing.assert_array_equal(on_device.cpu().numpy()[5:], logits[5:])


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("kind", [*KINDS, "masked", "not_a_number"])
def test_argmax_is_numpys(
    torch: ModuleType, hard_rows: Callable[..., Any], kind: str, vocab: int
) -> None:
    logits = hard_rows(kind, 70, vocab)
    on_device = torch.as_tensor(logits, device="cuda")
    token = torch.full((70,), -777, dtype=torch.int32, device="cuda")
    broken = torch.zeros(70, dtype=torch.uint8, device="cuda")
    broken[69] = 1
    sampling.argmax_into(on_device, token, broken)
    wanted = logits.argmax(axis=1)
    np.testing.assert_array_equal(token.cpu().numpy(), wanted)
    bad = ~np.isfinite(logits[np.arange(70), wanted])
    bad[69] = True
    np.testing.assert_array_equal(broken.cpu().numpy(), bad)
