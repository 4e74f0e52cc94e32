"""Every reason to refuse has a frame or columns that produce exactly it; nothing else is raised."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from baton_worker.records.columns import FLAG_HAS_DRAFT, ErrorCode, Finish, RowError, StepColumns
from baton_worker.records.control import decode_control, encode_control
from baton_worker.records.control_types import Ack, Control, ErrorNotice, Hello, Welcome
from baton_worker.records.decode import decode_step
from baton_worker.records.encode import encode_step, restamp
from baton_worker.records.errors import RecordError, RefusalReason
from baton_worker.records.header import StepHeader
from baton_worker.records.layout import Limits
from baton_worker.records.prefix import peek_type
from baton_worker.records.scored import ScoredRow, ScoredTokens

Reason = RefusalReason
Make = Callable[..., StepColumns]
Reseal = Callable[[bytes | bytearray], bytes]
Edit = Callable[[bytearray], Any]

# The frame of the `frame` fixture: 3 rows of 1, 2 and 3 tokens (T = L = 6), top-2 (K = 12), D = 6.
ROWS, TOKENS = 96, 96 + 48
LOGPROBS, RANKS, TOPK = TOKENS + 24, TOKENS + 48, TOKENS + 72
TOPK_LOGPROBS, DRAFTS = TOPK + 48, TOPK + 96 + 4
EXTENSIONS = DRAFTS + 24


def put(layout: str, offset: int, *values: Any) -> Edit:
    """Return an edit that overwrites fields."""
    return lambda frame: struct.pack_into(layout, frame, offset, *values)


def append(more: bytes) -> Edit:
    """Return an edit that lengthens the frame."""
    return lambda frame: frame.extend(more)


def cut(n_bytes: int) -> Edit:
    """Return an edit that shortens the frame."""
    return lambda frame: frame.__delitem__(slice(len(frame) - n_bytes, None))


def replace_extensions(section: bytes) -> Edit:
    """Return an edit that puts `section` where the extensions were."""
    return lambda frame: frame.__setitem__(slice(EXTENSIONS, None), section)


def both(*edits: Edit) -> Edit:
    """Return several edits as one."""
    return lambda frame: [edit(frame) for edit in edits]


def extension(kind: int, value: bytes, flags: int = 0) -> bytes:
    """Return one encoded extension."""
    return struct.pack("<HHI", kind, flags, len(value)) + value + bytes(-len(value) % 4)


def error_entry(row: int, message: bytes = b"") -> bytes:
    """Return one entry of the ERRORS extension."""
    return struct.pack("<IHH", row, 1, len(message)) + message + bytes(-len(message) % 4)


NAN, INF = float("nan"), float("inf")
SIGNALLING_NAN = 0x7FA00000
AS_ERROR = put("<B", ROWS + 14, Finish.ERROR | FLAG_HAS_DRAFT)

RAW_STEP: list[tuple[Reason, Edit]] = [
    (Reason.FRAME_SIZE, cut(10_000)),
    (Reason.FRAME_SIZE, append(bytes(2 << 20))),
    (Reason.MAGIC, put("<4s", 0, b"PDT2")),
    (Reason.MAJOR, put("<B", 4, 2)),
    (Reason.TYPE, put("<B", 6, 0)),
    (Reason.TYPE, put("<B", 6, 11)),
    (Reason.TYPE, put("<B", 6, 4)),
    (Reason.FLAGS, put("<B", 7, 0x19)),
    (Reason.FLAGS, put("<B", 7, 0x89)),
    (Reason.TOTAL_LEN, append(b"\0")),
    (Reason.TOTAL_LEN, cut(4)),
    (Reason.HEADER_LEN, put("<H", 8, 95)),
    (Reason.HEADER_LEN, put("<H", 8, 65535)),
    (Reason.HEADER_CRC, put("<B", 33, 9)),
    (Reason.HEADER_CRC, put("<I", 92, 0)),
    (Reason.BODY_CRC, put("<i", TOKENS, 1)),
]

RESEALED_STEP: list[tuple[Reason, Edit]] = [
    (Reason.ROLE, put("<B", 44, 0)),
    (Reason.ROLE, put("<B", 44, 4)),
    (Reason.ROWS_CAP, put("<I", 64, 4097)),
    (Reason.TOKENS_CAP, put("<I", 68, 65_537)),
    (Reason.LOGPROBS_CAP, put("<I", 72, 7)),
    (Reason.TOPK_CAP, put("<I", 76, 262_145)),
    (Reason.DRAFTS_CAP, put("<I", 80, 65_537)),
    (Reason.ROWS_CAP, put("<I", 64, 0xFFFFFFFF)),
    (Reason.EXTENSION_OFFSET, put("<I", 84, 0)),
    (Reason.EXTENSION_OFFSET, put("<I", 84, EXTENSIONS - 4)),
    (Reason.EXTENSION_OFFSET, put("<B", 7, 0x01)),
    (Reason.SECTION_SUM, both(put("<B", 7, 0x01), put("<I", 84, 0))),
    (Reason.SECTION_SUM, both(put("<I", 68, 60_000), put("<I", 84, EXTENSIONS + 4 * 59_994))),
    (Reason.ROW_TOKENS, put("<B", ROWS + 12, 65)),
    (Reason.ROW_WIDTH, put("<B", ROWS + 13, 66)),
    (Reason.ROW_SUMS, put("<B", ROWS + 12, 2)),
    (Reason.ROW_SUMS, put("<B", ROWS + 13, 0)),
    (Reason.ROW_SUMS, put("<B", DRAFTS - 4, 3)),
    (Reason.ROW_FLAGS, put("<B", ROWS + 14, 0x48)),
    (Reason.FINISH, put("<B", ROWS + 14, 0x0E)),
    (Reason.DRAFT_FLAG, put("<B", ROWS + 14, 0)),
    (Reason.TOKEN_RANGE, put("<i", TOKENS, -9)),
    (Reason.TOKEN_RANGE, put("<i", TOKENS, 512)),
    (Reason.TOKEN_RANGE, put("<i", TOPK, 512)),
    (Reason.TOKEN_RANGE, put("<i", DRAFTS, -1)),
    (Reason.LOGPROB_RANGE, put("<f", LOGPROBS, 0.002)),
    (Reason.LOGPROB_RANGE, put("<f", LOGPROBS, NAN)),
    (Reason.LOGPROB_RANGE, put("<I", LOGPROBS, SIGNALLING_NAN)),
    (Reason.LOGPROB_RANGE, put("<f", TOPK_LOGPROBS, INF)),
    (Reason.RANK_RANGE, put("<i", RANKS, 0)),
    (Reason.EXTENSION_LENGTH, append(b"\0\0\0\0")),
    (Reason.EXTENSION_LENGTH, append(struct.pack("<HHI", 9, 0, 0xFFFFFFFF))),
    (Reason.EXTENSION_COUNT, append(b"".join(extension(900 + i, b"") for i in range(32)))),
    (Reason.EXTENSION_CRITICAL, append(extension(900, b"", 0x8000))),
    (Reason.EXTENSION_DUPLICATE, append(extension(1, bytes(6)))),
    (Reason.EXTENSION_DUPLICATE, append(extension(900, b"") * 2)),
    (Reason.VERIFICATION, replace_extensions(extension(1, bytes(5)))),
    (Reason.VERIFICATION, replace_extensions(extension(1, b"\1\1\1\1\1\2"))),
    (Reason.REUSED_TOKENS, replace_extensions(extension(5, bytes(8)))),
    (Reason.ERROR_DETAIL, append(extension(2, error_entry(0)))),
    (Reason.ERROR_DETAIL, both(AS_ERROR, append(extension(2, error_entry(3))))),
    (Reason.ERROR_DETAIL, both(AS_ERROR, append(extension(2, error_entry(0) * 2)))),
    (Reason.ERROR_DETAIL, both(AS_ERROR, append(extension(2, error_entry(0, b"\xff"))))),
    (Reason.ERROR_DETAIL, both(AS_ERROR, append(extension(2, b"\0\0\0\0")))),
    (Reason.ERROR_DETAIL, both(AS_ERROR, append(extension(2, b"\0\0\0\0\1\0\xff\0")))),
]

HELLO = Hello(1, 2, 3, 4, 5, b"information")
ACK = Ack(1, 2, 3, 4, 5)
WELCOME = Welcome(1, 9, 3, 2**40, 2**40 + 5, 6, 7)
NOTICE = ErrorNotice(1, 2, 3, 4, "why")

RAW_CONTROL: list[tuple[Reason, Control, Edit]] = [
    (Reason.FRAME_SIZE, ACK, cut(33)),
    (Reason.MAGIC, ACK, put("<B", 0, 0)),
    (Reason.MAJOR, ACK, put("<B", 4, 0)),
    (Reason.TYPE, ACK, put("<B", 6, 99)),
    (Reason.TYPE, ACK, put("<B", 6, 1)),
    (Reason.FLAGS, ACK, put("<B", 7, 2)),
    (Reason.TOTAL_LEN, ACK, append(b"\0")),
    (Reason.HEADER_LEN, ACK, put("<H", 8, 63)),
    (Reason.HEADER_LEN, ACK, both(cut(32), put("<I", 12, 32))),
    (Reason.HEADER_CRC, ACK, put("<B", 40, 0xFF)),
    (Reason.BODY_CRC, HELLO, put("<B", 64, 0)),
]

RESEALED_CONTROL: list[tuple[Reason, Control, Edit]] = [
    (Reason.CONTROL_BODY, ACK, append(b"\0\0\0\0")),
    (Reason.CONTROL_BODY, ACK, both(put("<B", 7, 1), append(b"\0\0\0\0"))),
    (Reason.CONTROL_BODY, HELLO, cut(12)),
    (Reason.CONTROL_BODY, HELLO, put("<B", 7, 0)),
    (Reason.CONTROL_TEXT, NOTICE, put("<B", 64, 0xFF)),
    (Reason.FIELD_RANGE, WELCOME, put("<Q", 24, 5)),
    (Reason.FIELD_RANGE, WELCOME, put("<Q", 32, 2**64 - 5)),
]


def beside(**over: Any) -> ScoredTokens:
    """Three rows of two tokens, the first with a logprob and an alternative."""
    row = ScoredRow(1, [4, 5], 2, [-0.5], [3], [9], [-0.25])
    return dataclasses.replace(ScoredTokens.of([row] * 3), **over)


BESIDE: list[tuple[Reason, dict[str, Any]]] = [
    (Reason.COLUMN_SHAPE, {"token": np.zeros(6, np.int64)}),
    (Reason.COLUMN_SHAPE, {"rank": np.ones(2, np.int32)}),
    (Reason.COLUMN_SHAPE, {"first": np.zeros(2, np.uint32)}),
    (Reason.SCORED_TOKENS, {"scored": np.full(3, 3, np.uint16)}),
    (Reason.SCORED_TOKENS, {"width": np.zeros(3, np.uint8)}),
    (Reason.SCORED_TOKENS, {"width": np.full(3, 66, np.uint8)}),
    (Reason.SCORED_TOKENS, {"count": np.full(3, 40_000, np.uint16)}),
    (Reason.TOKEN_RANGE, {"token": np.full(6, 512, np.int32)}),
    (Reason.TOKEN_RANGE, {"topk_token": np.full(3, -1, np.int32)}),
    (Reason.LOGPROB_RANGE, {"logprob": np.full(3, NAN, np.float32)}),
    (Reason.LOGPROB_RANGE, {"topk_logprob": np.full(3, 0.5, np.float32)}),
    (Reason.RANK_RANGE, {"rank": np.zeros(3, np.int32)}),
]

COLUMNS: list[tuple[Reason, dict[str, Any]]] = [
    (Reason.COLUMN_SHAPE, {"token": np.zeros(6, np.int64)}),
    (Reason.COLUMN_SHAPE, {"token": np.zeros((6, 1), np.int32)}),
    (Reason.COLUMN_SHAPE, {"logprob": np.zeros(6, ">f4")}),
    (Reason.COLUMN_SHAPE, {"rank": np.ones(5, np.int32)}),
    (Reason.COLUMN_SHAPE, {"attempt": np.zeros(2, np.uint8)}),
    (Reason.COLUMN_SHAPE, {"flags": np.zeros((3, 2), np.uint8)}),
    (Reason.COLUMN_SHAPE, {"draft_count": np.full(2, 3, np.uint8)}),
    (Reason.COLUMN_SHAPE, {"n_accepted": np.empty(0, np.uint8)}),
    (Reason.ROW_TOKENS, {"n_tokens": np.array([65, 2, 3], np.uint8)}),
    (Reason.ROW_WIDTH, {"width": np.full(3, 66, np.uint8)}),
    (Reason.ROW_SUMS, {"n_tokens": np.full(3, 1, np.uint8)}),
    (Reason.ROW_SUMS, {"draft_count": np.empty(0, np.uint8)}),
    (Reason.FINISH, {"flags": np.full(3, 6, np.uint8)}),
    (Reason.ROW_FLAGS, {"flags": np.full(3, 0x80, np.uint8)}),
    (Reason.TOKEN_RANGE, {"token": np.full(6, -9, np.int32)}),
    (Reason.TOKEN_RANGE, {"draft": np.full(6, 512, np.int32)}),
    (Reason.LOGPROB_RANGE, {"topk_logprob": np.full(12, NAN, np.float32)}),
    (Reason.RANK_RANGE, {"rank": np.zeros(6, np.int32)}),
    (Reason.VERIFICATION, {"n_accepted": np.full(3, 9, np.uint8)}),
    (Reason.COLUMN_SHAPE, {"n_reused": np.zeros(3, np.uint8)}),
    (Reason.COLUMN_SHAPE, {"n_reused": np.zeros(2, np.uint32)}),
    (Reason.ERROR_DETAIL, {"errors": (RowError(0, ErrorCode.INTERNAL, ""),)}),
    (Reason.ERROR_DETAIL, {"errors": (RowError(3, ErrorCode.INTERNAL, ""),)}),
    *((reason, {"prompt_tokens": beside(**over)}) for reason, over in BESIDE),
    (Reason.VERIFICATION, {"verified_drafts": beside(), "n_proposed": np.full(3, 1, np.uint8)}),
]


def labelled(cases: list[Any]) -> list[Any]:
    """Name each case after its reason and place in the list."""
    return [pytest.param(*case, id=f"{case[0].value}-{i}") for i, case in enumerate(cases)]


@pytest.mark.parametrize(("reason", "edit"), labelled(RAW_STEP))
def test_a_broken_step_frame_is_refused(reason: Reason, edit: Edit, frame: bytes) -> None:
    broken = bytearray(frame)
    edit(broken)
    with pytest.raises(RecordError) as refused:
        decode_step(bytes(broken))
    assert refused.value.reason is reason


@pytest.mark.parametrize(("reason", "edit"), labelled(RESEALED_STEP))
def test_a_step_frame_with_right_checksums_is_refused_for_what_it_says(
    reason: Reason, edit: Edit, frame: bytes, reseal: Reseal
) -> None:
    broken = bytearray(frame)
    edit(broken)
    with pytest.raises(RecordError) as refused:
        decode_step(reseal(broken), Limits(vocab_size=512))
    assert refused.value.reason is reason


@pytest.mark.parametrize(("reason", "message", "edit"), labelled(RAW_CONTROL))
def test_a_broken_control_frame_is_refused(reason: Reason, message: Control, edit: Edit) -> None:
    broken = bytearray(encode_control(message))
    edit(broken)
    with pytest.raises(RecordError) as refused:
        decode_control(bytes(broken))
    assert refused.value.reason is reason


@pytest.mark.parametrize(("reason", "message", "edit"), labelled(RESEALED_CONTROL))
def test_a_control_frame_with_right_checksums_is_refused_for_what_it_says(
    reason: Reason, message: Control, edit: Edit, reseal: Reseal
) -> None:
    broken = bytearray(encode_control(message))
    edit(broken)
    with pytest.raises(RecordError) as refused:
        decode_control(reseal(broken))
    assert refused.value.reason is reason


@pytest.mark.parametrize(("reason", "over"), labelled(COLUMNS))
def test_the_encoder_writes_nothing_that_a_reader_would_refuse(
    reason: Reason, over: dict[str, Any], header: StepHeader, make_columns: Make
) -> None:
    with pytest.raises(RecordError) as refused:
        encode_step(make_columns(3, **over), header, limits=Limits(vocab_size=512))
    assert refused.value.reason is reason


@pytest.mark.parametrize(
    ("reason", "over"),
    [
        (Reason.ROLE, {"role": 4}),
        (Reason.FIELD_RANGE, {"seq": -1}),
        (Reason.FIELD_RANGE, {"epoch": 2**64}),
        (Reason.FIELD_RANGE, {"dp_rank": 2**16}),
    ],
)
def test_the_encoder_refuses_header_fields_that_do_not_fit(
    reason: Reason, over: dict[str, Any], header: StepHeader, make_columns: Make
) -> None:
    with pytest.raises(RecordError) as refused:
        encode_step(make_columns(), dataclasses.replace(header, **over))
    assert refused.value.reason is reason


@pytest.mark.parametrize("cap", ["rows", "tokens", "topk", "drafts"])
def test_the_encoder_respects_the_readers_caps(
    cap: str, header: StepHeader, make_columns: Make
) -> None:
    exact = {"rows": 3, "tokens": 6, "topk": 12, "drafts": 6}[cap]
    encode_step(make_columns(), header, limits=Limits(**{cap: exact}))
    with pytest.raises(RecordError) as refused:
        encode_step(make_columns(), header, limits=Limits(**{cap: exact - 1}))
    assert refused.value.reason.value == f"{cap}_cap"


def test_the_encoder_refuses_a_frame_beyond_the_sizes(
    header: StepHeader, make_columns: Make, frame: bytes
) -> None:
    assert len(encode_step(make_columns(), header, max_bytes=len(frame))) == len(frame)
    with pytest.raises(RecordError) as refused:
        encode_step(make_columns(), header, max_bytes=len(frame) - 1)
    assert refused.value.reason is Reason.FRAME_SIZE


@pytest.mark.parametrize(
    "message",
    [
        Ack(-1, 0, 0, 0, 0),
        Ack(0, 0, 2**64, 0, 0),
        dataclasses.replace(WELCOME, credit_seq=WELCOME.expected_seq - 1),
        dataclasses.replace(WELCOME, commands_oldest=WELCOME.commands_next + 1),
        dataclasses.replace(WELCOME, credit_seq=WELCOME.expected_seq + 2**32),
        dataclasses.replace(NOTICE, reason="\ud800"),
    ],
)
def test_control_values_that_do_not_fit_are_refused(message: Control) -> None:
    with pytest.raises(RecordError) as refused:
        encode_control(message)
    assert refused.value.reason is Reason.FIELD_RANGE


def test_a_control_body_beyond_the_frame_size_is_refused() -> None:
    with pytest.raises(RecordError) as refused:
        encode_control(dataclasses.replace(HELLO, body=bytes(1 << 20)))
    assert refused.value.reason is Reason.FRAME_SIZE


def test_restamp_refuses_a_seq_that_does_not_fit(frame: bytes) -> None:
    with pytest.raises(RecordError) as refused:
        restamp(frame, seq=2**64, is_replayed=False)
    assert refused.value.reason is Reason.FIELD_RANGE


@pytest.mark.parametrize("size", range(0, 96))
def test_every_truncation_is_refused_by_every_reader(size: int, frame: bytes) -> None:
    for reader in (decode_step, decode_control):
        with pytest.raises(RecordError):
            reader(frame[:size])
    if size < 32:
        with pytest.raises(RecordError):
            peek_type(frame[:size])


def test_no_reason_is_without_a_case() -> None:
    tables = (RAW_STEP, RESEALED_STEP, RAW_CONTROL, RESEALED_CONTROL, COLUMNS)
    assert {case[0] for table in tables for case in table} == set(Reason)
