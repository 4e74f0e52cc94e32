"""Bytes to columns: checks one STEP frame and returns views into it.

The checks run in a fixed order (frame size; magic, major, type, must-understand flags; lengths;
header checksum; caps; exact sum of sections; body checksum; row sums; values), so nothing is
allocated before the caps hold and a reader on another machine refuses for the same reason.
"""

from __future__ import annotations

from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt

from baton_worker.records.checks import check_caps, check_rows, check_values
from baton_worker.records.columns import StepColumns
from baton_worker.records.errors import RecordError, RefusalReason
from baton_worker.records.extensions import NO_EXTENSIONS, parse_extensions
from baton_worker.records.header import (
    Counts,
    StepFields,
    StepHeader,
    check_role,
    columns_bytes,
    read_step_fields,
    step_header_of,
)
from baton_worker.records.layout import (
    CRC,
    DEFAULT_LIMITS,
    FLAG_BODY_CHECKSUM,
    FLAG_EXTENSIONS,
    ROW_BYTES,
    ROW_DTYPE,
    ROW_FIELDS,
    STEP_FLAGS,
    STEP_HEADER_BYTES,
    STEP_HEADER_CRC_AT,
    Limits,
    MessageType,
    padded,
)
from baton_worker.records.prefix import Prefix, check_lengths, read_prefix

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
    check_rows(arrays["n_tokens"], arrays["width"], arrays["draft_count"], fields.counts, limits)
    extensions = NO_EXTENSIONS
    if fields.extension_offset:
        extensions = parse_extensions(
            view[end_of_columns:], fields.counts.rows, arrays["flags"], limits
        )
    columns = StepColumns(
        **arrays,
        n_proposed=extensions.n_proposed,
        n_accepted=extensions.n_accepted,
        n_reused=extensions.n_reused,
        errors=extensions.errors,
        verified_drafts=extensions.verified_drafts,
        prompt_tokens=extensions.prompt_tokens,
    )
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


def _arrays(octets: _Bytes, start: int, counts: Counts) -> dict[str, npt.NDArray[Any]]:
    words_at = start + ROW_BYTES * counts.rows
    rows = octets[start:words_at].view(ROW_DTYPE)
    words_end = words_at + 4 * counts.tokens + 8 * counts.logprobs + 8 * counts.topk
    words = octets[words_at:words_end].view(np.int32)
    floats = words.view(np.float32)
    logprob = counts.tokens
    rank = logprob + counts.logprobs
    topk_token = rank + counts.logprobs
    topk_logprob = topk_token + counts.topk
    count_bytes = padded(counts.rows) if counts.drafts else 0
    draft_at = words_end + count_bytes
    arrays: dict[str, npt.NDArray[Any]] = {name: rows[name] for name in ROW_FIELDS}
    arrays["token"] = words[:logprob]
    arrays["logprob"] = floats[logprob:rank]
    arrays["rank"] = words[rank:topk_token]
    arrays["topk_token"] = words[topk_token:topk_logprob]
    arrays["topk_logprob"] = floats[topk_logprob:]
    arrays["draft_count"] = octets[words_end:draft_at][: counts.rows]
    arrays["draft"] = octets[draft_at : draft_at + 4 * counts.drafts].view(np.int32)
    return arrays
