"""Columns to bytes: writes one STEP frame.

Owns the order of the sections and both checksums. Pure: no clock, no counters, no socket.
"""

from __future__ import annotations

import operator
import struct
from dataclasses import replace
from typing import Any, Final

import google_crc32c
import numpy as np

from baton_worker.records.checks import check_caps, check_rows, check_values
from baton_worker.records.columns import (
    DRAFT_COLUMNS,
    EXTENSION_COLUMNS,
    FINISH_MASK,
    FLAG_HAS_DRAFT,
    ROW_COLUMNS,
    ROW_DTYPE,
    TOKEN_COLUMNS,
    Finish,
    StepColumns,
    columns_bytes,
)
from baton_worker.records.errors import RecordError, RefusalReason
from baton_worker.records.extensions import encode_extensions
from baton_worker.records.header import BodyShape, StepHeader, pack_step_header
from baton_worker.records.layout import (
    CRC,
    DEFAULT_LIMITS,
    FLAG_BODY_CHECKSUM,
    FLAG_EXTENSIONS,
    FLAG_REPLAYED,
    SOFT_FRAME_BYTES,
    STEP_HEADER_BYTES,
    STEP_HEADER_CRC_AT,
    Limits,
)
from baton_worker.records.table import Counts, block, check_shapes

_ALWAYS: Final = (*ROW_COLUMNS, *TOKEN_COLUMNS)
_WHERE_THERE: Final = (*((column,) for column in DRAFT_COLUMNS), *EXTENSION_COLUMNS.values())
_NOTHING: Final = Counts(0, 0)
_tokens_of = operator.attrgetter(*(column.name for column in TOKEN_COLUMNS))
"""Their bytes follow each other without a gap, for all are of one size; see `columns_bytes`."""
_DRAFT_BIT = np.uint8(FLAG_HAS_DRAFT)
_REPLAY_FLAG_AT = 7
_SEQ = struct.Struct("<Q")
_SEQ_AT = 24


def encode_step(
    columns: StepColumns,
    header: StepHeader,
    *,
    max_bytes: int = SOFT_FRAME_BYTES,
    limits: Limits = DEFAULT_LIMITS,
) -> bytes:
    """Return the frame of one record.

    The row flag FLAG_HAS_DRAFT is written as the draft counts say, whatever `columns.flags` holds.
    Error messages beyond 1,024 bytes of UTF-8 are cut and end in "…".

    Args:
        columns: see `StepColumns`; errors in ascending row order.
        header: written but for `frame_bytes` and `ignored_extensions`.
        max_bytes: longest frame to write; split with `coalesce.split_rows` beyond it.
        limits: what the reader accepts; `vocab_size` is worth setting.

    Raises:
        RecordError: anything that `decode_step` would refuse, COLUMN_SHAPE for arrays of a wrong
            length or dtype, FRAME_SIZE beyond `max_bytes`, FIELD_RANGE for a header field.
    """
    counts = checked_counts(columns, limits)
    columns = with_draft_flags(columns)  # before the values are checked: flags are among them
    check_values(columns, limits)
    extensions = encode_extensions(columns)
    end_of_columns = STEP_HEADER_BYTES + columns_bytes(counts)
    total_len = end_of_columns + len(extensions)
    if total_len > max_bytes:
        raise RecordError(RefusalReason.FRAME_SIZE, f"{total_len} bytes, allowed {max_bytes}")
    parts = _sections(columns, counts)
    if extensions:
        parts.append(extensions)
    body = BodyShape(
        FLAG_BODY_CHECKSUM | (FLAG_EXTENSIONS if extensions else 0),
        counts,
        total_len,
        end_of_columns if extensions else 0,
        _crc(parts),
    )
    return b"".join((pack_step_header(header, body), *parts))


def restamp(frame: bytes, *, seq: int, is_replayed: bool) -> bytes:
    """Return an encoded STEP frame with another seq and replayed flag; its header checksum follows.

    Raises:
        RecordError: FIELD_RANGE when `seq` is not a u64.
    """
    head = bytearray(frame[:STEP_HEADER_CRC_AT])
    if not 0 <= seq < 1 << 64:
        raise RecordError(RefusalReason.FIELD_RANGE, f"seq {seq} is not a u64")
    _SEQ.pack_into(head, _SEQ_AT, seq)
    head[_REPLAY_FLAG_AT] &= ~FLAG_REPLAYED & 0xFF
    head[_REPLAY_FLAG_AT] |= FLAG_REPLAYED if is_replayed else 0
    crc = CRC.pack(google_crc32c.value(bytes(head)))
    return b"".join((head, crc, memoryview(frame)[STEP_HEADER_BYTES:]))


def with_draft_flags(columns: StepColumns) -> StepColumns:
    """Return `columns` with FLAG_HAS_DRAFT set exactly on rows that have drafts."""
    flags, counts = columns.flags, columns.draft_count
    if not len(counts) and not flags.tobytes().strip(b"\0"):
        return columns
    has_draft = counts != 0 if len(counts) == len(flags) else np.zeros(len(flags), np.bool_)
    derived = flags & ~_DRAFT_BIT | np.where(has_draft, _DRAFT_BIT, np.uint8(0))
    return columns if np.array_equal(derived, flags) else replace(columns, flags=derived)


def checked_counts(columns: StepColumns, limits: Limits) -> Counts:
    """Return the section sizes of `columns` once lengths, dtypes, row sums and caps are right.

    Raises:
        RecordError: COLUMN_SHAPE, a *_CAP, ROW_TOKENS, ROW_WIDTH, ROW_SUMS, ERROR_DETAIL or
            SCORED_TOKENS.
    """
    counts = columns.counts
    check_shapes(_ALWAYS, columns, counts)
    for group in _WHERE_THERE:
        for column in group:
            if len(getattr(columns, column.name)):
                check_shapes(group, columns, counts)
                break
        else:
            check_shapes(group, columns, _NOTHING)
    check_caps(counts, limits)
    check_rows(columns.n_tokens, columns.width, columns.draft_count, counts, limits)
    _check_errors(columns)
    columns.verified_drafts.check(counts.rows, limits)
    columns.prompt_tokens.check(counts.rows, limits)
    return counts


def _check_errors(columns: StepColumns) -> None:
    previous = -1
    for error in columns.errors:
        if not previous < error.row < columns.n_rows:
            raise RecordError(RefusalReason.ERROR_DETAIL, f"row {error.row} after row {previous}")
        if columns.flags[error.row] & FINISH_MASK != Finish.ERROR:
            raise RecordError(
                RefusalReason.ERROR_DETAIL, f"row {error.row} does not end in an error"
            )
        previous = error.row


def _sections(columns: StepColumns, counts: Counts) -> list[Any]:
    rows = np.empty(counts.rows, ROW_DTYPE)
    for column in ROW_COLUMNS:
        rows[column.name] = getattr(columns, column.name)
    parts = [rows] if counts.rows else []
    parts += [np.ascontiguousarray(values) for values in _tokens_of(columns) if len(values)]
    return parts + block(DRAFT_COLUMNS, columns) if counts.drafts else parts


def _crc(parts: list[Any]) -> int:
    crc = 0
    for part in parts:
        crc = google_crc32c.extend(crc, part)
    return int(crc)
