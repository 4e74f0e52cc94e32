"""The ops of FP8 as functions of the host over NumPy arrays.

Owns the layout of the calls, the faults that a test can plant, and the sums that every way on
Hopper must have the bits of. E is float32, or bfloat16 as uint16; e4m3 numbers are their bits.
Knows no test.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from baton_testing import host_cuda, host_matmul, host_orders
from baton_testing.e4m3_numbers import number
from baton_testing.host_matmul import Fault

Array = npt.NDArray[Any]
BLOCK_SHIFT = 7
"""Rows of a block, as a power of two: `kBlockShift` in scaled.h."""
WAYS = range(1, 8)
"""Those on Hopper: `ScaledWay` in hopper_scaled.h."""
_NUMBERS = np.array([number(bits) for bits in range(256)], np.float32)

_INSTRUCTIONS = host_cuda.INSTRUCTIONS | {"rcp.approx.ftz.f32 %0, %1;": "Reciprocal"}
UNIT = host_cuda.Unit(
    ("scaled.cu",),
    "scaled_entry.cc",
    lambda _, text: host_cuda.rewritten(text, _INSTRUCTIONS),
    stand_ins=("mma.cuh",),
)
_OF_HOPPER = host_matmul.INSTRUCTIONS | {
    "griddepcontrol.launch_dependents;": "LetGridsStart",
    "bar.sync %0, %1;": "SyncNamed",
    "bar.arrive %0, %1;": "ArriveNamed",
}
_READ_SCALES = "const float* rows_[kRows]"
FAULTS = {
    "scales of x are read four at once wherever they begin": Fault(
        "scaled_feed.cuh", "IsVector(in.x_scales)", "(PLANTED || IsVector(in.x_scales))"
    ),
    "scales of the weight are read four at once wherever they begin": Fault(
        "scaled_feed.cuh", "IsVector(in.weight_scales)", "(PLANTED || IsVector(in.weight_scales))"
    ),
    "who asks for the weight is waited for no longer": Fault(
        "scaled_feed.cuh",
        "      Await(ring_.x_empty + stage.s, stage.phase ^ 1);\n"
        "      if (i >= Way::kXStages) LoadWeight();\n"
        "      Arrive(ring_.x_full + stage.s);",
        "if (PLANTED) Arrive(ring_.x_full + stage.s);"
        " Await(ring_.x_empty + stage.s, stage.phase ^ 1);\n"
        "      if (i >= Way::kXStages) LoadWeight();\n"
        "      if (!PLANTED) Arrive(ring_.x_full + stage.s);",
    ),
    "a range's last product is not waited for": Fault(
        "scaled_turned.cuh",
        "AwaitProducts<0>();\n        Finish(second",
        "if (!PLANTED) AwaitProducts<0>();\n        Finish(second",
    ),
    "a range of one's own is not waited for": Fault(
        "scaled_ranges.cuh", "AwaitProducts<0>();", "if (!PLANTED) AwaitProducts<0>();"
    ),
    "a tile's total is taken before it is given": Fault(
        "scaled_ranges.cuh", "if (range > 0) TakeTurn();", "if (range > 0 && !PLANTED) TakeTurn();"
    ),
    "a row is multiplied before all of it is there": Fault(
        "scaled_row.cuh",
        "PublishShared();\n    __syncthreads()",
        "PublishShared();\n    if (!PLANTED) __syncthreads()",
    ),
    "a tile's sums are added before all of them are there": Fault(
        "scaled_row.cuh",
        "__syncthreads();\n      if (warp_",
        "if (!PLANTED) __syncthreads();\n      if (warp_",
    ),
    "a tile's sums lie where the last one's are still added": Fault(
        "scaled_row.cuh", "buffer ^= 1", "buffer ^= PLANTED ? 0 : 1"
    ),
    "a row's weight is multiplied before others have copied it": Fault(
        "scaled_row.cuh", "    MeetGroup();\n    const", "    if (!PLANTED) MeetGroup();\n    const"
    ),
    "a row's weight is multiplied before it has come": Fault(
        "scaled_row.cuh",
        "    AwaitCopies<kRowStages - 2>();",
        "    if (PLANTED) AwaitCopies<kRowStages - 1>(); else AwaitCopies<kRowStages - 2>();",
    ),
    "a stage is copied to before it is multiplied": Fault(
        "scaled_row.cuh",
        "begun_ + 1 < kRowStages",
        "begun_ + (PLANTED ? 0 : 1) < kRowStages",
    ),
}


def _of_hopper(name: str, text: str) -> str:
    """Return C++ whose scales that a thread reads itself are looked after."""
    if name == "scaled_feed.cuh":
        assert _READ_SCALES in text, "another way to read scales"
        text = text.replace(_READ_SCALES, "host_cuda::ReadFloats rows_[kRows]")
    text = host_matmul.with_faults(name, text, FAULTS)
    return host_cuda.rewritten(text, _OF_HOPPER)


TURNED = host_cuda.Unit(
    ("scaled_turned.cu", "scaled_row.cu", "tensor_map.cc"),
    "scaled_turned_entry.cc",
    _of_hopper,
    language="hopper.h",
    stand_ins=("mma.cuh", "wgmma.cuh"),
)
"""The products for Hopper."""


class ScaledRows(NamedTuple):
    """Rows of e4m3 numbers: values uint8[N, K]; scales f32[N, groups], or of a weight
    f32[N / 128, groups], of blocks of 128 rows.
    """

    values: Array
    scales: Array


class HostScaled(host_orders.Ordered):
    """The compiled library. Raises RuntimeError with what a kernel did that no kernel may."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.host_quantise.restype = ctypes.c_char_p
        self._library.host_scaled_matmul.restype = ctypes.c_char_p

    def set(self, seed: int) -> None:
        """Set the order of threads."""
        self._library.host_settings(ctypes.c_uint64(seed), 9)

    def skip(self, barrier: tuple[str, int] = ("", 0)) -> None:
        """Have every thread pass a barrier by: a header, and the line; none of no line."""
        self._library.host_skip(barrier[0].encode(), barrier[1])

    def quantise(self, x: Array, group: int) -> ScaledRows:
        """Quantise rows of E, at any distance, in groups of so many columns."""
        rows, columns = x.shape
        out = ScaledRows(
            np.full((rows, columns), 0x55, np.uint8),
            np.full((rows, -(-columns // group)), np.nan, np.float32),
        )
        is_bf16 = int(x.dtype == np.uint16)
        stride = x.strides[0] // x.itemsize
        check(self._library.host_quantise(_words(x, stride, is_bf16, rows, columns, group, *out)))
        return out

    def matmul(
        self,
        x: ScaledRows,
        weight: ScaledRows,
        group: int,
        out: Array,
        is_gated: bool = False,
        row: Array | None = None,
        starts: Array | None = None,
    ) -> None:
        """Multiply into `out`, of E, its rows at any distance.

        Args:
            row: i32[N], which row of x each is.
            starts: i32[X + 1], where each expert's rows begin.
        """
        words = _product(x, weight, group, out, is_gated, row, starts)
        check(self._library.host_scaled_matmul(words))


class HostTurned(host_orders.Ordered):
    """The compiled products for Hopper, by way. Raises as `HostScaled` does."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.host_scaled_turned.restype = ctypes.c_char_p
        self._library.host_scaled_row.restype = ctypes.c_char_p
        self._library.host_silu_mul.restype = self._library.host_add_scaled.restype = None
        self.ways = range(1, int(self._library.host_scaled_ways()))

    @contextmanager
    def planted(self, fault: str) -> Iterator[None]:
        """Have a fault meanwhile."""
        self._library.host_plant([*FAULTS].index(fault) + 1)
        try:
            yield
        finally:
            self._library.host_plant(0)

    def set(self, seed: int) -> None:
        """Set the order of threads."""
        self._library.host_settings(ctypes.c_uint64(seed), 9)

    def skip(self, barrier: tuple[str, int] = ("", 0)) -> None:
        """Have every thread pass a barrier by, as `HostScaled.skip`."""
        self._library.host_skip(barrier[0].encode(), barrier[1])

    def matmul(
        self,
        way: int,
        x: ScaledRows,
        weight: ScaledRows,
        group: int,
        out: Array,
        is_gated: bool = False,
        row: Array | None = None,
        starts: Array | None = None,
        processors: int = 3,
        beside: ScaledRows | None = None,
        beside_rows: int = 0,
    ) -> None:
        """Multiply as `HostScaled.matmul` does, by one way and so many multiprocessors; the last
        `beside_rows` of `out` with the weight `beside` instead of an expert's.
        """
        words = _product(x, weight, group, out, is_gated, row, starts)
        rows = [ctypes.c_int64(len(each.values)) for each in (x, weight)]
        places = [None] * 2 if beside is None else [each.ctypes.data for each in beside]
        more = (ctypes.c_void_p * 2)(*places), ctypes.c_int64(beside_rows)
        check(self._library.host_scaled_turned(words, way, processors, *rows, *more))

    def of_row(
        self,
        x: Array,
        weight: ScaledRows,
        group: int,
        out: Array,
        is_gated: bool = False,
        starts: Array | None = None,
        processors: int = 3,
        known: bool = False,
        beside: tuple[Array, ScaledRows, Array] | None = None,
    ) -> None:
        """Multiply a row E[1, K] that the kernel quantises itself; of experts all rows are it, or
        x E[N, K] has as many. `known`: `starts` are there before it waits. `beside`: a row, its
        weight, and its output.
        """
        nothing = ScaledRows(np.empty(0, np.uint8), np.empty(0, np.float32))
        words = _product(nothing, weight, group, out, is_gated, None, starts)
        n_weight_rows = ctypes.c_int64(len(weight.values))
        rows = ctypes.c_void_p(x.ctypes.data), ctypes.c_int64(len(x))
        more: list[Array] = []
        if beside is not None:
            more = [beside[0], *beside[1], beside[2]]
        places = [each.ctypes.data for each in more] or [None] * 4
        given = (ctypes.c_void_p * 4)(*places)
        run = self._library.host_scaled_row
        check(run(words, *rows, processors, n_weight_rows, known, given))

    def define(
        self,
        x: ScaledRows,
        weight: ScaledRows,
        group: int,
        out: Array,
        is_gated: bool = False,
        row: Array | None = None,
        starts: Array | None = None,
    ) -> None:
        """Write the bits that all ways must have; arguments are those of `HostScaled.matmul`."""
        begins = np.array([0, len(out)]) if starts is None else starts
        n_experts = len(begins) - 1
        for expert, (first, last) in enumerate(itertools.pairwise(begins.tolist())):
            if first == last:
                continue
            of = np.arange(first, last) if row is None else row[first:last]
            own = (np.split(part, n_experts)[expert] for part in weight)
            sums = self.sums_of_ranges(
                ScaledRows(x.values[of], x.scales[of]), ScaledRows(*own), group
            )
            out[first:last] = self._gated(sums) if is_gated else host_matmul.bf16(sums)

    @np.errstate(invalid="ignore")
    def sums_of_ranges(self, x: ScaledRows, weight: ScaledRows, group: int) -> Array:
        """Return f32[rows of x, rows of the weight]: each range of 128 summed number by number,
        times its rows' scales' product, and that added to those before, rounded once; or of rows
        that are a group added first, then scaled.
        """
        a, b = (_in_ranges(_NUMBERS[rows.values]) for rows in (x, weight))
        ranges = np.zeros((a.shape[1], a.shape[2], b.shape[2]), np.float32)
        products = np.empty_like(ranges)
        for of_x, of_weight in zip(a, b, strict=True):
            ranges += np.multiply(of_x[:, :, None], of_weight[:, None, :], out=products)
        if group == x.values.shape[1]:
            ranges = np.ascontiguousarray(np.add.accumulate(ranges)[-1:])
        of_rows = np.repeat(weight.scales, len(weight.values) // len(weight.scales), axis=0)
        total = np.zeros(ranges.shape[1:], np.float32)
        for sums, of_x, of_weight in zip(ranges, x.scales.T, of_rows.T, strict=True):
            scales = of_x[:, None] * of_weight
            places = [ctypes.c_void_p(each.ctypes.data) for each in (sums, scales, total)]
            self._library.host_add_scaled(*places, ctypes.c_int64(total.size))
        return total

    def _gated(self, sums: Array) -> Array:
        """Return silu(gate) * up in bf16, of gates and ups that are rounded to it first."""
        rounded = host_matmul.fp32(host_matmul.bf16(sums))
        gates, ups = (np.ascontiguousarray(part) for part in np.split(rounded, 2, axis=1))
        made = np.empty_like(gates)
        places = [ctypes.c_void_p(each.ctypes.data) for each in (gates, ups, made)]
        self._library.host_silu_mul(*places, ctypes.c_int64(made.size))
        return np.asarray(host_matmul.bf16(made))


def _in_ranges(numbers: Array) -> Array:
    """Return f32[128, ranges, rows] of f32[rows, columns]: behind a row's last there are zeros."""
    rows, columns = numbers.shape
    n_ranges = -(-columns // 128)
    padded = np.zeros((rows, n_ranges * 128), np.float32)
    padded[:, :columns] = numbers
    return np.ascontiguousarray(padded.reshape(rows, n_ranges, 128).T)


def _product(
    x: ScaledRows,
    weight: ScaledRows,
    group: int,
    out: Array,
    is_gated: bool,
    row: Array | None,
    starts: Array | None,
) -> Any:
    sizes = len(out), weight.values.shape[1], out.shape[1], group, int(is_gated)
    n_experts = 0 if starts is None else len(starts) - 1
    of_experts = [0 if each is None else each for each in (row, starts)]
    to = out, out.strides[0] // out.itemsize, int(out.dtype == np.uint16)
    shift = 0 if len(weight.scales) == len(weight.values) else BLOCK_SHIFT
    assert len(weight.scales) == len(weight.values) >> shift
    return _words(*x, *weight, shift, *sizes, *of_experts, n_experts, *to)


def _words(*values: Any) -> Any:
    words = [int(v.ctypes.data) if hasattr(v, "ctypes") else int(v) for v in values]
    return (ctypes.c_int64 * len(words))(*words)


def check(error: bytes | None) -> None:
    """Raise RuntimeError with what a library says is wrong, if anything is."""
    if error is not None:
        raise RuntimeError(error.decode())
