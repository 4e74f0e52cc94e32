"""Blocks go to the device and come back bit for bit, whatever the stream is doing meanwhile."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_testing.numpy_device import NumpyDevice, on_device
from baton_worker.engine.backends.device.pool import DevicePool
from baton_worker.engine.kv.payload import KvDtype, KvShape, is_tame
from baton_worker.engine.kv.pool import NULL_BLOCK, TRASH_BLOCK, clear_blocks

BLOCK_SIZE = 4


def shape(dtype: KvDtype = "float32") -> KvShape:
    return KvShape(
        n_layers=3,
        kv_heads=2,
        block_size=BLOCK_SIZE,
        head_dim=8,
        n_blocks=12,
        dtype=dtype,
        is_by_block=True,
    )


def pool(dtype: KvDtype = "float32", staged_blocks: int = 4) -> DevicePool:
    made = shape(dtype)
    return DevicePool(NumpyDevice(), made, staged_blocks * made.block_bytes)


def some_kv(n_blocks: int, dtype: KvDtype = "float32", seed: int = 0) -> npt.NDArray[Any]:
    (form,) = shape(dtype).arrays(n_blocks)
    values = np.random.default_rng(seed).normal(size=form.shape).astype(np.float32)
    return values if dtype == "float32" else (values.view(np.uint32) >> 16).astype(np.uint16)


@given(
    blocks=st.lists(st.integers(2, 13), min_size=1, max_size=12, unique=True),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    staged_blocks=st.integers(0, 13),
)
def test_what_is_imported_is_exported(
    blocks: list[int], dtype: KvDtype, staged_blocks: int
) -> None:
    store, kv = pool(dtype, staged_blocks), some_kv(len(blocks), dtype)
    store.import_blocks(blocks, (kv,))
    (back,) = store.begin_export(blocks, len(blocks) * BLOCK_SIZE)()
    assert back.dtype == kv.dtype
    assert np.array_equal(back, kv)


def test_a_block_lies_where_its_number_says() -> None:
    store, kv = pool(), some_kv(3)
    store.import_blocks([7, 3, 4], (kv,))
    store._device.synchronise()
    lying = on_device(store.tensor)
    assert np.array_equal(lying[[7, 3, 4]], kv)
    others = [block for block in range(14) if block not in (7, 3, 4)]
    assert not lying[others].any(), "nobody wrote there"
    assert {NULL_BLOCK, TRASH_BLOCK} <= set(others)


@pytest.mark.parametrize("n_positions", range(1, 9))
def test_the_unused_tail_is_zero(n_positions: int) -> None:
    store, kv = pool(), some_kv(2)
    store.import_blocks([2, 3], (kv,))
    (back,) = store.begin_export([2, 3], n_positions)()
    assert len(back) == -(-n_positions // BLOCK_SIZE)
    kept = n_positions - (len(back) - 1) * BLOCK_SIZE
    assert not back[-1, ..., kept:, :].any()
    assert np.array_equal(back[-1, ..., :kept, :], kv[len(back) - 1, ..., :kept, :])


def test_exports_that_are_begun_together_do_not_meet() -> None:
    store = pool(staged_blocks=4)
    kvs = [some_kv(2, seed=seed) for seed in range(4)]
    for number, kv in enumerate(kvs):
        store.import_blocks([2 + 2 * number, 3 + 2 * number], (kv,))
    begun = [store.begin_export([2 + 2 * n, 3 + 2 * n], 2 * BLOCK_SIZE) for n in range(4)]
    for arrived, kv in zip(begun, kvs, strict=True):
        assert np.array_equal(arrived()[0], kv)


def test_an_export_holds_what_the_blocks_held_when_it_was_begun() -> None:
    """They may be given to another request before it is waited for."""
    store, kv = pool(), some_kv(1)
    store.import_blocks([5], (kv,))
    arrived = store.begin_export([5], BLOCK_SIZE)
    store.import_blocks([5], (some_kv(1, seed=1),))
    assert np.array_equal(arrived()[0], kv)


def test_imported_arrays_may_change_at_once() -> None:
    store, kv = pool(), some_kv(3)
    meant = kv.copy()
    store.import_blocks([2, 3, 4], (kv,))
    kv[:] = 0
    (back,) = store.begin_export([2, 3, 4], 3 * BLOCK_SIZE)()
    assert np.array_equal(back, meant)


def test_clearing_leaves_zeros() -> None:
    store = pool()
    store.import_blocks([2, 3], (some_kv(2),))
    clear_blocks(store, [3])
    (back,) = store.begin_export([2, 3], 2 * BLOCK_SIZE)()
    assert back[0].any()
    assert not back[1].any()


def test_kv_of_another_form_is_refused() -> None:
    with pytest.raises(ValueError, match=r"uint16\[1, 3, 2, 2, 4, 8\].*float32\[3, 2, 2, 4, 8\]"):
        pool().import_blocks([2], (some_kv(1, "bfloat16"),))
    with pytest.raises(ValueError, match="for 1 blocks"):
        pool().import_blocks([2], (some_kv(2),))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("value", "tame"),
    [
        (0.0, True), (-1e15, True), (9e14, True), (1.1e15, False), (-2e15, False),
        (np.inf, False), (-np.inf, False), (np.nan, False), (-np.nan, False),
    ],
)  # fmt: skip
def test_values_that_would_spoil_a_block_are_found(
    dtype: KvDtype, value: float, tame: bool
) -> None:
    kv = some_kv(2, dtype)
    bits = int(np.float32(value).view(np.uint32))
    kv[1, 2, 1, 1, 3, 7] = value if dtype == "float32" else bits >> 16
    assert is_tame((kv,)) == tame
