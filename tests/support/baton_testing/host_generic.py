"""The products that serve what Hopper's do not take, as functions of the host over NumPy arrays.

Owns the layout of the calls. E is float32, or bfloat16 as uint16. Knows no test.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np

from baton_testing import host_cuda

_INSTRUCTIONS = host_cuda.INSTRUCTIONS | {"rcp.approx.ftz.f32 %0, %1;": "Reciprocal"}
UNIT = host_cuda.Unit(
    ("generic_decoder.cu",),
    "generic_entry.cc",
    lambda _, text: host_cuda.rewritten(text, _INSTRUCTIONS),
)


class HostProducts:
    """The compiled library. Raises RuntimeError with what a kernel did that no kernel may."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        for name in ("host_product", "host_grouped_product"):
            getattr(self._library, name).restype = ctypes.c_char_p

    def set(self, seed: int) -> None:
        """Set the order of threads."""
        self._library.host_settings(ctypes.c_uint64(seed), 9)

    def product(self, x: Any, weight: Any, out: Any, is_gated: bool) -> None:
        """Write `decoder.matmul_into`'s, or `gate_up_silu_into`'s, of E[N, K] and E[M, K]."""
        words = (*_product(x, weight, len(weight)), *_rows(out), int(is_gated))
        _check(self._library.host_product(_words(*words)))

    def grouped(self, x: Any, starts: Any, weight: Any, out: Any, is_gated: bool) -> None:
        """The same of rows that lie group by group, each with its part of the weight's rows."""
        groups = len(starts) - 1
        product = _product(x, weight, len(weight) // groups)
        words = (*product, *_rows(out), int(is_gated), starts, groups)
        _check(self._library.host_grouped_product(_words(*words)))


def _product(x: Any, weight: Any, outer: int) -> tuple[Any, ...]:
    return (*_rows(x), weight, int(x.dtype == np.uint16), *x.shape, outer)


def _rows(values: Any) -> tuple[Any, int]:
    return values, values.strides[0] // values.itemsize


def _words(*values: Any) -> Any:
    words = [v.ctypes.data if hasattr(v, "ctypes") else v for v in values]
    return (ctypes.c_int64 * len(words))(*words)


def _check(error: bytes | None) -> None:
    if error is not None:
        raise RuntimeError(error.decode())
