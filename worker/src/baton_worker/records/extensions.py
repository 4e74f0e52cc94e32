"""STEP extensions: typed values behind the columns that older readers can skip.

Owns those that exist (verification and reuse counts, error detail, tokens beside the output) and
the rule for those that do not yet: unknown and critical is refused, unknown otherwise is skipped
and reported.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from baton_worker.records.columns import (
    BESIDE,
    EXTENSION_COLUMNS,
    FINISH_MASK,
    ErrorCode,
    Finish,
    RowError,
    StepColumns,
)
from baton_worker.records.errors import RecordError, RefusalReason
from baton_worker.records.layout import (
    ERROR_ENTRY,
    EXTENSION,
    EXTENSION_CRITICAL,
    MAX_ERROR_MESSAGE_BYTES,
    MAX_EXTENSIONS,
    ExtensionType,
    Limits,
    padded,
)
from baton_worker.records.scored import from_bytes
from baton_worker.records.table import Arrays, Counts, block, block_bytes, read_block

_TRUNCATION_MARK = "…".encode()
_CODES = {code.value: code for code in ErrorCode}
_BROKEN: dict[int, RefusalReason] = {
    ExtensionType.VERIFICATION: RefusalReason.VERIFICATION,
    ExtensionType.REUSED_TOKENS: RefusalReason.REUSED_TOKENS,
}
"""Why columns of a wrong length are refused; for other types EXTENSION_LENGTH."""


class Extensions(NamedTuple):
    """What a record's extensions say; `ignored` holds the skipped types, in order, deduplicated.

    `columns`: those of `StepColumns` that they carry, by name.
    """

    columns: Arrays
    errors: tuple[RowError, ...] = ()
    ignored: tuple[int, ...] = ()


NO_EXTENSIONS = Extensions({})


class _Item(NamedTuple):
    type: int
    is_critical: bool
    start: int
    end: int


def encode_extensions(columns: StepColumns) -> bytes:
    """Return the extension bytes of `columns`, empty when it needs none."""
    parts = []
    for kind, table in EXTENSION_COLUMNS.items():
        if len(getattr(columns, table[0].name)):
            parts.append(_pack(kind, b"".join(block(table, columns))))
    if columns.errors:
        parts.append(_pack(ExtensionType.ERRORS, b"".join(map(_pack_error, columns.errors))))
    for kind, name in BESIDE.items():
        if (tokens := getattr(columns, name)).n_rows:
            parts.append(_pack(kind, tokens.to_bytes()))
    return b"".join(parts)


def parse_extensions(
    section: memoryview, counts: Counts, flags: npt.NDArray[np.uint8], limits: Limits
) -> Extensions:
    """Parse the bytes behind the columns.

    Args:
        section: from the extension offset to the frame's end.
        counts: what the columns have, which are before them.
        flags: u8[R] row flags; error detail is allowed for rows that finish with ERROR only.
        limits: the reader's caps.

    Raises:
        RecordError: EXTENSION_COUNT, EXTENSION_LENGTH, EXTENSION_CRITICAL, EXTENSION_DUPLICATE,
            VERIFICATION, REUSED_TOKENS, ERROR_DETAIL or SCORED_TOKENS.
    """
    found: Arrays = {}
    errors: tuple[RowError, ...] = ()
    seen: list[int] = []
    ignored: list[int] = []
    for item in _items(section):
        value = section[item.start : item.end]
        if item.type in seen:
            raise RecordError(RefusalReason.EXTENSION_DUPLICATE, f"type {item.type} comes twice")
        seen.append(item.type)
        if item.type == ExtensionType.ERRORS:
            errors = _parse_errors(value, flags)
        elif item.type in BESIDE:
            found[BESIDE[item.type]] = from_bytes(value, counts.rows, limits)
        elif item.type in EXTENSION_COLUMNS:
            found |= _parse_columns(item.type, value, counts)
        elif item.is_critical:
            raise RecordError(RefusalReason.EXTENSION_CRITICAL, f"type {item.type} not understood")
        else:
            ignored.append(item.type)
    return Extensions(found, errors, tuple(ignored))


def error_message_bytes(message: str) -> bytes:
    """Return a message's UTF-8, cut at a character and marked when it exceeds the wire's limit."""
    encoded = message.encode("utf-8", errors="replace")
    if len(encoded) <= MAX_ERROR_MESSAGE_BYTES:
        return encoded
    room = MAX_ERROR_MESSAGE_BYTES - len(_TRUNCATION_MARK)
    return encoded[:room].decode("utf-8", errors="ignore").encode() + _TRUNCATION_MARK


def error_entry_bytes(error: RowError) -> int:
    """Return how many bytes an error's detail takes."""
    return ERROR_ENTRY.size + padded(len(error_message_bytes(error.message)))


def _pack(kind: int, value: bytes) -> bytes:
    return EXTENSION.pack(kind, 0, len(value)) + value + bytes(padded(len(value)) - len(value))


def _pack_error(error: RowError) -> bytes:
    message = error_message_bytes(error.message)
    try:
        head = ERROR_ENTRY.pack(error.row, error.code, len(message))
    except struct.error as cause:
        raise RecordError(RefusalReason.FIELD_RANGE, f"{error}: {cause}") from cause
    return head + message + bytes(padded(len(message)) - len(message))


def _items(section: memoryview) -> list[_Item]:
    items: list[_Item] = []
    at = 0
    while at < len(section):
        if len(items) == MAX_EXTENSIONS:
            raise RecordError(RefusalReason.EXTENSION_COUNT, f"more than {MAX_EXTENSIONS}")
        start = at + EXTENSION.size
        if start > len(section):
            raise RecordError(RefusalReason.EXTENSION_LENGTH, f"head cut off at {at}")
        kind, flags, length = EXTENSION.unpack_from(section, at)
        at = start + padded(length)
        if at > len(section):
            raise RecordError(RefusalReason.EXTENSION_LENGTH, f"type {kind} has {length} bytes")
        items.append(_Item(kind, bool(flags & EXTENSION_CRITICAL), start, start + length))
    return items


def _parse_columns(kind: int, value: memoryview, counts: Counts) -> Arrays:
    table = EXTENSION_COLUMNS[kind]
    expected = block_bytes(table, counts)
    if len(value) != expected:
        reason = _BROKEN.get(kind, RefusalReason.EXTENSION_LENGTH)
        raise RecordError(reason, f"{len(value)} bytes where {counts} call for {expected}")
    return read_block(table, np.frombuffer(value, np.uint8), counts)


def _parse_errors(value: memoryview, flags: npt.NDArray[np.uint8]) -> tuple[RowError, ...]:
    finishes = (flags & FINISH_MASK).tolist()
    errors: list[RowError] = []
    at, previous_row = 0, -1
    while at < len(value):
        start = at + ERROR_ENTRY.size
        if start > len(value):
            raise RecordError(RefusalReason.ERROR_DETAIL, f"entry cut off at {at}")
        row, code, length = ERROR_ENTRY.unpack_from(value, at)
        at = start + padded(length)
        if at > len(value):
            raise RecordError(RefusalReason.ERROR_DETAIL, f"message of {length} bytes cut off")
        if not previous_row < row < len(finishes):
            raise RecordError(RefusalReason.ERROR_DETAIL, f"row {row} after row {previous_row}")
        if finishes[row] != Finish.ERROR:
            raise RecordError(RefusalReason.ERROR_DETAIL, f"row {row} does not end in an error")
        errors.append(_row_error(row, code, value[start : start + length]))
        previous_row = row
    return tuple(errors)


def _row_error(row: int, code: int, message: memoryview) -> RowError:
    try:
        text = str(message, "utf-8")
    except UnicodeDecodeError as error:
        raise RecordError(RefusalReason.ERROR_DETAIL, f"row {row}: {error}") from error
    known = _CODES.get(code)
    if known is not None:
        return RowError(row, known, text)
    # A newer worker may know more codes; the request fails either way, so the record stands.
    return RowError(row, ErrorCode.INTERNAL, f"(code {code}) {text}")
