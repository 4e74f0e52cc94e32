"""The kernels of multi-head latent attention as functions of the host over NumPy arrays.

Owns the layout of the calls, which are those of `LatentKernels`. E is float32, or bfloat16 as
uint16. Knows no test.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from baton_testing import host_cuda, host_matmul, host_orders
from baton_testing.host_matmul import Fault
from baton_worker.engine.backends.device.operands import Places, Rotation
from baton_worker.engine.model.mla import Mla

Array = npt.NDArray[Any]

_INSTRUCTIONS = host_cuda.INSTRUCTIONS | {"rcp.approx.ftz.f32 %0, %1;": "Reciprocal"}
_OF_HOPPER = {
    "griddepcontrol.launch_dependents;": "LetGridsStart",
    "ex2.approx.ftz.f32 %0, %1;": "PowerOfTwo",
    "bar.sync %0, %1;": "SyncGroup",
}
UNIT = host_cuda.Unit(
    ("latent.cu", "latent_attention.cu", "generic_decoder.cu"),
    "latent_entry.cc",
    lambda _, text: host_cuda.rewritten(text, _INSTRUCTIONS),
    stand_ins=("warp_mma.cuh",),
)


FAULTS = {
    "weights are heard before they are told": Fault(
        "latent_wgmma.cuh",
        "Await(&shared_.told[1 - kGroup], told_phase_);",
        "if (!PLANTED) Await(&shared_.told[1 - kGroup], told_phase_);",
    ),
    "weights are told where other warps' products still read": Fault(
        "latent_wgmma.cuh", "Sync();\n    uint4* to", "if (!PLANTED) Sync();\n    uint4* to"
    ),
    "one warpgroup gives queries back for both": Fault(
        "latent_wgmma.cuh",
        "if (split + 1 == run.last) ArriveWarp(&shared_.query_empty);",
        "for (int i = 0; split + 1 == run.last && i < (PLANTED ? 2 - 2 * kGroup : 1); ++i)"
        " ArriveWarp(&shared_.query_empty);",
    ),
}


def _of_hopper(name: str, text: str) -> str:
    text = host_matmul.with_faults(name, text, FAULTS)
    return host_cuda.rewritten(text, host_matmul.INSTRUCTIONS | _OF_HOPPER)


HOPPER = host_cuda.Unit(
    ("latent_hopper.cu", "tensor_map.cc"),
    "latent_hopper_entry.cc",
    _of_hopper,
    language="hopper.h",
    stand_ins=("wgmma.cuh",),
)


class HostLatent(host_orders.Ordered):
    """The compiled library. Raises RuntimeError with what a kernel did that no kernel may."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        for name in ("fold", "unfold", "rotate", "store", "attend_rows"):
            getattr(self._library, f"host_{name}").restype = ctypes.c_char_p

    def set(self, seed: int) -> None:
        """Set the order of threads."""
        self._library.host_settings(ctypes.c_uint64(seed), 9)

    def skip(self, barrier: tuple[str, int] = ("", 0)) -> None:
        """Have every thread pass a barrier by: a header, and the line; none of no line."""
        self._library.host_skip(barrier[0].encode(), barrier[1])

    def fold(self, queries: Array, kv_up: Array, mla: Mla, out: Array) -> None:
        """See `LatentKernels.fold`."""
        given = (*_rows(queries), kv_up, _is_bf16(out), *_sizes(out, mla, mla.value_size))
        _check(self._library.host_fold(_words(*given, out)))

    def unfold(self, attended: Array, kv_up: Array, mla: Mla, out: Array) -> None:
        """See `LatentKernels.unfold`; `out`'s rows may be strided."""
        rows = (attended, attended[0].size)
        given = (*rows, kv_up, _is_bf16(out), *_sizes(attended, mla, mla.value_size))
        _check(self._library.host_unfold(_words(*given, *_rows(out))))

    def rotate(
        self, queries: Array, rotation: Rotation, places: Places, mla: Mla, query: Array
    ) -> None:
        """See `LatentKernels.rotate`."""
        sizes = _sizes(query, mla)[1:]
        given = (*_rows(queries), _is_bf16(query), *_places(rotation, places), *sizes)
        _check(self._library.host_rotate(_words(*given, query)))

    def store(
        self, row: Array, norm: Array, rotation: Rotation, places: Places, kv: Array, layer: int
    ) -> None:
        """See `LatentKernels.store`."""
        rank = len(norm)
        given = (*_rows(row), _is_bf16(kv), norm, rank, kv.shape[5] - rank)
        words = _words(*given, *_places(rotation, places), *_pool(kv), layer)
        _check(self._library.host_store(words, ctypes.c_float(rotation.eps)))

    def attend(
        self,
        query: Array,
        kv: Array,
        layer: int,
        tables: Array,
        contexts: Array,
        scale: float,
        out: Array,
    ) -> None:
        """See `LatentKernels.attend`."""
        tokens, heads, _ = query.shape
        sizes = (_is_bf16(query), len(tables), tokens, heads)
        whose = (layer, tables, tables.shape[1], contexts, out.shape[2], out)
        words = _words(query, *sizes, *_pool(kv), *whose)
        _check(self._library.host_attend_rows(words, ctypes.c_float(scale)))


class HostHopperLatent(host_orders.Ordered):
    """Hopper's attention to compressed rows. Raises RuntimeError as `HostLatent` does."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.host_attend_rows.restype = ctypes.c_char_p
        self._library.host_scratch_bytes.restype = ctypes.c_int64
        self.set(seed=1, processors=9)

    @contextmanager
    def planted(self, fault: str) -> Iterator[None]:
        """Have a fault meanwhile."""
        self._library.host_plant([*FAULTS].index(fault) + 1)
        try:
            yield
        finally:
            self._library.host_plant(0)

    def set(self, seed: int, processors: int) -> None:
        """Set the order of threads, and how many blocks a launch has, from 9 on."""
        self._library.host_settings(ctypes.c_uint64(seed), processors)

    def scratch_bytes(self, heads: int, tokens: int, positions: int) -> int:
        """See `decoder.attention_scratch_bytes`."""
        return int(self._library.host_scratch_bytes(_words(heads, tokens, positions)))

    def attend(
        self,
        query: Array,
        kv: Array,
        layer: int,
        tables: Array,
        contexts: Array,
        scale: float,
        out: Array,
        scratch: Array,
    ) -> None:
        """See `LatentKernels.attend`."""
        tokens, heads, _ = query.shape
        whose = (layer, tables, tables.shape[1], contexts, out, scratch, scratch.nbytes)
        words = _words(query, len(tables), tokens, heads, *_pool(kv), *whose)
        _check(self._library.host_attend_rows(words, ctypes.c_float(scale)))


def _sizes(heads: Array, mla: Mla, *more: int) -> tuple[int, ...]:
    """Return tokens, then sizes, of what has a vector for each token and head."""
    return (*heads.shape[:2], mla.kv_rank, mla.rope_size, mla.nope_size, *more)


def _places(rotation: Rotation, places: Places) -> tuple[Any, ...]:
    cos, sin, is_interleaved = rotation.cos, rotation.sin, rotation.style == "interleaved"
    angles = (cos, sin, len(cos), int(is_interleaved))
    return (len(places.sequence), *angles, *places, *places.tables.shape)


def _pool(kv: Array) -> tuple[Any, ...]:
    blocks, layers, _, _, block_size, row = kv.shape
    return kv, blocks, layers, block_size, row


def _is_bf16(values: Array) -> int:
    return int(values.dtype == np.uint16)


def _rows(values: Array) -> tuple[Any, int]:
    return values, values.strides[0] // values.itemsize


def _words(*values: Any) -> Any:
    words = [v.ctypes.data if hasattr(v, "ctypes") else v for v in values]
    return (ctypes.c_int64 * len(words))(*words)


def _check(error: bytes | None) -> None:
    if error is not None:
        raise RuntimeError(error.decode())
