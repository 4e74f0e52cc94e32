"""The products for float32, odd widths and other GPUs: a row among groups has the bits that it has
alone, which are those of one order of sums, in any order of threads.
"""

from __future__ import annotations

import os
import shutil
from typing import Any

import numpy as np
import pytest

from baton_testing import host_cuda, host_generic
from baton_testing.host_matmul import bf16, fp32

GROUPS = ((3,), (0, 2, 0, 5), (1, 0, 0, 70, 0), (64, 65, 0, 1, 130), (0,) * 40 + (9,))
"""Rows of each group: none, few, a tile's and more."""


@pytest.fixture(scope="module")
def products(tmp_path_factory: pytest.TempPathFactory) -> host_generic.HostProducts:
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("generic")
    return host_generic.HostProducts(host_cuda.build(compiler, folder, host_generic.UNIT))


def drawn(shape: tuple[int, ...], is_bf16: bool, seed: int) -> Any:
    values = np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)
    return bf16(values) if is_bf16 else values


def plain(values: Any) -> Any:
    return fp32(values) if values.dtype == np.uint16 else values


def wanted(x: Any, weight: Any, is_gated: bool) -> Any:
    """Return f64 of rows and of their group's part of the weight."""
    product = plain(x).astype(np.float64) @ plain(weight).astype(np.float64).T
    if not is_gated:
        return product
    if x.dtype == np.uint16:  # a gate and an up are rounded, as two products of their own would be
        product = fp32(bf16(product)).astype(np.float64)
    gate, up = np.split(product, 2, axis=1)
    return gate / (1 + np.exp(-gate)) * up


@pytest.mark.parametrize("counts", GROUPS)
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("is_bf16", [False, True])
def test_rows_of_groups_have_the_bits_that_they_have_alone(
    products: host_generic.HostProducts, is_bf16: bool, is_gated: bool, counts: tuple[int, ...]
) -> None:
    rows, width, columns = sum(counts), 39, 21
    x = drawn((rows, width), is_bf16, 1)
    weight = drawn((len(counts) * columns * (1 + is_gated), width), is_bf16, 2)
    starts = np.cumsum([0, *counts]).astype(np.int32)
    out = drawn((rows, columns), is_bf16, 3)
    products.set(seed=rows)
    products.grouped(x, starts, weight, out, is_gated)
    for group, part in enumerate(np.split(weight, len(counts))):
        mine = slice(starts[group], starts[group + 1])
        if counts[group] == 0:
            continue
        whole = wanted(x[mine], part, is_gated)
        np.testing.assert_allclose(
            plain(out[mine]), whole, rtol=1e-2 if is_bf16 else 1e-5, atol=1e-2 if is_bf16 else 2e-5
        )
        for row in {starts[group], starts[group + 1] - 1}:
            alone = drawn((1, columns), is_bf16, 4)
            products.set(seed=int(row))
            products.product(x[row : row + 1], part, alone, is_gated)
            np.testing.assert_array_equal(out[row], alone[0])


def test_a_row_of_another_group_would_be_seen(products: host_generic.HostProducts) -> None:
    """The comparison can fail: a group begins a row later than its rows do."""
    x, weight = drawn((6, 16), False, 1), drawn((3 * 8, 16), False, 2)
    right, wrong = np.empty((6, 8), np.float32), np.empty((6, 8), np.float32)
    products.grouped(x, np.array([0, 2, 4, 6], np.int32), weight, right, False)
    products.grouped(x, np.array([0, 3, 4, 6], np.int32), weight, wrong, False)
    assert [bool((a == b).all()) for a, b in zip(right, wrong, strict=True)] == [
        True, True, False, True, True, True,
    ]  # fmt: skip
