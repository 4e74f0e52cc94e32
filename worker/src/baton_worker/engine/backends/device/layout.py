"""Named fields in one piece of memory, on the device and on the host alike.

Owns offsets and typed views, so that a step's numbers go up in one copy and come back in another.
Knows no field by its name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from baton_worker.engine.backends.device.seam import Device, DType, Host, Tensor

_ALIGNMENT = 16
_HOST_TYPES: dict[DType, type[np.generic]] = {
    "float32": np.float32,
    "float64": np.float64,
    "int32": np.int32,
    "int64": np.int64,
    "uint8": np.uint8,
}
_ITEM_BYTES = {name: np.dtype(kind).itemsize for name, kind in _HOST_TYPES.items()}


class Field(NamedTuple):
    """A tensor's dtype and shape."""

    dtype: DType
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        """What it takes."""
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


class Layout:
    """Where each field lies.

    Args:
        start: byte of the first one, aligned.

    Attributes:
        start, stop: all of them lie between; both aligned.
    """

    def __init__(self, fields: Mapping[str, Field], start: int = 0) -> None:
        self._fields = fields
        self._at: dict[str, int] = {}
        self._sizes = {name: math.prod(field.shape) for name, field in fields.items()}
        self.start = self.stop = start
        for name, field in fields.items():
            self._at[name] = self.stop
            self.stop += aligned(field.n_bytes)

    def at(self, name: str) -> int:
        """Return the byte at which a field begins."""
        return self._at[name]

    def on_device(self, device: Device, buffer: Tensor) -> dict[str, Tensor]:
        """Return each field as a view of uint8[*] `buffer`."""
        return {
            name: device.view(buffer, self._at[name], field.shape, field.dtype)
            for name, field in self._fields.items()
        }

    def on_host(self, buffer: Host, at: int = 0) -> dict[str, npt.NDArray[Any]]:
        """Return each field as a view of `buffer`, whose first byte is byte `at` of the layout."""
        return {
            name: np.frombuffer(
                buffer, _HOST_TYPES[field.dtype], self._sizes[name], self._at[name] - at
            ).reshape(field.shape)
            for name, field in self._fields.items()
        }


def aligned(n_bytes: int) -> int:
    """Return `n_bytes` rounded up to where a field may begin."""
    return -(-n_bytes // _ALIGNMENT) * _ALIGNMENT
