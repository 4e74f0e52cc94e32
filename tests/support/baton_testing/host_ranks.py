"""A group of tensor-parallel ranks as functions of the host, over `host_cuda`: ranks side by side.

Owns what stands for the instructions that ranks meet by, the faults that a test can plant, the
exchange buffers, and the ordered sum that every rank must have the bits of. Knows no test.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from baton_testing import host_cuda, host_orders
from baton_testing.host_matmul import bf16, fp32

INSTRUCTIONS = {
    "griddepcontrol.wait;": "WaitForGrids",
    "griddepcontrol.launch_dependents;": "LetGridsStartAtOnce",
    "fence.acq_rel.sys;": "FenceOfSystem",
    "st.relaxed.sys.global.u32 [%0], %1;": "StoreFlag",
    "ld.acquire.sys.global.u32 %0, [%1];": "AcquireFlag",
    "ld.relaxed.gpu.global.s32 %0, [%1];": "LoadWord",
    "st.relaxed.sys.global.u64 [%0], %1;": "PushWordOfPart",
    "ld.relaxed.sys.global.u64 %0, [%1];": "PollWordOfPart",
    "mov.u64 %0, %%globaltimer;": "ReadTimer",
}
_ON_HOST = (
    ("rank_sum.cuh", "  return *at;", "  return host_cuda::ReadVector(at);"),
    ("rank_sum.cuh", "  *at = value;", "  host_cuda::WriteVector(at, value);"),
    # A block is a warp, so that a call has several of them with few fibers.
    ("rank_sum.cuh", "int kRankThreads = 256;", "int kRankThreads = 32;"),
    ("rank_sum.cuh", "int kMostRankThreads = 512;", "int kMostRankThreads = 32;"),
    # Some parts that are normed are pushed, and some are not.
    ("rank_team.cuh", "kMostPushedRows = 16,", "kMostPushedRows = 3,"),
    ("rank_team.cuh", "kMostPushedVectors = 1024;", "kMostPushedVectors = 64;"),
)


@dataclass(frozen=True)
class Fault:
    """What a header has once, and what a test can have instead: PLANTED tells whether it does."""

    header: str
    right: str
    planted: str


_TEAM, _SUM, _NORM, _PUSH = "rank_team.cuh", "rank_sum.cuh", "rank_norm.cuh", "rank_push.cuh"
FAULTS = {
    "flags are read without acquiring": None,  # in shims/ranks.h
    "ranks arrive without a fence": Fault(_TEAM, "FenceSystem();", "if (!PLANTED) FenceSystem();"),
    "parts are read without a meeting": Fault(
        _SUM,
        "if (team.Meet()) {\n    sum.template SumRange<false>",
        "if (PLANTED || team.Meet()) {\n    sum.template SumRange<false>",
    ),
    "shares are read without a second meeting": Fault(
        _SUM, "if (team.Meet()) {\n    for", "if (PLANTED || team.Meet()) {\n    for"
    ),
    "a block arrives before its threads have written": Fault(
        _SUM, "__syncthreads();", "if (!PLANTED) __syncthreads();"
    ),
    "ranks are summed in another order": Fault(
        _SUM, "ToFloat(parts.rank[r].at[i])", "ToFloat(parts.rank[PLANTED ? kRanks - r : r].at[i])"
    ),
    "a rank that is ahead is waited for": Fault(
        _TEAM,
        "static_cast<int32_t>(flag - count) >= 0",
        "(PLANTED ? flag == count : static_cast<int32_t>(flag - count) >= 0)",
    ),
    "flags are compared as if they never wrapped around": Fault(
        _TEAM,
        "HasReached(uint32_t flag, uint32_t count) {",
        "HasReached(uint32_t flag, uint32_t count) {\n  if (PLANTED) return flag >= count;",
    ),
    "a block forgets how often it met": Fault(
        _TEAM,
        "own_->meetings[blockIdx.x] = count_;",
        "if (!PLANTED) own_->meetings[blockIdx.x] = count_;",
    ),
    "the wait has no end": Fault(_TEAM, "> limit_ns)", "> (PLANTED ? ~0ull : limit_ns))"),
    "who gave up arrives again": Fault(
        _TEAM, "if (!are_here) error_ = 1;", "if (!PLANTED && !are_here) error_ = 1;"
    ),
    "who gave up waits again": Fault(
        _TEAM, "if (error_ != 0) return", "if (!PLANTED && error_ != 0) return"
    ),
    "who gave up leaves no word": Fault(
        _TEAM,
        "atomicMax(&own_->error, 1 + rank);",
        "if (!PLANTED) atomicMax(&own_->error, 1 + rank);",
    ),
    "who gave up leaves what was there": Fault(
        _SUM, "    sum.SpoilRange(0, p.vectors);", "    if (!PLANTED) sum.SpoilRange(0, p.vectors);"
    ),
    "rows are normed without a meeting": Fault(
        _NORM, "if (team.Meet() &&", "if ((PLANTED || team.Meet()) &&"
    ),
    "rows of parts are counted by threads": Fault(
        _NORM, "blockIdx.x * columns", "blockIdx.x * (PLANTED ? 8 * blockDim.x : columns)"
    ),
    "rows are taken whatever is beside them": Fault(
        _PUSH, "has_come &= static_cast", "has_come &= PLANTED || static_cast"
    ),
    "rows are taken when their first word has come": Fault(
        _PUSH,
        "(word >> 32) == number_",
        "(word >> 32) == number_ || (PLANTED && i > 0)",
    ),
    "rows are pushed to one half": Fault(
        _PUSH, "exchange_.half * kMostRanks", "(PLANTED ? 0 : exchange_.half) * kMostRanks"
    ),
    "rows are pushed to where others were": Fault(
        _PUSH, "kMostPushedRows + blockIdx.x;", "kMostPushedRows + (PLANTED ? 0 : blockIdx.x);"
    ),
    "rows are pushed for a meeting that is not counted": Fault(
        _TEAM,
        "    ++count_;\n    const int missing",
        "    if (!PLANTED) ++count_;\n    const int missing",
    ),
    "the wait for a row has no end": Fault(
        _PUSH, "> exchange_.limit_ns)", "> (PLANTED ? ~0ull : exchange_.limit_ns))"
    ),
    "each of several is waited for anew": Fault(
        _PUSH, "if (began_ == 0) began_", "if (PLANTED || began_ == 0) began_"
    ),
    "who gave up pushes again": Fault(
        _TEAM, "error_ == 0 ? meet(count_)", "PLANTED || error_ == 0 ? meet(count_)"
    ),
    "its own head alone is read": Fault(
        _SUM,
        "p.exchange.buffers[rank])->error",
        "p.exchange.buffers[PLANTED ? p.exchange.rank : rank])->error",
    ),
}


def _rewritten(name: str, text: str) -> str:
    for header, right, on_host in _ON_HOST:
        if header == name:
            text = _once(name, text, right, on_host)
    for number, fault in enumerate(FAULTS.values(), start=1):
        if fault is not None and fault.header == name:
            planted = fault.planted.replace("PLANTED", f"(host_cuda::planted == {number})")
            text = _once(name, text, fault.right, planted)
    return host_cuda.rewritten(text, INSTRUCTIONS)


def _once(name: str, text: str, old: str, new: str) -> str:
    if text.count(old) != 1:
        raise ValueError(f"{name} does not have {old!r} once: fix host_ranks.py")
    return text.replace(old, new)


UNIT = host_cuda.Unit(("rank_sum.cu",), "ranks_entry.cc", _rewritten, language="ranks.h")

TYPES = {"fp32": 0, "bf16": 1}
WAYS = ("chosen", "one shot", "two shots")
GATHER, ERRORS, NORM, APART = "gather", "errors", "norm", "sum, then norm"
"""`NORM` is the sum normed in the launch that makes it; `APART` in one of its own."""
_KINDS = {GATHER: 1, ERRORS: 2, NORM: 3, APART: 4}
"""Of calls, as ranks_entry.cc has them; 0 is a sum, in one of the ways."""


class _Call(ctypes.Structure):
    """HostCall of ranks_entry.cc."""

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in (
            "part", "bytes", "kind", "part_type", "out_type", "way", "half", "out",
            "columns", "residual", "weight", "room",
        )
    )  # fmt: skip


@dataclass
class Normed:
    """What a sum is added to and normed by: on every rank the same, in its own memory."""

    residuals: Any
    """As the sum, [ranks, rows, columns]; the calls write to them."""
    weight: Any
    room: Any

    def of(self, rank: int) -> tuple[int, int, int, int]:
        """Return how a rank's call is told of it."""
        places = (self.residuals[rank], self.weight, self.room[rank])
        columns = int(self.residuals.shape[-1])
        return columns, *(place.ctypes.data for place in places)  # type: ignore[return-value]


@dataclass
class Call:
    """One call of all ranks: their parts, which are bits of a type, and what each of them gets.

    A call of ERRORS has no parts, takes no half, and gets i32[ranks].
    """

    parts: Any
    """uint16 or fp32 [ranks, vectors * 16 bytes]."""
    way: str
    out_type: str
    half: int
    outs: Any
    normed: Normed | None = None

    def _types(self) -> tuple[int, int]:
        part = "fp32" if self.parts.dtype == np.float32 else "bf16"
        return TYPES[part], TYPES[self.out_type]

    def of(self, rank: int) -> _Call:
        """Return how a rank makes it."""
        part, out = self.parts[rank], self.outs[rank]
        way = 0 if self.way in _KINDS else WAYS.index(self.way)
        where = (_KINDS.get(self.way, 0), *self._types(), way, self.half, out.ctypes.data)
        norm = (0, 0, 0, 0) if self.normed is None else self.normed.of(rank)
        return _Call(part.ctypes.data, part.nbytes, *where, *norm)

    def normed_bits(self) -> list[bytes]:
        """Return what each rank has of a sum that was normed: the residual, and that normed."""
        assert self.normed is not None, "the sum was not normed"
        pairs = zip(self.normed.residuals, self.outs, strict=True)
        return [residual.tobytes() + out.tobytes() for residual, out in pairs]

    def wanted(self) -> Any:
        """Return the bits that every rank must have."""
        if self.way == ERRORS:
            return np.zeros_like(self.outs[0])
        if self.way == GATHER:
            return self.parts
        values = self.parts if self.parts.dtype == np.float32 else fp32(self.parts)
        total = values[0].copy()
        for part in values[1:]:
            total += part
        return total if self.out_type == "fp32" else bf16(total)


def call(rng: Any, ranks: int, vectors: int, way: str, part: str, out: str, half: int) -> Call:
    """Return a call on drawn parts, which cancel enough for their order to show."""
    elements = vectors * (4 if part == "fp32" else 8)
    values = rng.standard_normal((ranks, elements)) * 2.0 ** rng.integers(-6, 7, (ranks, elements))
    bits = values.astype(np.float32) if part == "fp32" else bf16(values)
    dtype = np.float32 if (part if way == GATHER else out) == "fp32" else np.uint16
    shape = (ranks, ranks, elements) if way == GATHER else (ranks, elements)
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return Call(bits, way, out, half, aligned(size).view(dtype).reshape(shape))


def norm_call(rng: Any, ranks: int, rows: int, columns: int, kind: str, half: int) -> Call:
    """Return a call whose sum is normed, of parts of a kind."""
    vectors = rows * columns // (4 if kind == "fp32" else 8)
    made = call(rng, ranks, vectors, "chosen", kind, kind, half)
    made.way = NORM
    drawn = rng.standard_normal((2, rows, columns)).astype(np.float32)
    residual, weight = drawn if kind == "fp32" else bf16(drawn)
    residuals = aligned(ranks * residual.nbytes).view(residual.dtype)
    residuals = residuals.reshape(ranks, rows, columns)
    residuals[...] = residual
    of_norm = aligned(weight[0].nbytes).view(weight.dtype)
    of_norm[...] = weight[0]
    room = aligned(residuals.nbytes).view(residual.dtype).reshape(residuals.shape)
    made.normed = Normed(residuals, of_norm, room)
    return made


def errors(ranks: int) -> Call:
    """Return a call that reads the heads, in which nobody has given up."""
    outs = aligned(ranks * ranks * 4).view(np.int32).reshape(ranks, ranks)
    return Call(np.empty((ranks, 0), np.float32), ERRORS, "fp32", 0, outs)


def aligned(size: int) -> Any:
    """Return so many bytes, none of which is zero, where a buffer may begin."""
    raw = np.full(size + 256, 0xA5, np.uint8)
    start = -raw.ctypes.data % 256
    return raw[start : start + size]


class HostGroup(host_orders.Ordered):
    """Ranks and their exchange buffers. Raises RuntimeError with what no kernel may do."""

    def __init__(self, path: Path, ranks: int, half_bytes: int, seed: int, fault: str = "") -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.host_ranks.restype = ctypes.c_char_p
        self._library.host_nanoseconds.restype = ctypes.c_uint64
        self._library.host_launches.restype = ctypes.c_int64
        number = [*FAULTS].index(fault) + 1 if fault else 0
        self._library.host_settings(ctypes.c_uint64(seed), number, 1)
        self._seed, self._number = seed, number
        self.ranks, self.half_bytes = ranks, half_bytes
        self._head = int(self._library.host_head_bytes())
        self.buffers = [aligned(self._head + 2 * half_bytes) for _ in range(ranks)]
        for buffer in self.buffers:
            buffer[: self._head] = 0

    def ignore_races(self) -> None:
        """Let what nothing orders pass."""
        self._library.host_settings(ctypes.c_uint64(self._seed), self._number, 0)

    def count_from(self, count: int) -> None:
        """Set every block's meetings, and all flags, as after so many."""
        for buffer in self.buffers:
            buffer[256 : self._head].view(np.uint32)[...] = count

    def errors(self) -> list[int]:
        """Return every rank's error."""
        return [int(buffer[:4].view(np.int32)[0]) for buffer in self.buffers]

    def launches(self) -> int:
        """Return how many kernels a rank launched in the last run."""
        return int(self._library.host_launches())

    def nanoseconds(self) -> int:
        """Return how often the last run read the clock, which moves by that."""
        return int(self._library.host_nanoseconds())

    def run(
        self,
        calls: Sequence[Call],
        limit_ns: int = 1 << 40,
        made: Sequence[int] = (),
        still: tuple[int, int] = (-1, -1),
    ) -> None:
        """Make calls on all ranks.

        Args:
            made: how many each rank makes before it dies.
            still: a rank and the call in which, when it has met the others, it reads nothing until
                these have made all of theirs.
        """
        counts = made or [len(calls)] * self.ranks
        of_ranks = [(_Call * len(calls))(*(c.of(r) for c in calls)) for r in range(self.ranks)]
        buffers = np.array([buffer.ctypes.data for buffer in self.buffers], np.int64)
        places = np.array([ctypes.addressof(calls) for calls in of_ranks], np.int64)
        counted = np.array(counts, np.int64)
        words = (buffers.ctypes.data, self.ranks, self.half_bytes, limit_ns, 200)
        group = (ctypes.c_int64 * 9)(*words, places.ctypes.data, counted.ctypes.data, *still)
        error = self._library.host_ranks(group)
        if error is not None:
            raise RuntimeError(error.decode())
