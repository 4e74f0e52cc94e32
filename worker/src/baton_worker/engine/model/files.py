"""A file of tensors, mapped so that parts of it can be named, and read by `pread`.

Owns how bytes come from the disk. A map alone would do for reading, but ends the process by SIGBUS
when the file is cut or the storage fails, faults in small steps, and counts as the process's
memory. So views of the map only say where something lies. Knows no format and no dtype.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from baton_ops.files import END_OF_FILE, NO_ERROR, Number, StoredRows, read_rows

BLOCK_BYTES = 1 << 20
"""What a thread reads at once, and looks at or converts while it is in its core's cache."""

THREADS = min(4, len(os.sched_getaffinity(0)))
"""Of one read of many blocks: copying from the page cache is a processor's work, 3 GB/s of each."""


class ReadError(Exception):
    """Bytes of a file could not be read; the message names the file."""


class MappedFile:
    """A file that is open for as long as something knows it.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is empty.

    Attributes:
        map: all its bytes, read-only.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        mapped = mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ)
        self.map: npt.NDArray[np.uint8] = np.frombuffer(mapped, np.uint8)

    def read_to(self, out: npt.NDArray[Any], view: npt.NDArray[Any]) -> None:
        """Read what a contiguous view of the map shows to `out`, contiguous and of as many bytes.

        Raises:
            ReadError: the file ends before, or the storage fails.
        """
        at, left = self._offset(view), out.reshape(-1).view(np.uint8).data
        if len(left) >= BLOCK_BYTES:
            self._advise(at, len(left))
        while left:
            try:
                n_read = os.preadv(self._descriptor, [left], at)
            except OSError as error:
                raise self._failed(error.errno or 0, at, len(left)) from error
            if not n_read:
                raise self._failed(END_OF_FILE, at, len(left))
            at, left = at + n_read, left[n_read:]

    def content(self, view: npt.NDArray[np.uint8]) -> bytes:
        """Read what a contiguous view of the map shows.

        Raises:
            ReadError: see `read_to`.
        """
        out = np.empty(view.shape, np.uint8)
        self.read_to(out, view)
        return out.tobytes()

    def convert_to(self, out: npt.NDArray[Any], view: npt.NDArray[Any], stored: Number) -> bool:
        """Read what a view of the map shows to `out`, by several threads and without the GIL; say
        whether all of it is finite.

        Rows that have gaps between them, which is where columns were cut away, are read with what
        lies in the gaps.

        Args:
            out: contiguous: u8 for e4m3; for other numbers f32, or u16, the bits of bfloat16.
            view: of one dimension, or two of which the second is contiguous.

        Raises:
            ReadError: see `read_to`.
        """
        if not view.size:
            return True
        n_rows = len(view) if view.ndim == 2 else 1
        row_items = view.size // n_rows
        pitch = view.strides[0] if n_rows > 1 else row_items * view.itemsize
        at, span = self._offset(view), (n_rows - 1) * pitch + row_items * view.itemsize
        if span >= BLOCK_BYTES:
            self._advise(at, span)
        rows = StoredRows(self._descriptor, at, n_rows, row_items, pitch, stored)
        told = read_rows(rows, out.reshape(-1), BLOCK_BYTES, THREADS)
        if told.error != NO_ERROR:
            raise self._failed(told.error, told.at, at + span - told.at)
        return told.is_finite

    def _failed(self, error: int, at: int, n_left: int) -> ReadError:
        if error == END_OF_FILE:
            return ReadError(
                f"{self.path}: ends at byte {at}, {n_left} bytes early: it was longer when it was "
                "opened"
            )
        return ReadError(f"{self.path}: {os.strerror(error)} at byte {at}")

    def blocks(self, view: npt.NDArray[Any]) -> Iterator[tuple[slice, npt.NDArray[Any]]]:
        """Read a view of the map by some rows at a time: each block is valid until the next.

        Rows that have gaps between them, which is where columns were cut away, are read with what
        lies in the gaps.

        Args:
            view: each row of it contiguous.

        Raises:
            ReadError: see `read_to`.
        """
        if not view.size:
            return
        pitch = max(view.strides[0], view[0].nbytes)
        step = max(BLOCK_BYTES // pitch, 1)
        memory = np.empty(min(step, len(view)) * pitch, np.uint8)
        for start in range(0, len(view), step):
            rows = slice(start, min(start + step, len(view)))
            yield rows, self._block(view[rows], pitch, memory)

    def _block(
        self, view: npt.NDArray[Any], pitch: int, memory: npt.NDArray[np.uint8]
    ) -> npt.NDArray[Any]:
        n_bytes = (len(view) - 1) * pitch + view[0].nbytes
        at = self._offset(view)
        self.read_to(memory[:n_bytes], self.map[at : at + n_bytes])
        return np.ndarray(view.shape, view.dtype, memory, strides=view.strides)

    def _advise(self, at: int, n_bytes: int) -> None:
        """Have the disk asked for all of it at once: the kernel asks for 128 KiB at a time, and
        cannot tell what is next of a descriptor that several threads read.
        """
        with contextlib.suppress(OSError):  # a file system that takes no advice reads as well
            os.posix_fadvise(self._descriptor, at, n_bytes, os.POSIX_FADV_WILLNEED)

    def _offset(self, view: npt.NDArray[Any]) -> int:
        """Return the byte of the file at which a view of the map begins."""
        return int(view.__array_interface__["data"][0] - self.map.__array_interface__["data"][0])
