"""Pieces of one memory that go to another: where they begin, and rows of them that lie apart.

Owns what a copy may ask for. Knows no device.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from baton_worker.engine.api import DeviceError


class Rows(NamedTuple):
    """How the rows of a piece lie: bytes of each, and from one's beginning to the next one's."""

    n_bytes: int
    apart_there: int
    apart_here: int


def each_row(pieces: npt.NDArray[np.int64], rows: Rows) -> npt.NDArray[np.int64]:
    """Return [rows, 3], byte there, byte here, bytes, of pieces whose third number counts rows."""
    counts = pieces[:, 2]
    row = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    apart = np.array([rows.apart_there, rows.apart_here])
    starts = np.repeat(pieces[:, :2], counts, axis=0) + row[:, None] * apart
    return np.column_stack([starts, np.full(len(row), rows.n_bytes)])


def check_pieces(
    pieces: npt.NDArray[np.int64], source_bytes: int, to_bytes: int, rows: Rows | None = None
) -> None:
    """Refuse what `Device.pull` cannot copy.

    Raises:
        DeviceError: a piece is empty, or lies outside; or rows lie over each other.
    """
    if rows is not None and not 0 < rows.n_bytes <= min(rows.apart_there, rows.apart_here):
        raise DeviceError(f"pull rows of {rows.n_bytes} bytes that lie over each other: {rows}")
    for name, column, size in (("source", 0, source_bytes), ("target", 1, to_bytes)):
        starts, counts = pieces[:, column], pieces[:, 2]
        sizes = counts
        if rows is not None:
            sizes = (counts - 1) * rows[1 + column] + rows.n_bytes
        bad = (counts < 1) | (starts < 0) | (starts > size - sizes)
        if bad.any():
            at, n_bytes = int(starts[bad][0]), int(sizes[bad][0])
            raise DeviceError(f"pull {n_bytes} bytes at byte {at} of a {name} of {size}")
