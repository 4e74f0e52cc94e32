"""Matrix products on the CPU whose rows have the same bits in any batch, whatever their width.

Owns the padding of columns that this takes. Rows are the caller's: see `layout.n_rows`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from baton_worker.engine.backends.paddle.framework import Tensor, as_tensor, paddle
from baton_worker.engine.model.weights import MlpWeights

COLUMN_MULTIPLE = 16
"""Columns of every product, in sixteens. Where 5 to 7 are left over from blocks of 8, MKL's float32
product gives a row other last bits by its place among four (measured: AMD EPYC)."""

Float32Array = npt.NDArray[np.float32]


class Product(NamedTuple):
    """A weight f32[I, O] that rows are multiplied with; `columns` of it are there, O."""

    weight: Tensor
    columns: int

    @classmethod
    def of(cls, weight: Float32Array) -> Product:
        """Return a weight's; where its width is a multiple it shares the array's memory."""
        return cls(as_tensor(padded(weight, axis=1)), weight.shape[1])

    def __call__(self, x: Tensor) -> Tensor:
        """Return f32[P, O] of f32[P, I]."""
        out = paddle.matmul(x, self.weight)
        return out if self.columns == self.weight.shape[1] else out[:, : self.columns]


class Mlp(NamedTuple):
    """`MlpWeights` as products; the width between them is padded too."""

    gate_up: Product
    down: Product

    @classmethod
    def of(cls, weights: MlpWeights) -> Mlp:
        """Return weights as products: what is added between them is silu(0) * 0 times zeros."""
        width = len(weights.down)
        if width % COLUMN_MULTIPLE:
            halves = (weights.gate_up[:, :width], weights.gate_up[:, width:])
            joined = np.concatenate([padded(half, axis=1) for half in halves], axis=1)
            return cls(Product.of(joined), Product.of(padded(weights.down, axis=0)))
        return cls(Product.of(weights.gate_up), Product.of(weights.down))

    def __call__(self, x: Tensor) -> Tensor:
        """Return f32[P, H] of f32[P, H]."""
        return self.down(paddle.nn.functional.swiglu(self.gate_up(x)))


def padded(weight: Float32Array, axis: int) -> Float32Array:
    """Return a weight with zeros behind it up to a multiple."""
    missing = -weight.shape[axis] % COLUMN_MULTIPLE
    if not missing:
        return weight
    behind = [(0, 0)] * weight.ndim
    behind[axis] = (0, missing)
    return np.pad(weight, behind)
