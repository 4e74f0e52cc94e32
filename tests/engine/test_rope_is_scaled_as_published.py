"""Frequencies under llama3 and YaRN scaling are those of the published formulas."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_testing.numpy_reference import frequency
from baton_worker.engine.model.rope import Llama3Scaling, YarnScaling, frequencies, rope_tables

LLAMA31 = Llama3Scaling(8.0, 1.0, 4.0, 8192)
QWEN25 = YarnScaling(4.0, 32_768, 32.0, 1.0, 0.1 * float(np.log(4.0)) + 1.0)
HEADS = st.sampled_from([2, 8, 12, 64, 128, 192])
THETAS = st.floats(10.0, 1e7)


def test_llama_3_1_keeps_short_waves_and_stretches_long_ones_eightfold() -> None:
    plain, scaled = frequencies(128, 500_000.0, None), frequencies(128, 500_000.0, LLAMA31)
    waves = 2 * np.pi / plain
    np.testing.assert_array_equal(scaled[waves < 2048], plain[waves < 2048])
    np.testing.assert_allclose(scaled[waves > 8192], plain[waves > 8192] / 8, rtol=1e-15)
    between = (waves >= 2048) & (waves <= 8192)
    assert 0 < between.sum() < len(plain)
    assert ((plain / 8 <= scaled) & (scaled <= plain)).all()


def test_yarn_of_qwen_2_5_blends_between_the_papers_pairs() -> None:
    plain, scaled = frequencies(128, 1e6, None), frequencies(128, 1e6, QWEN25)
    turns = 32_768 * plain / (2 * np.pi)
    first = np.flatnonzero(turns >= 32.0).max()
    last = np.flatnonzero(turns <= 1.0).min()
    assert 0 < first < last < 63
    np.testing.assert_array_equal(scaled[: first + 1], plain[: first + 1])
    np.testing.assert_allclose(scaled[last:], plain[last:] / 4, rtol=1e-14)
    middle = (first + last) // 2
    share = (middle - first) / (last - first)
    blended = plain[middle] * (1 - share + share / 4)
    assert scaled[middle] == pytest.approx(blended, rel=1e-14)


@given(
    head_dim=HEADS,
    theta=THETAS,
    factor=st.floats(1.0, 64.0),
    low=st.floats(0.1, 4.0),
    span=st.floats(0.1, 8.0),
    original=st.integers(16, 1 << 18),
)
def test_llama3_is_the_oracles(
    head_dim: int, theta: float, factor: float, low: float, span: float, original: int
) -> None:
    scaling = Llama3Scaling(factor, low, low + span, original)
    expected = [frequency(pair, head_dim, theta, scaling) for pair in range(head_dim // 2)]
    np.testing.assert_allclose(frequencies(head_dim, theta, scaling), expected, rtol=1e-9)


@given(
    head_dim=HEADS,
    theta=THETAS,
    factor=st.floats(1.0, 64.0),
    slow=st.floats(0.25, 4.0),
    faster=st.floats(1.5, 64.0),
    original=st.integers(512, 1 << 18),
)
def test_yarn_is_the_oracles(
    head_dim: int, theta: float, factor: float, slow: float, faster: float, original: int
) -> None:
    scaling = YarnScaling(factor, original, slow * faster, slow, 1.0)
    expected = [frequency(pair, head_dim, theta, scaling) for pair in range(head_dim // 2)]
    np.testing.assert_allclose(frequencies(head_dim, theta, scaling), expected, rtol=1e-9)


def test_bounds_that_are_not_truncated_lie_between_pairs() -> None:
    exact = YarnScaling(4.0, 32_768, 32.0, 1.0, 1.0, truncate=False)
    plain, scaled = frequencies(128, 1e6, None), frequencies(128, 1e6, exact)
    turns = 32_768 * plain / (2 * np.pi)
    np.testing.assert_array_equal(scaled[turns >= 32.0], plain[turns >= 32.0])
    np.testing.assert_allclose(scaled[turns <= 1.0], plain[turns <= 1.0] / 4, rtol=1e-14)
    inside = (turns < 32.0) & (turns > 1.0)
    # Linear in the pair, which is linear in the turns' logarithm.
    share = np.log(32.0 / turns[inside]) / np.log(32.0)
    np.testing.assert_allclose(scaled[inside], plain[inside] * (1 - share + share / 4), rtol=1e-12)


def test_tables_are_the_cosines_and_sines_times_the_attention_factor() -> None:
    cos, sin = rope_tables(64, 1e6, QWEN25, 300)
    angles = np.arange(300)[:, None] * frequencies(64, 1e6, QWEN25)
    assert (cos.dtype, sin.dtype, cos.shape) == (np.float32, np.float32, (300, 32))
    np.testing.assert_allclose(cos, QWEN25.attention_factor * np.cos(angles), atol=1e-7)
    np.testing.assert_allclose(sin, QWEN25.attention_factor * np.sin(angles), atol=1e-7)
    plain, _ = rope_tables(64, 1e6, None, 300)
    assert plain[0].tolist() == [1.0] * 32
