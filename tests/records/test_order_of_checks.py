"""Of several faults the first in the documented order is reported; caps precede allocation."""

from __future__ import annotations

import dataclasses
import struct
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from baton_worker.records.columns import ErrorCode, Finish, RowError, StepColumns
from baton_worker.records.decode import decode_step
from baton_worker.records.encode import encode_step
from baton_worker.records.errors import RecordError, RefusalReason
from baton_worker.records.header import StepHeader
from baton_worker.records.layout import Limits

Make = Callable[..., StepColumns]
Reseal = Callable[[bytes | bytearray], bytes]
ROWS, TOKENS = 96, 96 + 48

IN_ORDER_UNSEALED: list[tuple[RefusalReason, str, int, Any]] = [
    (RefusalReason.MAGIC, "<B", 0, 0),
    (RefusalReason.MAJOR, "<B", 4, 9),
    (RefusalReason.TYPE, "<B", 6, 99),
    (RefusalReason.FLAGS, "<B", 7, 0xF9),
    (RefusalReason.TOTAL_LEN, "<I", 12, 5),
    (RefusalReason.HEADER_LEN, "<H", 8, 32),
    (RefusalReason.HEADER_CRC, "<I", 92, 0),
    (RefusalReason.BODY_CRC, "<i", TOKENS, -9),
]
IN_ORDER_SEALED: list[tuple[RefusalReason, str, int, Any]] = [
    (RefusalReason.ROLE, "<B", 44, 9),
    (RefusalReason.ROWS_CAP, "<I", 64, 5000),
    (RefusalReason.EXTENSION_OFFSET, "<I", 84, 4),
    (RefusalReason.ROW_TOKENS, "<B", ROWS + 12, 65),
    (RefusalReason.ROW_WIDTH, "<B", ROWS + 13, 66),
    (RefusalReason.FINISH, "<B", ROWS + 14, 0x0F),
    (RefusalReason.TOKEN_RANGE, "<i", TOKENS, -9),
    (RefusalReason.LOGPROB_RANGE, "<f", TOKENS + 24, 1.0),
    (RefusalReason.RANK_RANGE, "<i", TOKENS + 48, 0),
]


def reason_of(frame: bytes) -> RefusalReason:
    """Return why `frame` is refused."""
    with pytest.raises(RecordError) as refused:
        decode_step(frame)
    return refused.value.reason


@pytest.mark.parametrize("first", range(len(IN_ORDER_UNSEALED)))
def test_structure_is_checked_in_order(first: int, frame: bytes) -> None:
    broken = bytearray(frame)
    for _, layout, offset, value in IN_ORDER_UNSEALED[first:]:
        struct.pack_into(layout, broken, offset, value)
    assert reason_of(bytes(broken)) is IN_ORDER_UNSEALED[first][0]


@pytest.mark.parametrize("first", range(len(IN_ORDER_SEALED)))
def test_meaning_is_checked_in_order(first: int, frame: bytes, reseal: Reseal) -> None:
    broken = bytearray(frame)
    for _, layout, offset, value in IN_ORDER_SEALED[first:]:
        struct.pack_into(layout, broken, offset, value)
    assert reason_of(reseal(broken)) is IN_ORDER_SEALED[first][0]


def test_checksums_come_before_meaning(frame: bytes) -> None:
    broken = bytearray(frame)
    struct.pack_into("<I", broken, 64, 5000)
    assert reason_of(bytes(broken)) is RefusalReason.HEADER_CRC
    broken = bytearray(frame)
    broken[ROWS + 12] = 65
    assert reason_of(bytes(broken)) is RefusalReason.BODY_CRC


@pytest.mark.parametrize("count_at", [64, 68, 76, 80])
def test_huge_counts_are_refused_without_allocating(
    count_at: int, frame: bytes, reseal: Reseal
) -> None:
    broken = bytearray(frame)
    struct.pack_into("<I", broken, count_at, 0xFFFFFFFF)
    sealed = reseal(broken)
    reason_of(sealed)
    tracemalloc.start()
    try:
        reason_of(sealed)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 << 10


def worst_case(make_columns: Make, header: StepHeader, n_rows: int = 4096) -> bytes:
    """The frame that makes the most objects of the fewest bytes: a tiny error detail per row."""
    rows_alone = {
        name: getattr(make_columns(n_rows), name) for name in ("handle", "position", "attempt")
    }
    columns = dataclasses.replace(
        make_columns(0),
        **rows_alone,
        n_tokens=np.zeros(n_rows, np.uint8),
        width=np.zeros(n_rows, np.uint8),
        flags=np.full(n_rows, Finish.ERROR, np.uint8),
        errors=tuple(RowError(row, ErrorCode.INTERNAL, "ab") for row in range(n_rows)),
    )
    return encode_step(columns, header)


def calls_to_decode(frame: bytes, limits: Limits) -> int:
    """Count the calls, of Python and of C functions, that reading a frame takes."""
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        decode_step(frame, limits)
    finally:
        sys.setprofile(before)
    return calls


def test_the_worst_frame_takes_work_and_memory_in_proportion(
    header: StepHeader, make_columns: Make
) -> None:
    frame = worst_case(make_columns, header)
    limits = Limits(vocab_size=512)
    tracemalloc.start()
    try:
        decode_step(frame, limits)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Numpy sections are views; an error detail of 12 bytes becomes a RowError, an int and a str.
    assert peak < 6 * len(frame)
    small = calls_to_decode(worst_case(make_columns, header, n_rows=1024), limits)
    assert calls_to_decode(frame, limits) <= 4.2 * small
