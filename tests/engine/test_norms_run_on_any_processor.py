"""RMS norm: only instructions that the processor has, exact, and the same in any company."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_worker.engine.backends.paddle import norm
from baton_worker.engine.backends.paddle.framework import as_tensor

EPS = 1e-5
WAYS = [norm.composed, *([norm.fused] if norm.has_avx512() else [])]


def _rows(seed: int, n: int, width: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=(n, width)).astype(np.float32)


def _by_float64(x: npt.NDArray[np.float32], w: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    wide = x.astype(np.float64)
    return np.asarray(wide / np.sqrt(np.mean(wide * wide, axis=1, keepdims=True) + EPS) * w)


@pytest.mark.parametrize("way", WAYS)
@given(
    seed=st.integers(0, 1 << 32), n=st.integers(1, 40), width=st.sampled_from([1, 7, 16, 64, 1000])
)
def test_each_way_is_the_definition(way: norm.RmsNorm, seed: int, n: int, width: int) -> None:
    x, w = _rows(seed, n, width), _rows(seed + 1, 1, width)[0]
    got = way(as_tensor(x), as_tensor(w), EPS).numpy()
    np.testing.assert_allclose(got, _by_float64(x, w), rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("way", WAYS)
@given(seed=st.integers(0, 1 << 32), n=st.integers(2, 40), width=st.sampled_from([7, 16, 64, 1000]))
def test_a_row_is_the_same_bits_in_any_company(
    way: norm.RmsNorm, seed: int, n: int, width: int
) -> None:
    x, w = _rows(seed, n, width), _rows(seed + 1, 1, width)[0]
    together = way(as_tensor(x), as_tensor(w), EPS).numpy()
    for i in range(n):
        alone = way(as_tensor(x[i : i + 1].copy()), as_tensor(w), EPS).numpy()
        assert alone.tobytes() == together[i : i + 1].tobytes()


@pytest.mark.parametrize(
    ("flags", "runs"),
    [
        ("fpu sse2 avx avx2 fma", False),
        ("avx2 avx512f", False),
        ("avx2 avx512f avx512bw avx512dq avx512cd avx512vl", True),
    ],
)
def test_the_kernel_is_taken_only_with_its_instructions(
    tmp_path: Path, flags: str, runs: bool
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nmodel name\t: x\nflags\t\t: {flags}\n\nprocessor\t: 1\n")
    assert norm.has_avx512(cpuinfo) is runs


def test_a_system_that_does_not_tell_gets_plain_ops(tmp_path: Path) -> None:
    assert not norm.has_avx512(tmp_path / "absent")
    (tmp_path / "arm").write_text("processor\t: 0\nFeatures\t: fp asimd\n")
    assert not norm.has_avx512(tmp_path / "arm")


def test_this_process_norms_with_what_it_can_run() -> None:
    """Ends the whole test process where the choice is wrong."""
    assert norm.rms_norm in WAYS
    ones = norm.rms_norm(as_tensor(_rows(0, 3, 8)), as_tensor(np.ones(8, np.float32)), 0.0).numpy()
    np.testing.assert_allclose((ones * ones).mean(axis=1), 1.0, rtol=1e-6)
