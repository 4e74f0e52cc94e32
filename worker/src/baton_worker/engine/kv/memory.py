"""Memory that other processes may read: where it lies, and that of the host behind a descriptor.

Owns how it is made, so that it cannot be cut off under who reads it, and mapped. Knows no block.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class CannotAttachError(Exception):
    """Another process's pool is of no use here; the text says why."""


class Region(NamedTuple):
    """Where a pool's memory lies in its process; `device` is None for memory of the host."""

    address: int
    n_bytes: int
    device: int | None


class HostMemory:
    """Memory of the host behind a descriptor."""

    def __init__(self, n_bytes: int) -> None:
        self.descriptor = os.memfd_create("baton-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self.descriptor)
        self.n_bytes = -(-n_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        os.truncate(self.descriptor, self.n_bytes)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self.bytes = mapped(self.descriptor, self.n_bytes)
        self.region = Region(int(self.bytes.ctypes.data), self.n_bytes, None)


def mapped(descriptor: int, n_bytes: int) -> npt.NDArray[np.uint8]:
    """Map memory of the host; unmapped with the array.

    Raises:
        CannotAttachError: there are fewer bytes or might be, which would end a process that reads
            them; or the descriptor stands for no memory.
    """
    try:
        size = os.fstat(descriptor).st_size
        if size < n_bytes:
            raise CannotAttachError(f"it has {size} bytes, {n_bytes} were told")
        if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise CannotAttachError("it may shrink: it has no seal against that")
        return np.frombuffer(mmap.mmap(descriptor, n_bytes), np.uint8)
    except (OSError, ValueError, OverflowError) as error:
        raise CannotAttachError(f"cannot map {n_bytes} bytes: {error}") from error
