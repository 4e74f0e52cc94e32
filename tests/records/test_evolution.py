"""This reader and frames of the next minor: skip what may be skipped, refuse the rest."""

from __future__ import annotations

import struct
from collections.abc import Callable

import google_crc32c
import pytest

from baton_worker.records.columns import ErrorCode, RowError, StepColumns
from baton_worker.records.control import decode_control, encode_control
from baton_worker.records.control_types import Ack, CommandFrame
from baton_worker.records.decode import decode_step
from baton_worker.records.encode import encode_step
from baton_worker.records.errors import RecordError, RefusalReason
from baton_worker.records.header import StepHeader
from baton_worker.records.layout import MINOR

Make = Callable[..., StepColumns]
Same = Callable[[StepColumns, StepColumns], None]
Reseal = Callable[[bytes | bytearray], bytes]


def grown(frame: bytes, fixed: int, by: int) -> bytearray:
    """Lengthen the fixed part by `by` bytes, as a newer minor would."""
    longer = bytearray(frame[:fixed] + b"\xa5" * by + frame[fixed:])
    longer[5] = MINOR + 1
    struct.pack_into("<H", longer, 8, fixed + by)
    if longer[6] == 1 and longer[7] & 8:
        struct.pack_into("<I", longer, 84, struct.unpack_from("<I", frame, 84)[0] + by)
    return longer


def with_extension(frame: bytes, kind: int, flags: int, value: bytes) -> bytearray:
    """Append an extension to a frame that has some."""
    padding = bytes(-len(value) % 4)
    return bytearray(frame + struct.pack("<HHI", kind, flags, len(value)) + value + padding)


@pytest.mark.parametrize("by", [1, 4, 32])
def test_a_longer_step_header_is_skipped(
    by: int, frame: bytes, make_columns: Make, same: Same, reseal: Reseal
) -> None:
    same(decode_step(reseal(grown(frame, 96, by)))[1], make_columns())


@pytest.mark.parametrize("message", [Ack(1, 2, 3, 4, 5), CommandFrame(1, 2, b"body")])
def test_a_longer_control_message_is_skipped(message: Ack | CommandFrame, reseal: Reseal) -> None:
    assert decode_control(reseal(grown(encode_control(message), 64, 8))) == message


def test_an_unknown_extension_is_skipped_and_reported(
    frame: bytes, make_columns: Make, same: Same, reseal: Reseal
) -> None:
    header, columns = decode_step(reseal(with_extension(frame, 900, 0, b"later")))
    assert header.ignored_extensions == (900,)
    same(columns, make_columns())


def test_an_unknown_critical_extension_is_refused(frame: bytes, reseal: Reseal) -> None:
    with pytest.raises(RecordError) as refused:
        decode_step(reseal(with_extension(frame, 900, 0x8000, b"later")))
    assert refused.value.reason is RefusalReason.EXTENSION_CRITICAL


def test_reserved_bytes_are_not_looked_at(frame: bytes, reseal: Reseal) -> None:
    touched = bytearray(frame)
    touched[10:12] = b"\xff\xff"
    touched[45] = 0xFF
    assert decode_step(reseal(touched))[0].seq == 42


def test_the_next_major_is_refused_before_anything_else_is_read(frame: bytes) -> None:
    with pytest.raises(RecordError) as refused:
        decode_step(frame[:4] + b"\x02" + b"\xff" * 27)
    assert refused.value.reason is RefusalReason.MAJOR


def test_an_unknown_error_code_becomes_internal_and_is_named(
    header: StepHeader, make_columns: Make, reseal: Reseal
) -> None:
    columns = make_columns(
        1, flags=make_columns(1).flags + 4, errors=(RowError(0, ErrorCode.DRAINING, "why"),)
    )
    frame = bytearray(encode_step(columns, header))
    code_at = frame.rindex(b"why") - 4
    struct.pack_into("<H", frame, code_at, 999)
    assert decode_step(reseal(frame))[1].errors == (
        RowError(0, ErrorCode.INTERNAL, "(code 999) why"),
    )


def test_without_the_checksum_flag_the_body_checksum_is_not_looked_at(
    frame: bytes, make_columns: Make, same: Same, reseal: Reseal
) -> None:
    bare = bytearray(frame)
    bare[7] &= ~1
    bare = bytearray(reseal(bare))
    struct.pack_into("<I", bare, 88, 0)
    struct.pack_into("<I", bare, 92, google_crc32c.value(bytes(bare[:92])))
    same(decode_step(bytes(bare))[1], make_columns())
