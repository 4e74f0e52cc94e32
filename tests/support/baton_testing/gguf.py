"""Reads GGUF files: metadata, and tensors as float32.

Owns the container and the three forms of numbers that the file needs whose model the tests take:
F32, Q4_1 and Q8_0. NumPy alone, so that a machine without package registries can read it too.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

MAGIC = b"GGUF"
VERSION = 3
ALIGNMENT = 32
BLOCK = 32
"""Numbers that share a scale."""

F32, Q4_1, Q8_0 = 0, 3, 8
_ROW_BLOCKS: dict[int, np.dtype[Any]] = {
    Q4_1: np.dtype([("scale", "<f2"), ("least", "<f2"), ("bits", "u1", BLOCK // 2)]),
    Q8_0: np.dtype([("scale", "<f2"), ("number", "i1", BLOCK)]),
}
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9


class Stored(NamedTuple):
    """Where a tensor lies.

    Attributes:
        shape: rows first, as NumPy has it; the file says it the other way round.
        kind: of its numbers, `F32`, `Q4_1` or `Q8_0`.
        offset: bytes from the file's beginning.
    """

    shape: tuple[int, ...]
    kind: int
    offset: int


class GgufFile:
    """A file's metadata and where its tensors lie; tensors are read when they are asked for."""

    def __init__(self, path: Path) -> None:
        """Read the head.

        Raises:
            ValueError: it is no GGUF file of version 3, or ends within its head.
        """
        self._bytes = np.memmap(path, np.uint8, "r")
        self._at = 0
        magic, version, tensors, fields = self._take("<4sIQQ")
        if magic != MAGIC or version != VERSION:
            raise ValueError(f"{path} is no GGUF file of version {VERSION}")
        self.metadata: Mapping[str, Any] = dict(self._field() for _ in range(fields))
        self.tensors: Mapping[str, Stored] = self._directory(tensors)

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        """Return a tensor, each number the float32 nearest to scale x number (+ least).

        Raises:
            KeyError: the file has none of this name.
            ValueError: its numbers are of another kind than F32, Q4_1 and Q8_0.
        """
        shape, kind, offset = self.tensors[name]
        if kind == F32:
            return self._array(np.dtype("<f4"), math.prod(shape), offset).reshape(shape).copy()
        if kind not in _ROW_BLOCKS:
            raise ValueError(f"{name}: numbers of kind {kind}, not of {[F32, *_ROW_BLOCKS]}")
        blocks = self._array(_ROW_BLOCKS[kind], math.prod(shape) // BLOCK, offset)
        scale = blocks["scale"].astype(np.float32)[:, None]
        if kind == Q8_0:
            return (blocks["number"] * scale).reshape(shape)
        bits = blocks["bits"]  # the first half of a block's numbers are the low bits
        numbers = np.concatenate((bits & 15, bits >> 4), 1).astype(np.float32)
        return (numbers * scale + blocks["least"].astype(np.float32)[:, None]).reshape(shape)

    def _array(self, dtype: np.dtype[Any], count: int, offset: int) -> npt.NDArray[Any]:
        return self._bytes[offset : offset + count * dtype.itemsize].view(dtype)

    def _directory(self, count: int) -> dict[str, Stored]:
        found = {}
        for _ in range(count):
            name, (rank,) = self._string(), self._take("<I")
            shape = self._take(f"<{rank}Q")[::-1]
            kind, offset = self._take("<IQ")
            found[name] = Stored(shape, kind, offset)
        align = int(self.metadata.get("general.alignment", ALIGNMENT))
        data = -(-self._at // align) * align
        return {name: it._replace(offset=it.offset + data) for name, it in found.items()}

    def _field(self) -> tuple[str, Any]:
        name, (kind,) = self._string(), self._take("<I")
        return name, self._value(kind)

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            of, count = self._take("<IQ")
            if of == _STRING:
                return [self._string() for _ in range(count)]
            return list(self._take(f"<{count}{_SCALARS[of]}"))
        if kind == 6:  # as a number that was written: 1e-05 and not 9.999999747378752e-06
            return float(str(np.float32(self._take("<f")[0])))
        return self._take(f"<{_SCALARS[kind]}")[0]

    def _string(self) -> str:
        (size,) = self._take("<Q")
        return bytes(self._take(f"<{size}s")[0]).decode()

    def _take(self, form: str) -> tuple[Any, ...]:
        size = struct.calcsize(form)
        part = self._bytes[self._at : self._at + size].tobytes()
        if len(part) < size:
            raise ValueError("the file ends within its head")
        self._at += size
        return struct.unpack(form, part)
