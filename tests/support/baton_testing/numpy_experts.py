"""`ExpertKernels` over NumPy, float32 as E: what each must compute, pair by pair."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from baton_worker.engine.backends.device.expert_kernels import Routes
from baton_worker.engine.model.experts import Experts, choose

Array = npt.NDArray[Any]


@np.errstate(invalid="ignore", over="ignore")
def route(
    x: Array,
    router: Array,
    bias: Array | None,
    experts: Experts,
    out: Routes,
    matmul: Callable[[Array, Array, Array], None],
) -> None:
    """Choose, and sort the pairs by expert."""
    products = np.empty((len(x), experts.count), np.float32)
    matmul(x, router, products)
    chosen = choose(products, bias, experts)
    out.expert[:] = chosen.expert.ravel()
    out.weight[:] = chosen.weight.ravel()
    out.order[:] = np.argsort(out.expert, kind="stable")
    out.starts[:] = np.searchsorted(np.sort(out.expert), np.arange(experts.count + 1))


def each_pair(
    x: Array,
    routes: Routes,
    weight: Array,
    out: Array,
    product: Callable[[Array, Array, Array], None],
) -> None:
    """Write `product` of each pair's row of x and its expert's rows of the weight; where x has a
    row a token, all pairs of the token have it.
    """
    n_experts, per_row = len(routes.starts) - 1, len(out) // len(x)
    rows = len(weight) // n_experts
    for expert in range(n_experts):
        pairs = routes.order[routes.starts[expert] : routes.starts[expert + 1]]
        assert (routes.expert[pairs] == expert).all(), "the order is the experts'"
        for pair in pairs.tolist():
            fed = x[pair // per_row][None].copy()
            product(fed, weight[expert * rows : (expert + 1) * rows], out[pair : pair + 1])


@np.errstate(invalid="ignore", over="ignore")
def combine(made: Array, routes: Routes, beside: Array | None, out: Array) -> None:
    """Add each token's pairs in their order."""
    n_each = len(made) // len(out)
    for row, place in enumerate(range(0, len(made), n_each)):
        total = np.zeros(out.shape[1], np.float32)
        for pair in range(place, place + n_each):
            total += routes.weight[pair] * made[pair]
        out[row] = total if beside is None else total + beside[row]
