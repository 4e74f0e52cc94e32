"""A product with an FP8 weight on the CPU is the one that is defined, for each row by itself."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import pytest

from baton_testing import numpy_reference as reference
from baton_worker.engine.backends.paddle.framework import as_tensor
from baton_worker.engine.backends.paddle.products import Mlp, product_of
from baton_worker.engine.kv.layout import MIN_ROWS, ROW_MULTIPLE
from baton_worker.engine.model.e4m3 import quantised, rounded
from baton_worker.engine.model.matrices import Matrix, ScaledMatrix
from baton_worker.engine.model.weights import MlpWeights

Array = npt.NDArray[np.float32]


def matrix(rng: np.random.Generator, inputs: int, outputs: int, group: int) -> ScaledMatrix:
    values = rounded(rng.normal(0, 100, (inputs, outputs)).astype(np.float32))
    scales = rng.uniform(1e-4, 1e-2, (-(-inputs // group), outputs)).astype(np.float32)
    return ScaledMatrix(values, scales, group)


def multiplied(x: Array, weight: Matrix) -> Array:
    return np.asarray(np.from_dlpack(product_of(weight)(as_tensor(x))))


@pytest.mark.parametrize("inputs", [1, 32, 127, 128, 129, 256, 300, 1024])
@pytest.mark.parametrize("whole_rows", [False, True], ids=["groups", "rows"])
def test_a_product_is_what_is_defined(inputs: int, whole_rows: bool) -> None:
    """In float64 of what multiplies: the rounding of activations has tests of its own."""
    rng = np.random.default_rng(inputs)
    weight = matrix(rng, inputs, 37, inputs if whole_rows else 128)
    x = rng.normal(0, 3, (12, inputs)).astype(np.float32)
    values, scales = quantised(x, weight.group)
    of_rows = np.repeat(scales.astype(np.float64), weight.group, axis=1)[:, :inputs]
    of_weight = np.repeat(weight.scales.astype(np.float64), weight.group, axis=0)[:inputs]
    wanted = (values * of_rows) @ (weight.values * of_weight)
    size = np.abs(values * of_rows) @ np.abs(weight.values * of_weight)
    assert (np.abs(multiplied(x, weight) - wanted) <= 3e-6 * size).all()
    np.testing.assert_allclose(wanted, reference.product(x.astype(np.float64), weight), rtol=0.05)


def test_groups_are_added_in_order_times_the_rows_scale_and_then_the_weights() -> None:
    """Small whole numbers, whose products are exact: all that is rounded is scaling and adding."""
    rng = np.random.default_rng(0)
    x = rng.integers(-8, 9, (8, 512)).astype(np.float32)
    x[:, ::128] = 448.0  # so that a group's scale is 1, and values are what they were
    x *= np.repeat(rng.uniform(0.5, 2.0, (8, 4)).astype(np.float32), 128, axis=1)
    weight = dataclasses.replace(
        matrix(rng, 512, 48, 128), values=rng.integers(-8, 9, (512, 48)).astype(np.float32)
    )
    values, scales = quantised(x, 128)

    def added(order: list[int]) -> Array:
        total = np.zeros((8, 48), np.float32)
        for n in order:
            part = values[:, 128 * n :][:, :128] @ weight.values[128 * n :][:128]
            total = total + part * scales[:, n, None] * weight.scales[n]
        return total

    np.testing.assert_array_equal(multiplied(x, weight), added([0, 1, 2, 3]))
    assert (added([0, 1, 2, 3]) != added([3, 2, 1, 0])).any(), "another order would be seen"


@pytest.mark.parametrize("inputs", [32, 48, 128, 160, 200, 300, 1024])
@pytest.mark.parametrize("outputs", [16, 38, 71, 256])
@pytest.mark.parametrize("whole_rows", [False, True], ids=["groups", "rows"])
def test_a_rows_product_does_not_depend_on_company(
    inputs: int, outputs: int, whole_rows: bool
) -> None:
    rng = np.random.default_rng(outputs)
    weight = matrix(rng, inputs, outputs, inputs if whole_rows else 128)
    x = rng.normal(0, 3, (96, inputs)).astype(np.float32)
    among = multiplied(x, weight)
    for count in range(MIN_ROWS, 96, 5 * ROW_MULTIPLE):
        for first in (0, 7, 96 - count):
            few = multiplied(np.ascontiguousarray(x[first : first + count]), weight)
            np.testing.assert_array_equal(few, among[first : first + count])


@pytest.mark.parametrize("width", [7, 130, 200])
def test_an_mlp_that_is_filled_up_computes_its_own_width(width: int) -> None:
    rng = np.random.default_rng(width)
    gate_up, down = matrix(rng, 160, 2 * width, 128), matrix(rng, width, 40, 128)
    x = rng.normal(0, 0.1, (8, 160)).astype(np.float32)
    found = np.asarray(np.from_dlpack(Mlp.of(MlpWeights(gate_up, down))(as_tensor(x))))
    wanted = reference.mlp(x.astype(np.float64), MlpWeights(gate_up, down))
    assert np.median(np.abs(found - wanted)) < 1e-5 * np.abs(wanted).max()
    np.testing.assert_allclose(found, wanted, rtol=0, atol=0.05 * np.abs(wanted).max())


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_a_broken_row_is_broken_and_no_other_is(broken: float) -> None:
    weight = matrix(np.random.default_rng(0), 300, 40, 128)
    x = np.ones((8, 300), np.float32)
    whole = multiplied(x, weight)
    x[3, 200] = broken
    found = multiplied(x, weight)
    assert not np.isfinite(found[3]).any()
    np.testing.assert_array_equal(np.delete(found, 3, axis=0), np.delete(whole, 3, axis=0))
