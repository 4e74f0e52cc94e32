"""Hopper's attention of decode, and of prompts, as functions of the host over NumPy arrays.

Owns the layout of its call. E is bfloat16 as uint16. Knows no test.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from baton_testing import host_cuda, host_matmul, host_orders
from baton_testing.host_matmul import Fault

Array = npt.NDArray[Any]

_INSTRUCTIONS = host_matmul.INSTRUCTIONS | {
    "ex2.approx.ftz.f32 %0, %1;": "PowerOfTwo",
    "atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;": "AddInOrder",
    "bar.sync 1, %0;": "SyncFirstGroup",
    "bar.sync %0, %1;": "SyncNamed",
    "bar.arrive %0, %1;": "ArriveNamed",
    "bar.sync %0, 128;": "SyncOwnGroup",
    "setmaxnreg.dec.sync.aligned.u32 40;": "SetRegistersTo<40>",
    "setmaxnreg.inc.sync.aligned.u32 232;": "SetRegistersTo<232>",
}
_BARRIER = re.compile(r"^( +)(Sync\(\);)", re.M)
"""Of the warpgroup that computes."""


FAULTS = {
    "a tile's keys are multiplied before they have come": Fault(
        "prompt_attention.cuh",
        "Await(&shared_.k_full[s], tile_ / kPromptStages & 1);",
        "if (!PLANTED) Await(&shared_.k_full[s], tile_ / kPromptStages & 1);",
    ),
    "one warpgroup gives tiles back for both": Fault(
        "prompt_attention.cuh",
        "if (thread_ == 0) Arrive(barrier);",
        "for (int i = 0; thread_ == 0 && i < (PLANTED ? 2 - 2 * group_ : 1); ++i) Arrive(barrier);",
    ),
    "both warpgroups take the first one's turn": Fault(
        "prompt_attention.cuh",
        "if (group_ == 1 || !is_first_work) TakeTurn();",
        "if ((group_ == 1 && !PLANTED) || !is_first_work) TakeTurn();",
    ),
}


def _rewritten(name: str, text: str) -> str:
    text = host_matmul.with_faults(name, text, FAULTS)
    text = _BARRIER.sub(r"\1if (!host_cuda::IsSkipped(__FILE__, __LINE__)) \2", text)
    return host_cuda.rewritten(text, _INSTRUCTIONS)


UNIT = host_cuda.Unit(
    ("decode_attention.cu", "prompt_attention.cu", "tensor_map.cc"),
    "decode_entry.cc",
    _rewritten,
    language="hopper.h",
    stand_ins=("wgmma.cuh",),
)


def barriers(header: str) -> list[int]:
    """Return the lines of a header's barriers of that warpgroup."""
    text = (host_cuda.OPS / "include" / "baton_ops" / header).read_text()
    return [text.count("\n", 0, match.start()) + 1 for match in _BARRIER.finditer(text)]


class Call(NamedTuple):
    """See `Kernels.attend`."""

    query: Array
    kv: Array
    layer: int
    tables: Array
    contexts: Array
    scale: float
    out: Array


class HostDecode(host_orders.Ordered):
    """The compiled library. Raises RuntimeError with what a kernel did that no kernel may."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.host_attend.restype = ctypes.c_char_p
        self._library.host_scratch_bytes.restype = ctypes.c_int64

    @contextmanager
    def planted(self, fault: str) -> Iterator[None]:
        """Have a fault meanwhile."""
        self._library.host_plant([*FAULTS].index(fault) + 1)
        try:
            yield
        finally:
            self._library.host_plant(0)

    def skip(self, barrier: tuple[str, int] = ("", 0)) -> None:
        """Have every thread pass a barrier by: a header, and the line; none of no line."""
        self._library.host_skip(barrier[0].encode(), barrier[1])

    def attend(
        self, call: Call, seed: int, processors: int, kernel: Literal["decode", "prompt"] = "decode"
    ) -> None:
        """Attend on so many multiprocessors, from 9 on; threads run in an order that is drawn."""
        self._library.host_settings(ctypes.c_uint64(seed), processors)
        tokens, heads, _ = call.query.shape
        blocks, layers, _, kv_heads, block_size, _ = call.kv.shape
        sequences, width = call.tables.shape
        sizes = (heads, kv_heads, sequences, tokens, width * block_size)
        scratch = np.zeros(self._library.host_scratch_bytes(_words(sizes)) + 16, np.uint8)
        scratch = scratch[-scratch.ctypes.data % 16 :]
        words = (
            call.query, sequences, tokens, heads, call.kv, blocks, layers, kv_heads, block_size,
            call.layer, call.tables, width, call.contexts, call.out, scratch, scratch.nbytes,
        )  # fmt: skip
        scale, is_prompt = ctypes.c_float(call.scale), int(kernel == "prompt")
        error = self._library.host_attend(_words(words), scale, is_prompt)
        if error is not None:
            raise RuntimeError(error.decode())
        if scratch[: 4 * sequences * heads].any():
            raise RuntimeError("a launch leaves its counts of splits to the next one")


def _words(values: tuple[Any, ...]) -> Any:
    return (ctypes.c_int64 * len(values))(*map(_word, values))


def _word(value: Any) -> int:
    return int(value.ctypes.data) if hasattr(value, "ctypes") else value
