"""What a mixture of experts does beside its products, as functions of the host over NumPy arrays.

Owns the layout of the calls. E is float32, or bfloat16 as uint16. Knows no test.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from baton_testing import host_cuda, host_orders
from baton_worker.engine.backends.device.expert_kernels import Routes
from baton_worker.engine.model.experts import Experts

Array = npt.NDArray[Any]

INSTRUCTIONS = host_cuda.INSTRUCTIONS | {
    "prefetch.global.L2 [%0];": "Prefetch",
    "rcp.approx.ftz.f32 %0, %1;": "Reciprocal",
}
LET_AT_ONCE = {"combine.cuh", "norm_route.cuh", "row_norm.cuh", "rope_store.cuh"}
"""Whose kernels let grids start at once; the others wait first, which is held."""


def _rewritten(name: str, text: str) -> str:
    if name in LET_AT_ONCE:
        text = text.replace("LetNextGridStart();", "")
    return host_cuda.rewritten(text, INSTRUCTIONS)


UNIT = host_cuda.Unit(
    ("routes.cu", "decoder_rows.cu"),
    "routes_entry.cc",
    _rewritten,
    stand_ins=("warp_mma.cuh",),
)


class Norm(NamedTuple):
    """See `Kernels.add_norm`. `x`: None for none; all E[N, H], `weight` E[H]."""

    x: Array | None
    residual: Array
    weight: Array
    eps: float
    out: Array


class HostRoutes(host_orders.Ordered):
    """The compiled library. Raises RuntimeError with what a kernel did that no kernel may."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.host_route.restype = ctypes.c_char_p
        for name in ("norm", "norm_route", "combine", "combine_norm"):
            getattr(self._library, f"host_{name}").restype = ctypes.c_char_p

    def set(self, seed: int) -> None:
        """Set the order of threads."""
        self._library.host_settings(ctypes.c_uint64(seed), 9)

    def skip(self, barrier: tuple[str, int] = ("", 0)) -> None:
        """Have every thread pass a barrier by: a header, and the line; none of no line."""
        self._library.host_skip(barrier[0].encode(), barrier[1])

    def set_clusters(self, clusters: int) -> None:
        """Set how many clusters the device says that it has room for."""
        self._library.host_clusters(clusters)

    def launches(self) -> int:
        """Return how many kernels were launched since this was last asked."""
        return int(self._library.host_launches())

    def route(
        self, x: Array, router: Array, bias: Array | None, rule: Experts, out: Routes
    ) -> None:
        """See `ExpertKernels.route`."""
        words = _words(*_routing(x, router, bias, rule, out))
        numbers = ctypes.c_double(rule.least_sum), ctypes.c_double(rule.scaling)
        _check(self._library.host_route(words, *numbers))

    def norm(self, norm: Norm) -> None:
        """See `Kernels.add_norm`."""
        words = _words(*_norming(norm))
        _check(self._library.host_norm(words, ctypes.c_double(norm.eps)))

    def norm_route(
        self, norm: Norm, router: Array, bias: Array | None, rule: Experts, out: Routes
    ) -> None:
        """See `ExpertKernels.norm_route`."""
        words = _words(*_norming(norm), *_routing(norm.out, router, bias, rule, out))
        numbers = (ctypes.c_double(n) for n in (norm.eps, rule.least_sum, rule.scaling))
        _check(self._library.host_norm_route(words, *numbers))

    def combine(
        self, made: Array, place: Array, weight: Array, beside: Array | None, out: Array
    ) -> None:
        """See `ExpertKernels.combine`."""
        words = _words(*_combining(made, place, weight, beside, out), *_rows(out))
        _check(self._library.host_combine(words))

    def combine_norm(
        self, made: Array, place: Array, weight: Array, beside: Array | None, norm: Norm
    ) -> None:
        """See `ExpertKernels.combine_norm`."""
        words = _words(*_combining(made, place, weight, beside, norm.out), *_norming(norm))
        _check(self._library.host_combine_norm(words, ctypes.c_double(norm.eps)))


def _rows(x: Array | None) -> tuple[Any, int]:
    return x, 0 if x is None else x.strides[0] // x.itemsize


def _routing(
    x: Array, router: Array, bias: Array | None, rule: Experts, out: Routes
) -> tuple[Any, ...]:
    return (
        *_rows(x), int(x.dtype == np.uint16), *x.shape, router, bias,
        len(router), rule.chosen, rule.n_groups, rule.n_chosen_groups,
        int(rule.scores == "sigmoid"), int(rule.normalises), *out,
    )  # fmt: skip


def _norming(norm: Norm) -> tuple[Any, ...]:
    is_bf16 = int(norm.residual.dtype == np.uint16)
    rows = *_rows(norm.x), *_rows(norm.residual), *_rows(norm.out)
    return (*rows, norm.weight, is_bf16, *norm.residual.shape)


def _combining(
    made: Array, place: Array, weight: Array, beside: Array | None, out: Array
) -> tuple[Any, ...]:
    return (
        *_rows(made), int(made.dtype == np.uint16), place, weight, *_rows(beside), len(out),
        len(made) // len(out), out.shape[1],
    )  # fmt: skip


def _words(*values: Any) -> Any:
    numbers = (
        0 if value is None else int(value.ctypes.data) if hasattr(value, "ctypes") else value
        for value in values
    )
    words = list(numbers)
    return (ctypes.c_int64 * len(words))(*words)


def _check(error: bytes | None) -> None:
    if error is not None:
        raise RuntimeError(error.decode())
