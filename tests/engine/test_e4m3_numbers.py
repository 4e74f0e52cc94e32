"""float32 becomes e4m3, and rows become groups of it, as the format and its users define it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from baton_testing import e4m3_numbers as numbers
from baton_worker.engine.model.e4m3 import decoded, quantised, rounded

ALL_BITS = np.arange(256, dtype=np.uint8)


def same(ours: npt.NDArray[np.float32], theirs: npt.NDArray[np.float64]) -> None:
    np.testing.assert_array_equal(ours, theirs.astype(np.float32))
    there = ~np.isnan(theirs)
    np.testing.assert_array_equal(np.signbit(ours)[there], np.signbit(theirs)[there])


def test_all_bits_are_the_formats_numbers() -> None:
    same(decoded(ALL_BITS), np.array([numbers.number(bits) for bits in range(256)]))
    assert decoded(np.array([0x7E, 0x01, 0x38], np.uint8)).tolist() == [448.0, 2.0**-9, 1.0]


def test_what_is_a_number_stays_it() -> None:
    every = decoded(ALL_BITS)
    same(rounded(every), every.astype(np.float64))


def test_halfway_goes_to_the_even_one_and_a_hair_beyond_to_the_near_one() -> None:
    every = numbers.POSITIVE.astype(np.float32)
    halves = (every[1:] + every[:-1]) / 2
    evens = np.where(np.arange(len(halves)) % 2 == 0, every[:-1], every[1:])
    for sign in (np.float32(1), np.float32(-1)):
        np.testing.assert_array_equal(rounded(sign * halves), sign * evens)
        above = rounded(sign * np.nextafter(halves, np.float32(np.inf)))
        below = rounded(sign * np.nextafter(halves, np.float32(0)))
        np.testing.assert_array_equal(above, sign * every[1:])
        np.testing.assert_array_equal(below, sign * every[:-1])


@given(arrays.arrays(np.float32, 50, elements=st.floats(width=32)))
def test_any_number_becomes_the_nearest(x: npt.NDArray[np.float32]) -> None:
    found = rounded(x)
    np.testing.assert_array_equal(found, numbers.nearest(x).astype(np.float32))
    assert (np.isnan(found) == np.isnan(x)).all()
    assert (np.abs(found[~np.isnan(found)]) <= 448.0).all()


ROWS = arrays.arrays(
    np.float32, (3, 20), elements=st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False)
)


@given(ROWS, st.sampled_from([1, 7, 10, 20, 32]))
def test_a_groups_largest_becomes_448_and_the_others_are_as_near_as_e4m3_is(
    x: npt.NDArray[np.float32], group: int
) -> None:
    values, scales = quantised(x, group)
    assert scales.shape == (3, -(-20 // group))
    assert values.shape == x.shape
    for n, start in enumerate(range(0, 20, group)):
        part, of = x[:, start : start + group], values[:, start : start + group]
        largest = np.abs(part).max(axis=1)
        np.testing.assert_array_equal(scales[:, n], largest / np.float32(448))
        normal = scales[:, n] > np.finfo(np.float32).tiny
        assert (np.abs(of).max(axis=1)[normal] == 448.0).all()
        back = of * scales[:, n : n + 1].astype(np.float64)
        allowed = np.maximum(np.abs(part) / 16, scales[:, n : n + 1] / 1024) * 1.0001
        assert (np.abs(back - part)[normal] <= allowed[normal]).all()


@given(ROWS, ROWS)
def test_a_row_does_not_depend_on_the_rows_beside_it(
    x: npt.NDArray[np.float32], others: npt.NDArray[np.float32]
) -> None:
    alone, among = quantised(x[:1], 8), quantised(np.concatenate([others, x[:1]]), 8)
    np.testing.assert_array_equal(alone.values[0], among.values[-1])
    np.testing.assert_array_equal(alone.scales[0], among.scales[-1])


def test_a_group_of_nothing_is_nothing() -> None:
    x = np.zeros((2, 256), np.float32)
    x[1, 130] = -3.0
    values, scales = quantised(x, 128)
    assert scales[0].tolist() == [0.0, 0.0]
    assert scales[1].tolist() == [0.0, np.float32(3.0) / np.float32(448.0)]
    assert np.flatnonzero(values).tolist() == [256 + 130]
    assert values[1, 130] == -448.0


def test_too_little_for_a_scale_is_nothing() -> None:
    x = np.full((1, 4), np.float32(1e-45))
    values, scales = quantised(x, 4)
    assert scales.tolist() == [[0.0]]
    assert values.tolist() == [[0.0] * 4]


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_a_broken_number_breaks_its_own_group_of_its_own_row(broken: float) -> None:
    x = np.ones((2, 8), np.float32)
    x[0, 1] = broken
    values, scales = quantised(x, 4)
    with np.errstate(invalid="ignore"):
        back = values * np.repeat(scales, 4, axis=1)
    assert np.isnan(back[0, 1])
    assert not np.isfinite(scales[0, 0])
    np.testing.assert_allclose(back[0, 4:], 1.0, rtol=1e-6)
    np.testing.assert_allclose(back[1], 1.0, rtol=1e-6)
