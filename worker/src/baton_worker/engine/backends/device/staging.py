"""Pieces of stored tensors on their way to the device: several are read at once, sent in order.

Owns the page-locked memory, all of the host's that a load takes beside what is converted through
(`model.files.BLOCK_BYTES` for each thread of a read), and the threads that fill it. A piece is some
rows of one tensor; those of one tensor and of the next are read alike. They are sent to the device
in the order in which they were asked for, whichever is there first, and it is the first in that
order whose failure is told. Knows no layout of weights.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from baton_worker.engine.backends.device.seam import Device, DType, Event, Tensor

READERS = 4
"""Reads at once, of `model.files.THREADS` threads each: network storage and NVMe want several. No
option, for more of them read no faster and a machine with fewer cores loses nothing."""

PIECE_BYTES = 12 << 20
"""Of a piece on the device: large enough that handing it from thread to thread, which takes the
interpreter's lock, is nothing beside reading it. A wider row is a piece too."""

AHEAD = 4
"""Pieces that the device takes, or that wait for those before them, while others are read: with
half as many readers would wait a tenth of their time, for reads do not take equally long."""

_HOST_TYPES: dict[DType, type[np.generic]] = {
    "bfloat16": np.uint16,
    "float32": np.float32,
    "uint8": np.uint8,
}


class Source(Protocol):
    """What can be sent: `StoredTensor`, or what is made of one while it is written."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes; it is sent by rows."""

    def write_to(self, out: npt.NDArray[Any], rows: slice) -> None:
        """Write these rows to `out`; called by readers, several at once."""

    def n_stored(self, rows: slice) -> int:
        """Return how many bytes of a file these rows stand for."""


class _Buffer(NamedTuple):
    """Page-locked memory, and the point at which its last content has been taken."""

    memory: npt.NDArray[np.uint8]
    taken: Event


class _Reading(NamedTuple):
    """A piece that is read, and where it is to go."""

    done: Future[None]
    memory: npt.NDArray[np.uint8]
    host: npt.NDArray[Any]
    to: Tensor
    n_stored: int


class Staging:
    """Sends stored tensors to memory of the device; one thread asks. A context: leaving it ends the
    readers, each behind the piece that it is at, and drops what none has begun.

    Args:
        on_sent: told of the bytes in the file of each piece that was given to the device.
    """

    def __init__(self, device: Device, on_sent: Callable[[int], None]) -> None:
        self._device = device
        self._on_sent = on_sent
        self._piece_bytes = PIECE_BYTES
        self._n_buffers = 0
        self._free: deque[_Buffer] = deque()
        self._reading: deque[_Reading] = deque()
        self._readers = ThreadPoolExecutor(READERS, "weights")

    def __enter__(self) -> Staging:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the readers."""
        self._readers.shutdown(cancel_futures=True)

    def send(self, stored: Source, to: Tensor, dtype: DType) -> None:
        """Have a tensor read and sent as `dtype`; `finish` tells when it is there.

        Raises:
            CheckpointError: of this tensor, or of one before it.
            DeviceError: the device refuses.
        """
        kind = np.dtype(_HOST_TYPES[dtype])
        n_rows, row_bytes = stored.shape[0], math.prod(stored.shape[1:]) * kind.itemsize
        if row_bytes > self._piece_bytes:
            self._grow(row_bytes)
        step = self._piece_bytes // row_bytes
        for start in range(0, n_rows, step):
            rows = slice(start, min(start + step, n_rows))
            self._read(stored, rows, self._device.rows(to, rows.start, rows.stop), kind)

    def finish(self) -> None:
        """Return once everything is on the device.

        Raises:
            As `send` does.
        """
        while self._reading:
            self._pass_on()
        self._device.synchronise()

    def _read(self, stored: Source, rows: slice, to: Tensor, kind: np.dtype[Any]) -> None:
        memory = self._empty_memory()
        shape = (rows.stop - rows.start, *stored.shape[1:])
        host = memory[: math.prod(shape) * kind.itemsize].view(kind).reshape(shape)
        done = self._readers.submit(stored.write_to, host, rows)
        self._reading.append(_Reading(done, memory, host, to, stored.n_stored(rows)))

    def _empty_memory(self) -> npt.NDArray[np.uint8]:
        while self._reading and self._reading[0].done.done():
            self._pass_on()
        if self._n_buffers < READERS + AHEAD:
            self._n_buffers += 1
            return self._device.host(self._piece_bytes)
        while not self._free:
            self._pass_on()
        buffer = self._free.popleft()
        buffer.taken.wait()
        return buffer.memory

    def _pass_on(self) -> None:
        """Send the piece that is next in order, once it has been read."""
        piece = self._reading.popleft()
        piece.done.result()
        self._device.upload(piece.host, piece.to)
        self._free.append(_Buffer(piece.memory, self._device.record()))
        self._on_sent(piece.n_stored)

    def _grow(self, n_bytes: int) -> None:
        self.finish()
        self._free.clear()
        self._n_buffers, self._piece_bytes = 0, n_bytes
