"""Multi-head latent attention on the CPU: from a layer's projection to what is attended, and back.

Owns the folded form: the key's half of each head's matrix is applied to the query, the value's half
to what was attended, so that attention itself is that of many query heads over one kept row. Two
rewrites happen once, at load, as in `decoder`: interleaved pairs become halves, in queries and the
shared key alike, and the scale of scores moves into the query's projection. Knows no pool.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from baton_worker.engine.backends.paddle.framework import Tensor, as_tensor, paddle
from baton_worker.engine.backends.paddle.norm import rms_norm
from baton_worker.engine.backends.paddle.products import COLUMN_MULTIPLE, product_of
from baton_worker.engine.model.matrices import (
    Matrix,
    ScaledMatrix,
    columns,
    filled_array,
    joined,
)
from baton_worker.engine.model.mla import Mla
from baton_worker.engine.model.shape import ModelShape
from baton_worker.engine.model.weights import LatentWeights

Float32Array = npt.NDArray[np.float32]


class Latent:
    """One layer's; the heads of `shape` and `weights` are this rank's."""

    def __init__(self, shape: ModelShape, mla: Mla, weights: LatentWeights) -> None:
        self._mla = mla
        self._n_heads = shape.n_heads
        self._q_norm = self._q_up = None
        if weights.q_norm is not None and weights.q_up is not None:
            self._q_norm = as_tensor(weights.q_norm)
            self._q_up = product_of(_rewrite_queries(shape, mla, weights.q_up))
        self._kv_norm = as_tensor(weights.kv_norm)
        key, value = np.split(weights.kv_up, [mla.nope_size], axis=1)
        self._fold = _HeadProduct.of(key)
        self._unfold = _HeadProduct.of(value.transpose(0, 2, 1))

    def rows(self, projected: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries f32[P, n_heads, row_size], scaled, and kept rows f32[P, 1, row_size].

        Args:
            projected: f32[P, sum of `Mla.input_sizes`].
            cos, sin: f32[P, n_heads + 1, rope_size], see `rotate`.
        """
        mla, n_heads = self._mla, self._n_heads
        query, row = paddle.split(projected, [*mla.input_sizes(n_heads)], axis=1)
        if self._q_up is not None:
            query = self._q_up(rms_norm(query, self._q_norm, mla.norm_eps))
        query = query.reshape([-1, n_heads, mla.query_size])
        still, turning = paddle.split(query, [mla.nope_size, mla.rope_size], axis=2)
        latent, key = paddle.split(row, [mla.kv_rank, mla.rope_size], axis=1)
        both = paddle.concat([turning, key.reshape([-1, 1, mla.rope_size])], axis=1)
        turned = rotate(both, cos, sin)
        kept = rms_norm(latent, self._kv_norm, mla.norm_eps).reshape([-1, 1, mla.kv_rank])
        queries, key = paddle.split(turned, [n_heads, 1], axis=1)
        return (
            paddle.concat([self._fold(still), queries], axis=2),
            paddle.concat([kept, key], axis=2),
        )

    def values(self, attended: Tensor) -> Tensor:
        """Return f32[P, n_heads * value_size] of what was attended, f32[P, n_heads * kv_rank]."""
        each = self._unfold(attended.reshape([-1, self._n_heads, self._mla.kv_rank]))
        return each.reshape([-1, self._n_heads * self._mla.value_size])


class _HeadProduct(NamedTuple):
    """A weight f32[heads, I, O] for each head; `columns` of it are there, O."""

    weight: Tensor
    columns: int

    @classmethod
    def of(cls, weight: Float32Array) -> _HeadProduct:
        whole = filled_array(weight, COLUMN_MULTIPLE, axis=2)
        return cls(as_tensor(np.ascontiguousarray(whole)), weight.shape[2])

    def __call__(self, x: Tensor) -> Tensor:
        """Return f32[P, heads, O] of f32[P, heads, I]."""
        out = paddle.matmul(x.transpose([1, 0, 2]), self.weight).transpose([1, 0, 2])
        return out if self.columns == self.weight.shape[2] else out[:, :, : self.columns]


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-style RoPE: the signed sine turns a roll by half the head into the rotated pair."""
    return heads * cos + paddle.roll(heads, heads.shape[2] // 2, 2) * sin


def rewrite_input(shape: ModelShape, mla: Mla, weight: Matrix) -> Matrix:
    """Return the columns f32[*, sum of `Mla.input_sizes`] in the rewritten form."""
    width = mla.input_sizes(shape.n_heads)[0]
    query, row = columns(weight, slice(width)), columns(weight, slice(width, None))
    if not mla.q_rank:
        query = _rewrite_queries(shape, mla, query)
    order = np.concatenate([np.arange(mla.kv_rank), mla.kv_rank + _order(shape, mla)])
    return joined([query, columns(row, order)])


def _rewrite_queries(shape: ModelShape, mla: Mla, weight: Matrix) -> Matrix:
    """Return columns f32[*, heads * query_size] with pairs half a head apart, and scaled."""
    order = np.concatenate([np.arange(mla.nope_size), mla.nope_size + _order(shape, mla)])
    heads = np.arange(weight.shape[1]).reshape(-1, mla.query_size)
    ordered, scale = columns(weight, heads[:, order].ravel()), np.float32(mla.score_scale)
    if isinstance(ordered, ScaledMatrix):
        return ScaledMatrix(ordered.values, ordered.scales * scale, ordered.group)
    return np.ascontiguousarray(ordered * scale)


def _order(shape: ModelShape, mla: Mla) -> npt.NDArray[np.int64]:
    """Return which of the elements that rotate stands where."""
    elements = np.arange(mla.rope_size)
    if shape.rope_style == "half":
        return elements
    return np.concatenate([elements[0::2], elements[1::2]])
