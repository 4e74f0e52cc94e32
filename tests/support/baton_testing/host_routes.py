"""What a mixture of experts does beside its products, as functions of the host over NumPy arrays.

Owns the layout of the calls. E is float32, or bfloat16 as uint16. Knows no test.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from baton_testing import host_cuda
from baton_worker.engine.backends.device.expert_kernels import Routes
from baton_worker.engine.model.experts import Experts

Array = npt.NDArray[Any]

INSTRUCTIONS = host_cuda.INSTRUCTIONS | {"prefetch.global.L2 [%0];": "Prefetch"}


def _rewritten(name: str, text: str) -> str:
    if name == "combine.cuh":  # it lets grids start at once; the others wait first, which is held
        text = text.replace("LetNextGridStart();", "")
    return host_cuda.rewritten(text, INSTRUCTIONS)


UNIT = host_cuda.Unit(("routes.cu",), "routes_entry.cc", _rewritten)


class HostRoutes:
    """The compiled library. Raises RuntimeError with what a kernel did that no kernel may."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.host_route.restype = ctypes.c_char_p
        self._library.host_combine.restype = ctypes.c_char_p

    def set(self, seed: int) -> None:
        """Set the order of threads."""
        self._library.host_settings(ctypes.c_uint64(seed), 9)

    def route(
        self, x: Array, router: Array, bias: Array | None, rule: Experts, out: Routes
    ) -> None:
        """See `ExpertKernels.route`."""
        words = _words(
            x, x.strides[0] // x.itemsize, int(x.dtype == np.uint16), *x.shape, router, bias,
            len(router), rule.chosen, rule.n_groups, rule.n_chosen_groups,
            int(rule.scores == "sigmoid"), int(rule.normalises), *out,
        )  # fmt: skip
        numbers = ctypes.c_double(rule.least_sum), ctypes.c_double(rule.scaling)
        _check(self._library.host_route(words, *numbers))

    def combine(
        self, made: Array, place: Array, weight: Array, beside: Array | None, out: Array
    ) -> None:
        """See `ExpertKernels.combine`."""
        words = _words(
            made, made.strides[0] // made.itemsize, int(made.dtype == np.uint16), place, weight,
            beside, 0 if beside is None else beside.strides[0] // beside.itemsize, len(out),
            len(made) // len(out), out.shape[1], out, out.strides[0] // out.itemsize,
        )  # fmt: skip
        _check(self._library.host_combine(words))


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
