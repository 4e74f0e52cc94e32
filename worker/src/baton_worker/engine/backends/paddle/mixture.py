"""A mixture of experts on the CPU: each expert's product over the tokens that chose it.

Owns the order in which a token's experts are added: that of its own list, so that who shares an
expert, and how many do, changes nothing. Knows no attention and no request.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from baton_worker.engine.backends.paddle.framework import Tensor, as_tensor, paddle
from baton_worker.engine.backends.paddle.products import Mlp, Product
from baton_worker.engine.kv.layout import pad_rows
from baton_worker.engine.model.experts import Experts, choose
from baton_worker.engine.model.weights import ExpertWeights


class Mixture:
    """The experts of one layer, of which each token takes some."""

    def __init__(self, experts: Experts, weights: ExpertWeights) -> None:
        self._experts = experts
        self._router = Product.of(weights.router)
        self._choice_bias = weights.choice_bias
        self._mlps = [Mlp.of(each) for each in weights.experts]

    def __call__(self, x: Tensor) -> Tensor:
        """Return f32[P, H]: what its own experts make of each row of f32[P, H], weighted.

        Every product has at least the rows of `layout.n_rows`, for the reason told there.
        """
        products = np.asarray(np.from_dlpack(self._router(x)))
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
