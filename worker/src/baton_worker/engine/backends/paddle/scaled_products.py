"""Products with quantised weights on the CPU: rows are quantised too, groups are added in order.

Owns the order of what is rounded: `matrices.ScaledMatrix` defines it. What multiplies are e4m3
numbers held as float32, in the product whose rows have the same bits in any batch; all else is one
correctly rounded operation on each element. Rows and columns are the caller's to fill up, as for
any product.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from baton_worker.engine.backends.paddle.framework import Tensor, as_tensor, paddle
from baton_worker.engine.model.e4m3 import quantised
from baton_worker.engine.model.matrices import Float32Array, ScaledMatrix


class ScaledProduct(NamedTuple):
    """A quantised weight that rows are multiplied with.

    Attributes:
        blocks: f32[k, O] for each group along the shared dimension, the last maybe shorter.
        scales: f32[groups, O].
        group: k.
        columns: how many of O are there.
    """

    blocks: tuple[Tensor, ...]
    scales: Float32Array
    group: int
    columns: int

    @classmethod
    def of(cls, weight: ScaledMatrix, columns: int) -> ScaledProduct:
        """Return a weight's; where its columns are contiguous it shares the array's memory."""
        size = weight.group
        blocks = [weight.values[k : k + size] for k in range(0, weight.shape[0], size)]
        held = tuple(as_tensor(np.ascontiguousarray(block)) for block in blocks)
        return cls(held, weight.scales, size, columns)

    def __call__(self, x: Tensor) -> Tensor:
        """Return f32[P, O] of f32[P, I]."""
        values, of_rows = quantised(np.asarray(np.from_dlpack(x)), self.group)
        total = np.zeros((len(values), self.scales.shape[1]), np.float32)
        with np.errstate(over="ignore", invalid="ignore"):  # broken numbers break their row alone
            for n, block in enumerate(self.blocks):
                fed = np.ascontiguousarray(values[:, n * self.group : (n + 1) * self.group])
                part = np.asarray(np.from_dlpack(paddle.matmul(as_tensor(fed), block)))
                total += part * of_rows[:, n : n + 1] * self.scales[n]
        return as_tensor(np.ascontiguousarray(total[:, : self.columns]))
