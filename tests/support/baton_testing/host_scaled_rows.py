"""Rows for the ops of FP8 on the host: e4m3 at random, and outputs whose ends nobody may write.

Owns where they lie. Knows no test.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from baton_testing import host_matmul, host_scaled
from baton_testing.host_scaled import ScaledRows

Array = npt.NDArray[Any]

GUARD = 0x7B7B


def in_blocks(weight: ScaledRows) -> tuple[ScaledRows, ScaledRows]:
    """Return a weight with a scale for each block of 128 rows, its first row's, stored once; and
    the same with a scale for each row.
    """
    blocks = weight.scales[:: 1 << host_scaled.BLOCK_SHIFT]
    rows = np.repeat(blocks, 1 << host_scaled.BLOCK_SHIFT, axis=0)[: len(weight.values)]
    return weight._replace(scales=aligned(blocks)), weight._replace(scales=aligned(rows))


def aligned(values: Array, off_bytes: int = 0) -> Array:
    """Return a copy so far behind where vectors may begin."""
    raw = np.zeros(values.nbytes + 32, np.uint8)
    start = -raw.ctypes.data % 16 + off_bytes
    copy = raw[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    copy[...] = values
    return copy


def rows_of(rng: np.random.Generator, rows: int, columns: int, group: int) -> ScaledRows:
    """Return rows at random."""
    bits = rng.integers(0, 256, (rows, columns)).astype(np.uint8)
    bits[(bits & 0x7F) == 0x7F] = 0x7E
    scales = rng.uniform(1e-4, 1e-2, (rows, -(-columns // group))).astype(np.float32)
    return ScaledRows(aligned(bits), aligned(scales))


def wide(rows: int, outputs: int, dtype: Any) -> Array:
    """Return rows whose ends nobody may write."""
    beside = 8 if outputs % 8 == 0 else 3
    return aligned(np.full((rows, outputs + beside), GUARD, dtype))


def nothing(*shape: int) -> Array:
    """Return bf16 zeros that lie where vectors may begin."""
    return aligned(np.zeros(shape, np.uint16))


def ones(*shape: int) -> Array:
    """Return bf16 that lie where vectors may begin."""
    return aligned(host_matmul.bf16(np.ones(shape)))


def row_of(rng: np.random.Generator, columns: int) -> Array:
    """Return a row bf16[1, K], with a group of nothing."""
    x = rng.standard_normal((1, columns))
    x[:, 128:256] = 0.0
    return aligned(host_matmul.bf16(x))
