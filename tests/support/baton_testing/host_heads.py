"""The kernel that norms, rotates and stores heads, as a function of the host over NumPy arrays.

Owns the layout of its call. E is float32, or bfloat16 as uint16. Knows no test.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from baton_testing import host_cuda

Array = npt.NDArray[Any]

_INSTRUCTIONS = host_cuda.INSTRUCTIONS | {"rcp.approx.ftz.f32 %0, %1;": "Reciprocal"}


def _rewritten(name: str, text: str) -> str:
    if name in ("rope_store.cuh", "row_norm.cuh"):  # which let grids start at once
        text = text.replace("LetNextGridStart();", "")
    return host_cuda.rewritten(text, _INSTRUCTIONS)


UNIT = host_cuda.Unit(("decoder_rows.cu",), "heads_entry.cc", _rewritten)


class Call(NamedTuple):
    """See `Kernels.rope_store`. `bias`, `norms`: None for none."""

    qkv: Array
    bias: Array | None
    norms: tuple[Array, Array] | None
    eps: float
    cos: Array
    sin: Array
    is_interleaved: bool
    sequence: Array
    position: Array
    tables: Array
    kv: Array
    layer: int
    query: Array


class HostHeads:
    """The compiled library."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.host_rope_store.restype = ctypes.c_char_p

    def run(self, call: Call, seed: int) -> None:
        """Make a call, threads in an order that is drawn.

        Raises:
            RuntimeError: a kernel did what no kernel may.
        """
        self._library.host_settings(ctypes.c_uint64(seed), 9)
        tokens, heads, head_dim = call.query.shape
        query_norm, key_norm = call.norms or (None, None)
        blocks, layers, _, kv_heads, block_size, _ = call.kv.shape
        words = (
            call.qkv, call.qkv.strides[0] // call.qkv.itemsize, tokens, heads,
            int(call.qkv.dtype == np.uint16), call.bias, query_norm, key_norm, call.cos, call.sin,
            len(call.cos), int(call.is_interleaved), call.sequence, call.position, call.tables,
            *call.tables.shape, call.kv, blocks, layers, kv_heads, block_size, head_dim, call.layer,
        )  # fmt: skip
        packed = (ctypes.c_int64 * len(words))(*map(_word, words))
        query = ctypes.c_void_p(call.query.ctypes.data)
        error = self._library.host_rope_store(packed, ctypes.c_float(call.eps), query)
        if error is not None:
            raise RuntimeError(f"rope_store: {error.decode()}")


def _word(value: Any) -> int:
    return 0 if value is None else int(value.ctypes.data) if hasattr(value, "ctypes") else value
