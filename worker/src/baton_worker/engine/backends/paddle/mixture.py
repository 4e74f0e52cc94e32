"""A mixture of experts on the CPU: each expert's product over the tokens that chose it.

Owns the order in which a token's experts are added: that of its own list, so that who shares an
expert, and how many do, changes nothing. Knows no attention and no request.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from baton_worker.engine.backends.paddle.framework import Tensor, as_tensor, paddle
from baton_worker.engine.kv.layout import pad_rows
from baton_worker.engine.model.experts import Experts, choose
from baton_worker.engine.model.weights import ExpertWeights, MlpWeights

_COLUMN_MULTIPLE = 16
"""Columns of the router's product. MKL's float32 product takes other paths for a row alone and for
many where there are 5 to 7 columns, or 13 to 15 (measured: AMD EPYC)."""


class Mlp(NamedTuple):
    """`MlpWeights` as Paddle tensors."""

    gate_up: Tensor
    down: Tensor

    @classmethod
    def of(cls, weights: MlpWeights) -> Mlp:
        """Return weights as tensors that share their memory."""
        return cls(as_tensor(weights.gate_up), as_tensor(weights.down))

    def __call__(self, x: Tensor) -> Tensor:
        """Return f32[P, H] of f32[P, H]."""
        gated = paddle.nn.functional.swiglu(paddle.matmul(x, self.gate_up))
        return paddle.matmul(gated, self.down)


class Mixture:
    """The experts of one layer, of which each token takes some."""

    def __init__(self, experts: Experts, weights: ExpertWeights) -> None:
        self._experts = experts
        room = -experts.count % _COLUMN_MULTIPLE
        self._router = as_tensor(np.pad(weights.router, ((0, 0), (0, room))))
        self._choice_bias = weights.choice_bias
        self._mlps = [Mlp.of(each) for each in weights.experts]

    def __call__(self, x: Tensor) -> Tensor:
        """Return f32[P, H]: what its own experts make of each row of f32[P, H], weighted.

        Every product has at least the rows of `layout.n_rows`, for the reason told there.
        """
        products = np.asarray(np.from_dlpack(paddle.matmul(x, self._router)))
        products = products[:, : self._experts.count]
        chosen = choose(products, self._choice_bias, self._experts)
        made = np.empty((*chosen.expert.shape, x.shape[1]), np.float32)
        for index in np.unique(chosen.expert):
            row, place = np.nonzero(chosen.expert == index)
            made[row, place] = self._of_expert(int(index), x, row)
        out = chosen.weight[:, :1] * made[:, 0]
        for nth in range(1, self._experts.chosen):
            out += chosen.weight[:, nth, None] * made[:, nth]
        return as_tensor(out)

    def _of_expert(
        self, index: int, x: Tensor, rows: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float32]:
        fed = paddle.gather(x, as_tensor(pad_rows(rows)))
        return np.asarray(np.from_dlpack(self._mlps[index](fed)))[: len(rows)]
