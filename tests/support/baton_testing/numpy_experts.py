"""`ExpertKernels` over NumPy, float32 as E: what each must compute, pair by pair."""

from __future__ import annotations

import itertools
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
    matmul(x, router, out.products)
    chosen = choose(out.products, bias, experts)
    out.expert[:] = chosen.expert.ravel()
    out.weight[:] = chosen.weight.ravel()
    order = np.argsort(out.expert, kind="stable")
    out.place[order] = np.arange(len(order))
    out.row[:] = order // experts.chosen
    out.starts[:] = np.searchsorted(out.expert[order], np.arange(experts.count + 1))


def by_expert(
    x: Array,
    starts: Array,
    weight: Array,
    out: Array,
    product: Callable[[Array, Array, Array], None],
) -> None:
    """Write `product` of each place's row of x, or the only one, and its expert's of the weight."""
    x = np.broadcast_to(x, (len(out), x.shape[1]))
    rows = len(weight) // (len(starts) - 1)
    for expert, (first, last) in enumerate(itertools.pairwise(starts)):
        for place in range(first, last):
            own = weight[expert * rows : (expert + 1) * rows]
            product(x[place][None].copy(), own, out[place : place + 1])


@np.errstate(invalid="ignore", over="ignore")
def combine(made: Array, routes: Routes, beside: Array | None, out: Array) -> None:
    """Add each token's pairs in their order."""
    n_each = len(made) // len(out)
    for row, place in enumerate(range(0, len(made), n_each)):
        total = np.zeros(out.shape[1], np.float32)
        for pair in range(place, place + n_each):
            total += routes.weight[pair] * made[routes.place[pair]]
        out[row] = total if beside is None else total + beside[row]
