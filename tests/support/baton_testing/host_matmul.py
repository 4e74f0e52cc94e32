"""Hopper's matmuls as functions of the host, over `host_cuda` and the stand-ins of a GPU's parts.

Owns what stands for their instructions, the faults that a test can plant, the layout of a call, and
the sequential sum that every way must have the bits of. Knows no test.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from baton_testing import host_cuda, host_orders

_ON_HOST = {
    "griddepcontrol.wait;": "WaitForGridsOnce",
    "griddepcontrol.launch_dependents;": "LetGridsStartAnyTime",
    "mbarrier.init.shared::cta.b64 [%0], %1;": "InitBarrier",
    "fence.mbarrier_init.release.cluster;": "Nothing",
    "fence.proxy.async;": "Nothing",
    "fence.proxy.async.shared::cta;": "Nothing",
    "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;": "ArriveExpecting",
    "{\\n.reg .pred done;\\n"
    "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\\n"
    "@!done bra again;\\n}\\n": "AwaitPhase",
    "{\\n.reg .pred done;\\n"
    "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\\n"
    "selp.b32 %0, 1, 0, done;\\n}\\n": "HasCome",
    "mbarrier.arrive.shared::cta.b64 _, [%0];": "Arrive",
    "prefetch.tensormap [%0];": "Prefetch",
    "prefetch.global.L2 [%0];": "Prefetch",
    "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
    " [%0], [%1, {%2, %3}], [%4];": "LoadBox",
    "createpolicy.fractional.L2::evict_first.b64 %0, 1.0;": "ReadOncePolicy",
    "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
    " [%0], [%1, {%2, %3}], [%4], %5;": "LoadBoxBy",
    "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
    " [%0], [%1, {%2, %4, %4, %3}], [%5];": "LoadPairs",
    "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
    " [%0], [%1, {%2, %3, %3, %4, %5}], [%6];": "LoadOfStack",
    "cp.async.cg.shared.global [%0], [%1], 16, %2;": "BeginCopyOrZeros",
    "cp.async.cg.shared::cta.global [%0], [%1], 16, %2;": "BeginEarlyCopyOrZeros",
    "cp.async.ca.shared::cta.global [%0], [%1], 4;": "BeginEarlyCopyOfFour",
    "cp.async.commit_group;": "CountCopies",
    "cp.async.wait_group %0;": "AwaitCopies",
    "cp.async.ca.shared.global [%0], [%1], 4;": "BeginCopyOfFour",
    "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];": "ArriveBehindCopies",
    "wgmma.fence.sync.aligned;": "Nothing",
    "wgmma.commit_group.sync.aligned;": "CommitProducts",
    "wgmma.wait_group.sync.aligned %0;": "AwaitProducts",
    "setmaxnreg.dec.sync.aligned.u32 %0;": "SetRegisters",
    "setmaxnreg.inc.sync.aligned.u32 %0;": "SetRegisters",
    "movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;": "TurnBlock",
    "st.global.v4.b32 [%0], {%1, %2, %3, %4};": "StoreVector",
    "rcp.approx.ftz.f32 %0, %1;": "Reciprocal",
}
_OF_OTHER_KERNELS = (
    "mbarrier.init.shared::cta.b64 [%0], 1;",
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];",
    "cp.async.cg.shared.global [%0], [%1], 16;",
    "cp.async.wait_group 0;",
    "{ .reg .pred done; again_%=: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;"
    " @!done bra again_%=; }",
)
"""In headers that the matmuls share; a launch that reaches one fails."""
INSTRUCTIONS = _ON_HOST | dict.fromkeys(_OF_OTHER_KERNELS, "NotOnHost")


@dataclass(frozen=True)
class Fault:
    """An expression of a header, and a wrong one that a test can have instead: or what is both, and
    where PLANTED says which.
    """

    header: str
    right: str
    wrong: str


FAULTS = {
    "bytes of a whole tile are expected of a lower one": Fault(
        "matmul_many.cuh",
        "tiles.height * kBoxColumns * 2 + Way::kBytesWeight",
        "Way::kBytesX + Way::kBytesWeight",
    ),
    "rows behind a tile's height are stored": Fault(
        "matmul_many.cuh", "min(out.m, place.row + tiles.height)", "out.m"
    ),
    "rows behind a low tile's are stored": Fault("matmul_few.cuh", "min(m, row + rows)", "m"),
    "a stage is given back while its products are under way": Fault(
        "matmul_many.cuh", "if (k > 0) release(last)", "release(stage.s)"
    ),
    "a pair's second block is read from where the next pair is": Fault(
        "tensor_map.cc",
        "{matrix.stride, half * matrix.stride, 8 * matrix.stride}",
        "{matrix.stride, 8 * matrix.stride, half * matrix.stride}",
    ),
    "x is multiplied before it has come": Fault(
        "matmul_few.cuh",
        "AwaitAt(Barrier(1, s_), phase_);",
        "if (!PLANTED) AwaitAt(Barrier(1, s_), phase_);",
    ),
    "the weight is multiplied before it has come": Fault(
        "matmul_few.cuh",
        "AwaitAt(Barrier(0, s_), phase_);",
        "if (!PLANTED) AwaitAt(Barrier(0, s_), phase_);",
    ),
    "a stage is there without its rows": Fault(
        "matmul_few.cuh",
        " && HasComeAt(Barrier(1, s_), phase_);",
        " && (PLANTED || HasComeAt(Barrier(1, s_), phase_));",
    ),
    "a stage is there without its weight": Fault(
        "matmul_few.cuh",
        "is_there_ = HasComeAt(Barrier(0, s_), phase_)",
        "is_there_ = (PLANTED || HasComeAt(Barrier(0, s_), phase_))",
    ),
    "one warpgroup gives stages back for all": Fault(
        "matmul_many.cuh",
        "if (thread == 0) Arrive(ring.empty + s);",
        "const int times = PLANTED ? Way::kGroups * (group == 0) : 1;"
        "for (int i = 0; thread == 0 && i < times; ++i) Arrive(ring.empty + s);",
    ),
    "groups are read before the grid that writes them is over": Fault(
        "matmul_grouped.cuh", "WaitForEarlierGrids()", "void()"
    ),
    "rows of the next group are stored": Fault(
        "matmul_grouped.cuh", "min(starts[group + 1], row + rows)", "row + rows"
    ),
}


def with_faults(name: str, text: str, faults: Mapping[str, Fault]) -> str:
    """Return a file's text in which each of its faults can be planted, by their numbers from 1 on.

    Raises:
        ValueError: an expression of one is not there once.
    """
    for number, fault in enumerate(faults.values(), start=1):
        if fault.header != name:
            continue
        if text.count(fault.right) != 1:
            raise ValueError(f"{name} does not have {fault.right!r} once: fix FAULTS")
        text = text.replace(fault.right, _planted(number, fault))
    return text


def _rewritten(name: str, text: str) -> str:
    return host_cuda.rewritten(with_faults(name, text, FAULTS), INSTRUCTIONS)


def _planted(number: int, fault: Fault) -> str:
    """Return C++ that is one or the other, by the library's settings."""
    is_planted = f"host_cuda::planted == {number}"
    if "PLANTED" in fault.wrong:
        return fault.wrong.replace("PLANTED", f"({is_planted})")
    if fault.right.startswith("if "):
        return f"if ({is_planted}) {fault.wrong}; else {fault.right}"
    if fault.right.startswith("{"):
        right, wrong = fault.right[1:-1].split(", "), fault.wrong[1:-1].split(", ")
        pairs = zip(right, wrong, strict=True)
        return "{" + ", ".join(f"{is_planted} ? {w} : {r}" for r, w in pairs) + "}"
    return f"({is_planted} ? {fault.wrong} : {fault.right})"


UNIT = host_cuda.Unit(
    ("matmul_few.cu", "matmul_grouped.cu", "matmul_many.cu", "tensor_map.cc"),
    "matmul_entry.cc",
    _rewritten,
    language="hopper.h",
    stand_ins=("wgmma.cuh",),
)


class _Call(ctypes.Structure):
    """HopperMatmul of ops/csrc/cuda/hopper_matmul.h."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("weight", ctypes.c_void_p),
        ("type", ctypes.c_int),
        ("rows", ctypes.c_int64),
        ("inner", ctypes.c_int64),
        ("outer", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("out_stride", ctypes.c_int64),
        ("is_fp32", ctypes.c_bool),
        ("is_gated", ctypes.c_bool),
        ("processors", ctypes.c_int),
    )


def filled(value: np.uint16, *shape: int) -> Any:
    """Return an array of bf16's bits where vectors and boxes may begin."""
    size = int(np.prod(shape))
    raw = np.full(size + 8, value, np.uint16)
    start = -raw.ctypes.data % 16 // 2
    return raw[start : start + size].reshape(shape)


def bf16(values: Any) -> Any:
    """Return the bits of bf16, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def fp32(bits: Any) -> Any:
    """Return bf16 bits as fp32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def sequential(x: Any, weight: Any) -> Any:
    """Return x weight^T in fp32 of bf16 bits: steps of 16 along K, each summed one by one."""
    a, b = fp32(x), fp32(weight).T
    sums = np.zeros((len(a), b.shape[1]), np.float32)
    for k in range(0, len(b), 16):
        step = np.zeros_like(sums)
        for i in range(k, min(k + 16, len(b))):
            step += a[:, i : i + 1] * b[i]
        sums += step
    return sums


class HostMatmul(host_orders.Ordered):
    """The matmuls' ways over NumPy arrays. Raises RuntimeError with what no kernel may do."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.host_matmul.restype = ctypes.c_char_p
        self._library.host_grouped.restype = ctypes.c_char_p
        self._library.host_lets_early.restype = ctypes.c_bool
        self.ways = int(self._library.host_ways())
        self.set(seed=1)

    def set(self, seed: int, fault: str = "") -> None:
        """Set the order of threads, and which fault there is."""
        number = [*FAULTS].index(fault) + 1 if fault else 0
        self._library.host_settings(ctypes.c_uint64(seed), number)

    def lets_early(self) -> bool:
        """Return whether the last launch let the next one start before it had waited itself."""
        return bool(self._library.host_lets_early())

    def silu_mul(self, gates: Any, ups: Any) -> Any:
        """Return silu(gates) * ups of fp32 that are rounded to bf16 first, in fp32."""
        arrays = [fp32(bf16(gates)), fp32(bf16(ups)), np.empty_like(gates)]
        places = (array.ctypes.data_as(ctypes.c_void_p) for array in arrays)
        self._library.host_silu_mul(*places, ctypes.c_int64(gates.size))
        return arrays[-1]

    def run(self, way: int, x: Any, weight: Any, out: Any, processors: int) -> None:
        """Multiply views of bf16 bits into `out`: fp32, or uint16 that is gated if half as wide."""
        call = _call(x, weight, len(weight), out, processors)
        error = self._library.host_matmul(ctypes.byref(call), way)
        if error is not None:
            raise RuntimeError(error.decode())

    def run_grouped(
        self,
        way: int,
        x: Any,
        weight: Any,
        starts: Any,
        out: Any,
        processors: int,
        known: bool = False,
    ) -> None:
        """The same of rows that lie group by group, each with its part of the weight's rows. One
        row of x is what the only row of each group is made of. `known`: groups are there before the
        grid before is over.
        """
        groups = len(starts) - 1
        call = _call(x, weight, len(weight) // groups, out, processors)
        if len(x) == 1 < len(out):
            call.rows, call.x_stride = len(out), 0
        places = ctypes.c_void_p(starts.ctypes.data), ctypes.c_int64(groups)
        error = self._library.host_grouped(ctypes.byref(call), *places, way, int(known))
        if error is not None:
            raise RuntimeError(error.decode())


def _call(x: Any, weight: Any, outer: int, out: Any, processors: int) -> _Call:
    return _Call(
        x=x.ctypes.data,
        x_stride=x.strides[0] // 2,
        weight=weight.ctypes.data,
        type=1,
        rows=len(x),
        inner=x.shape[1],
        outer=outer,
        out=out.ctypes.data,
        out_stride=out.strides[0] // out.itemsize,
        is_fp32=out.dtype == np.float32,
        is_gated=out.shape[1] * 2 == outer,
        processors=processors,
    )
