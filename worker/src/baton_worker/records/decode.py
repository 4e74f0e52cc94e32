"""Bytes to columns: checks one STEP frame and returns views into it.

The checks run in a fixed order (frame size; magic, major, type, must-understand flags; lengths;
header checksum; caps; exact sum of sections; body checksum; row sums; values), so nothing is
allocated before the caps hold and a reader on another machine refuses for the same reason.
"""

from __future__ import annotations

import google_crc32c
import numpy as np
import numpy.typing as npt

from baton_worker.records.checks import check_caps, check_rows, check_values
from baton_worker.records.columns import (
    DRAFT_COLUMNS,
    NO_DRAFT_COUNTS,
    ROW_COLUMNS,
    ROW_DTYPE,
    TOKEN_COLUMNS,
    StepColumns,
    columns_bytes,
)
from baton_worker.records.errors import RecordError, RefusalReason
from baton_worker.records.extensions import NO_EXTENSIONS, parse_extensions
from baton_worker.records.header import (
    StepFields,
    StepHeader,
    check_role,
    read_step_fields,
    step_header_of,
)
from baton_worker.records.layout import (
    CRC,
    DEFAULT_LIMITS,
    FLAG_BODY_CHECKSUM,
    FLAG_EXTENSIONS,
    STEP_FLAGS,
    STEP_HEADER_BYTES,
    STEP_HEADER_CRC_AT,
    Limits,
    MessageType,
)
from baton_worker.records.prefix import Prefix, check_lengths, read_prefix
from baton_worker.records.table import Arrays, Counts, block_bytes, read_block

_Bytes = npt.NDArray[np.uint8]


def decode_step(
    frame: bytes | memoryview, limits: Limits = DEFAULT_LIMITS
) -> tuple[StepHeader, StepColumns]:
    """Check one STEP frame and return its header and columns.

    The columns are read-only views of `frame`, which they keep alive; copy what outlives it.

    Args:
        frame: a whole message; a memoryview must be contiguous.
        limits: caps, and the vocabulary size when the reader knows it.

    Raises:
        RecordError: the frame breaks the layout, for the first reason found in the order above.
    """
    view = memoryview(frame).toreadonly()
    prefix = _checked_prefix(view, limits)
    octets = np.frombuffer(view, np.uint8)
    fields = _checked_fields(view, octets, prefix, limits)
    end_of_columns = _checked_sections(octets, prefix, fields)
    arrays = _arrays(octets, prefix.header_len, fields.counts)
    check_rows(
        arrays["n_tokens"],
        arrays["width"],
        arrays["draft_count"] if fields.counts.drafts else NO_DRAFT_COUNTS,
        fields.counts,
        limits,
    )
    extensions = NO_EXTENSIONS
    if fields.extension_offset:
        extensions = parse_extensions(view[end_of_columns:], fields.counts, arrays["flags"], limits)
    arrays |= extensions.columns
    columns = StepColumns(**arrays, errors=extensions.errors)
    check_values(columns, limits)
    return step_header_of(prefix, fields, extensions.ignored), columns


def _checked_prefix(view: memoryview, limits: Limits) -> Prefix:
    prefix = read_prefix(view, limits.frame_bytes)
    if prefix.type is not MessageType.STEP:
        raise RecordError(RefusalReason.TYPE, f"{prefix.type.name} where STEP is expected")
    check_lengths(prefix, len(view), STEP_FLAGS, STEP_HEADER_BYTES)
    return prefix


def _checked_fields(view: memoryview, octets: _Bytes, prefix: Prefix, limits: Limits) -> StepFields:
    (header_crc,) = CRC.unpack_from(view, STEP_HEADER_CRC_AT)
    if google_crc32c.value(octets[:STEP_HEADER_CRC_AT]) != header_crc:
        raise RecordError(RefusalReason.HEADER_CRC, f"0x{header_crc:08x} is not the header's")
    fields = read_step_fields(view)
    check_role(fields.role)
    check_caps(fields.counts, limits)
    return fields


def _checked_sections(octets: _Bytes, prefix: Prefix, fields: StepFields) -> int:
    end_of_columns = prefix.header_len + columns_bytes(fields.counts)
    has_extensions = bool(prefix.flags & FLAG_EXTENSIONS)
    if has_extensions != (fields.extension_offset != 0):
        raise RecordError(RefusalReason.EXTENSION_OFFSET, "offset and flag disagree")
    if has_extensions and fields.extension_offset != end_of_columns:
        raise RecordError(
            RefusalReason.EXTENSION_OFFSET,
            f"{fields.extension_offset}, columns end at {end_of_columns}",
        )
    if end_of_columns > len(octets) or (not has_extensions and end_of_columns != len(octets)):
        raise RecordError(
            RefusalReason.SECTION_SUM, f"columns end at {end_of_columns} of {len(octets)}"
        )
    if prefix.flags & FLAG_BODY_CHECKSUM:
        crc = google_crc32c.value(octets[prefix.header_len :])
        if crc != fields.body_crc:
            raise RecordError(RefusalReason.BODY_CRC, f"0x{fields.body_crc:08x} is not the body's")
    return end_of_columns


def _arrays(octets: _Bytes, start: int, counts: Counts) -> Arrays:
    words_at = start + ROW_DTYPE.itemsize * counts.rows
    rows = octets[start:words_at].view(ROW_DTYPE)
    arrays: Arrays = {column.name: rows[column.name] for column in ROW_COLUMNS}
    arrays |= read_block(TOKEN_COLUMNS, octets[words_at:], counts)
    if counts.drafts:  # a record without any has no draft counts either
        drafts_at = words_at + block_bytes(TOKEN_COLUMNS, counts)
        arrays |= read_block(DRAFT_COLUMNS, octets[drafts_at:], counts)
    return arrays
