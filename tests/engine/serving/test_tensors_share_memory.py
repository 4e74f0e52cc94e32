"""A NumPy array becomes a tensor without a copy, and without anything left behind."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from baton_worker.engine.backends.paddle.framework import as_tensor


@pytest.mark.parametrize(
    "array",
    [
        np.arange(4),
        np.arange(12, dtype=np.float32).reshape(3, 4),
        np.arange(12, dtype=np.float32).reshape(3, 4).T,
        np.zeros((0, 3), np.float32),
    ],
    ids=["i64", "f32", "strided", "empty"],
)
def test_dtype_shape_and_values_are_the_arrays(array: np.ndarray) -> None:
    tensor = as_tensor(array)
    assert list(tensor.shape) == list(array.shape)
    back = tensor.numpy()
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)
    if array.size:
        array.flat[0] = 77
        assert tensor.numpy().flat[0] == 77


def test_the_tensor_keeps_the_memory_alive() -> None:
    array = np.full((500, 500), 3.0, np.float32)
    tensor = as_tensor(array)
    del array
    gc.collect()
    others = [np.zeros((500, 500), np.float32) for _ in range(4)]
    assert float(tensor.sum()) == 750_000
    assert not any(other.any() for other in others)


def test_nothing_remains_of_a_tensor() -> None:
    array = np.zeros((2, 3), np.float32)
    as_tensor(array)
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(1000):
        as_tensor(array)
    gc.collect()
    assert len(gc.get_objects()) - before < 100
