"""Matrix products on the CPU whose rows have the same bits in any batch, whatever their width.

Owns the padding of columns that this takes. Rows are the caller's: see `layout.n_rows`.
"""

from __future__ import annotations

from typing import NamedTuple

from baton_worker.engine.backends.paddle.framework import Tensor, as_tensor, paddle
from baton_worker.engine.backends.paddle.scaled_products import ScaledProduct
from baton_worker.engine.model.matrices import (
    Float32Array,
    Matrix,
    ScaledMatrix,
    columns,
    filled,
    filled_array,
    filled_scaled,
    joined,
)
from baton_worker.engine.model.weights import MlpWeights

COLUMN_MULTIPLE = 16
"""Columns of every product, in sixteens. Where 5 to 7 are left over from blocks of 8, MKL's float32
product gives a row other last bits by its place among four (measured: AMD EPYC)."""


class Product(NamedTuple):
    """A weight f32[I, O] that rows are multiplied with; `columns` of it are there, O."""

    weight: Tensor
    columns: int

    @classmethod
    def of(cls, weight: Float32Array) -> Product:
        """Return a weight's; where its width is a multiple it shares the array's memory."""
        return cls(as_tensor(filled_array(weight, COLUMN_MULTIPLE, axis=1)), weight.shape[1])

    def __call__(self, x: Tensor) -> Tensor:
        """Return f32[P, O] of f32[P, I]."""
        out = paddle.matmul(x, self.weight)
        return out if self.columns == self.weight.shape[1] else out[:, : self.columns]


def product_of(weight: Matrix) -> Product | ScaledProduct:
    """Return the product with a matrix of either kind."""
    if isinstance(weight, ScaledMatrix):
        return ScaledProduct.of(filled_scaled(weight, COLUMN_MULTIPLE, axis=1), weight.shape[1])
    return Product.of(weight)


class Mlp(NamedTuple):
    """`MlpWeights` as products; the width between them is padded too."""

    gate_up: Product | ScaledProduct
    down: Product | ScaledProduct

    @classmethod
    def of(cls, weights: MlpWeights) -> Mlp:
        """Return weights as products: what is added between them is silu(0) * 0 times zeros."""
        width = weights.down.shape[0]
        if width % COLUMN_MULTIPLE:
            halves = (slice(None, width), slice(width, None))
            both = [columns(weights.gate_up, half) for half in halves]
            gate_up = joined([filled(half, COLUMN_MULTIPLE, axis=1) for half in both])
            return cls(product_of(gate_up), product_of(filled(weights.down, COLUMN_MULTIPLE, 0)))
        return cls(product_of(weights.gate_up), product_of(weights.down))

    def __call__(self, x: Tensor) -> Tensor:
        """Return f32[P, H] of f32[P, H]."""
        return self.down(paddle.nn.functional.swiglu(self.gate_up(x)))
