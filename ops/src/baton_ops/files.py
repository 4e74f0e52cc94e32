"""Rows of numbers from a file to memory, converted and looked at on the way, without the GIL.

Owns what the outcome's numbers mean. Knows no format of files: who calls knows where rows lie.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from baton_ops._library import Tensor, blocking

NO_ERROR, END_OF_FILE = 0, -1


class Number(enum.IntEnum):
    """How a number is stored."""

    E4M3 = 0
    BFLOAT16 = 1
    FLOAT16 = 2
    FLOAT32 = 3


class StoredRows(NamedTuple):
    """Where rows lie in an open file: the first at `offset`, each `pitch_bytes` behind the last.

    Attributes:
        row_items: numbers of a row, without gaps.
    """

    descriptor: int
    offset: int
    rows: int
    row_items: int
    pitch_bytes: int
    stored: Number


class Outcome(NamedTuple):
    """How a read ended.

    Attributes:
        error: NO_ERROR, END_OF_FILE or an errno.
        at: the byte of the file at which the first failure was.
        is_finite: of all numbers, as they were written.
    """

    error: int
    at: int
    is_finite: bool


def read_rows(rows: StoredRows, out: Tensor, block_bytes: int, threads: int) -> Outcome:
    """Read rows to `out`, without gaps.

    Args:
        out: contiguous, one dimension: u8 for e4m3, of which bits are copied; for other numbers
            f32, or u16, the bits of bfloat16, rounded to nearest, ties to even.
        block_bytes: of the file, that a thread reads at a time, and converts through.
        threads: at most so many, the caller's among them.

    Raises:
        TypeError, ValueError: an argument is of another kind or size; the message names it.
    """
    told: npt.NDArray[np.int64] = np.zeros(3, np.int64)
    blocking("read_rows")(*rows[:5], int(rows.stored), block_bytes, threads, out, told)
    error, at, is_finite = told.tolist()
    return Outcome(error, at, bool(is_finite))
