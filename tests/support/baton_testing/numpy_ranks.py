"""What ranks meet in, over NumPy devices: the same rules as `baton_ops.ranks`, and held to.

Buffers are memory that all ranks have mapped, so ranks may be threads or processes. A rank arrives
by a count, waits for the others' counts and reads their parts. Whoever takes a half twice running,
makes another call than the others, or has its part elsewhere is told; a half that all have read is
overwritten, so that who reads it later has nothing of use.
"""

from __future__ import annotations

import ctypes
import functools
import time
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from baton_worker.engine.api import DeviceError
from baton_worker.engine.backends.device.operands import Norm
from baton_worker.engine.backends.device.rank_kernels import Exchange

Array = npt.NDArray[Any]

HEAD_BYTES = 4096
SPENT = 0xA5
"""What a half is filled with that all have read."""

ERROR, _LAST_HALF, _COUNT, _ARRIVED, _CALLS = 0, 1, 2, 64, 128
"""Words of a head, int32: of its owner, and from `_ARRIVED` and `_CALLS` on one of each rank."""
_HALF_REUSED = 9
_PAUSE_SECONDS = 2e-5


class NumpyRankKernels:
    """See `RankKernels`; a base of what launches on a device and norms."""

    _launch: Callable[..., None]
    add_norm: Callable[..., None]

    def exchange_head_bytes(self) -> int:
        """See `RankKernels.exchange_head_bytes`."""
        return HEAD_BYTES

    def rank_sum(self, part: Any, exchange: Exchange, out: Any) -> None:
        """See `RankKernels.rank_sum`."""
        self._launch(rank_sum, part, exchange, out)

    def rank_sum_norm(
        self, part: Any, exchange: Exchange, room: Any, residual: Any, norm: Norm, out: Any
    ) -> None:
        """See `RankKernels.rank_sum_norm`: nothing is in `room` behind it."""
        self.rank_sum(part, exchange, room)
        self.add_norm(room, residual, *norm, out)
        self._launch(lambda array: array.fill(np.nan), room)

    def rank_gather(self, part: Any, exchange: Exchange, out: Any) -> None:
        """See `RankKernels.rank_gather`."""
        self._launch(rank_gather, part, exchange, out)

    def rank_errors(self, exchange: Exchange, out: Any) -> None:
        """See `RankKernels.rank_errors`."""
        self._launch(rank_errors, exchange, out)


def rank_sum(part: Array, exchange: Exchange, out: Array) -> None:
    """Write out = the sum of all parts, from rank 0's on."""
    assert part.shape == out.shape, (part.shape, out.shape)
    parts = _met(part, exchange, out, b"sum")
    if parts is None:
        out[:] = np.nan
        return
    total = parts[0].copy()
    with np.errstate(invalid="ignore", over="ignore"):
        for other in parts[1:]:
            total += other
    out[:] = total


def rank_gather(part: Array, exchange: Exchange, out: Array) -> None:
    """Write out[r] = the part of rank r."""
    assert out.shape == (len(exchange.addresses), *part.shape), (part.shape, out.shape)
    parts = _met(part, exchange, out, b"gather")
    if parts is None:
        out.reshape(-1).view(np.uint8)[:] = 0xFF
        return
    for rank, other in enumerate(parts):
        out[rank] = other


def rank_errors(exchange: Exchange, out: Array) -> None:
    """Write out[r] = what the head of rank r says."""
    _check_out(out, exchange)
    out[:] = [head_words(exchange, rank)[ERROR] for rank in range(len(exchange.addresses))]


def _met(part: Array, exchange: Exchange, out: Array, kind: bytes) -> list[Array] | None:
    """Arrive, wait for all, and return their parts; None where one did not come in time."""
    head, half = head_words(exchange, exchange.rank), _half_of(part, exchange)
    _check_out(out, exchange)
    if part.shape[1] * part.itemsize % 16:
        raise DeviceError(f"rows of a part of {part.dtype}{list(part.shape)}: not whole vectors")
    if head[_LAST_HALF] == half + 1:
        head[ERROR] = head[ERROR] or _HALF_REUSED
        raise DeviceError(f"half {half} is taken twice running")
    head[_LAST_HALF] = half + 1
    head[_COUNT] += 1
    count, call = int(head[_COUNT]), _call(part, half, kind)
    if head[ERROR]:
        return None
    for rank in range(len(exchange.addresses)):
        there = head_words(exchange, rank)
        there[_CALLS + 8 * half + exchange.rank] = call
        there[_ARRIVED + exchange.rank] = count  # behind the call: stores are seen in order
    deadline = time.monotonic() + exchange.limit_ns / 1e9
    for rank in range(len(exchange.addresses)):
        while head[_ARRIVED + rank] < count:
            if time.monotonic() > deadline:
                head[ERROR] = 1 + rank
                return None
            time.sleep(_PAUSE_SECONDS)
        if head[_CALLS + 8 * half + rank] != call:
            raise DeviceError(f"rank {rank} makes another call than {kind.decode()} {part.shape}")
    _bytes(exchange, exchange.rank, 1 - half)[:] = SPENT
    return [
        _bytes(exchange, rank, half)[: part.nbytes].view(part.dtype).reshape(part.shape)
        for rank in range(len(exchange.addresses))
    ]


def _call(part: Array, half: int, kind: bytes) -> int:
    told = f"{kind.decode()} {part.dtype} {part.shape} {half}"
    return zlib.crc32(told.encode()) & 0x7FFFFFFF


def _half_of(part: Array, exchange: Exchange) -> int:
    at = part.ctypes.data - int(exchange.addresses[exchange.rank]) - HEAD_BYTES
    if at not in (0, exchange.half_bytes) or part.nbytes > exchange.half_bytes:
        raise DeviceError(f"a part of {part.nbytes} bytes at byte {at} begins no half")
    return at // exchange.half_bytes


def _check_out(out: Array, exchange: Exchange) -> None:
    begin = int(exchange.addresses[exchange.rank])
    end = begin + HEAD_BYTES + 2 * exchange.half_bytes
    if out.ctypes.data < end and out.ctypes.data + out.nbytes > begin:
        raise DeviceError("what is computed lies in the buffer that others read")


def head_words(exchange: Exchange, rank: int) -> npt.NDArray[np.int32]:
    """Return the words of a rank's head, as they are from here."""
    return _memory(int(exchange.addresses[rank]), HEAD_BYTES).view(np.int32)


def _bytes(exchange: Exchange, rank: int, half: int) -> npt.NDArray[np.uint8]:
    at = int(exchange.addresses[rank]) + HEAD_BYTES + half * exchange.half_bytes
    return _memory(at, exchange.half_bytes)


@functools.lru_cache(256)
def _memory(address: int, n_bytes: int) -> npt.NDArray[np.uint8]:
    return np.frombuffer((ctypes.c_uint8 * n_bytes).from_address(address), np.uint8)
