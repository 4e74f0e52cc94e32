"""What is encoded is decoded, bit for bit, whatever the shape."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_worker.identity import Role
from baton_worker.records.columns import (
    FLAG_HAS_DRAFT,
    ErrorCode,
    Finish,
    RowError,
    StepColumns,
)
from baton_worker.records.decode import decode_step
from baton_worker.records.encode import encode_step, restamp
from baton_worker.records.header import StepHeader
from baton_worker.records.layout import MAX_ERROR_MESSAGE_BYTES, Limits

U64 = st.integers(0, 2**64 - 1)
Same = Callable[[StepColumns, StepColumns], None]
Make = Callable[..., StepColumns]


@given(data=st.data())
def test_decode_inverts_encode_for_ragged_columns(
    data: st.DataObject, any_columns: Any, header: StepHeader, same: Same
) -> None:
    columns = data.draw(any_columns)
    decoded_header, decoded = decode_step(encode_step(columns, header), Limits(vocab_size=512))
    same(decoded, columns)
    assert dataclasses.replace(decoded_header, frame_bytes=0) == header


@given(data=st.data())
def test_encoding_a_decoded_record_gives_the_same_bytes(
    data: st.DataObject, any_columns: Any, header: StepHeader
) -> None:
    frame = encode_step(data.draw(any_columns), header)
    _, decoded = decode_step(frame)
    assert encode_step(decoded, header) == frame


@given(
    header=st.builds(
        StepHeader,
        epoch=U64,
        seq=U64,
        step_id=U64,
        role=st.sampled_from(Role),
        semantic_hash=U64,
        sent_unix_ns=U64,
        steps_merged=st.integers(0, 2**32 - 1),
        dp_rank=st.integers(0, 2**16 - 1),
        is_coalesced=st.booleans(),
        is_replayed=st.booleans(),
    )
)
def test_every_header_field_survives_over_its_whole_range(
    header: StepHeader, make_columns: Make
) -> None:
    frame = encode_step(make_columns(1), header)
    assert decode_step(frame)[0] == dataclasses.replace(header, frame_bytes=len(frame))


def test_an_empty_record_is_the_bare_header(header: StepHeader, make_columns: Make) -> None:
    frame = encode_step(make_columns(0), header)
    assert len(frame) == 96
    assert decode_step(frame)[1].n_rows == 0


def test_the_largest_row_fits(header: StepHeader, make_columns: Make, same: Same) -> None:
    k = 64 * 64
    columns = make_columns(
        1,
        n_tokens=np.array([64], np.uint8),
        width=np.array([65], np.uint8),
        token=np.arange(64, dtype=np.int32),
        logprob=np.zeros(64, np.float32),
        rank=np.ones(64, np.int32),
        topk_token=np.arange(k, dtype=np.int32),
        topk_logprob=np.full(k, -np.inf, np.float32),
    )
    same(decode_step(encode_step(columns, header))[1], columns)


@pytest.mark.parametrize("offset", range(1, 9))
def test_frames_decode_at_any_alignment(
    offset: int, frame: bytes, make_columns: Make, same: Same
) -> None:
    shifted = memoryview(bytes(offset) + frame)[offset:]
    same(decode_step(shifted)[1], make_columns())


def test_decoded_columns_are_read_only_views_of_the_frame(frame: bytes) -> None:
    writable = bytearray(frame)
    _, columns = decode_step(memoryview(writable))
    with pytest.raises(ValueError, match="read-only"):
        columns.token[0] = 1
    writable[96 + 16 * 3] = 77
    assert columns.token[0] == 77


def test_strided_columns_are_written_in_order(
    header: StepHeader, make_columns: Make, same: Same
) -> None:
    plain = make_columns()
    strided = dataclasses.replace(plain, token=np.repeat(plain.token, 2)[::2])
    assert encode_step(strided, header) == encode_step(plain, header)


def test_the_draft_flag_follows_the_draft_counts(header: StepHeader, make_columns: Make) -> None:
    columns = make_columns(
        3,
        flags=np.array([FLAG_HAS_DRAFT, FLAG_HAS_DRAFT, 0], np.uint8),
        draft_count=np.array([2, 0, 1], np.uint8),
        draft=np.array([1, 2, 3], np.int32),
    )
    _, decoded = decode_step(encode_step(columns, header))
    assert decoded.flags.tolist() == [FLAG_HAS_DRAFT, 0, FLAG_HAS_DRAFT]


def test_long_error_messages_are_cut_at_a_character_and_marked(
    header: StepHeader, make_columns: Make
) -> None:
    columns = make_columns(
        1,
        flags=np.array([Finish.ERROR | FLAG_HAS_DRAFT], np.uint8),
        errors=(RowError(0, ErrorCode.INTERNAL, "é" * MAX_ERROR_MESSAGE_BYTES),),
    )
    (error,) = decode_step(encode_step(columns, header))[1].errors
    assert len(error.message.encode()) <= MAX_ERROR_MESSAGE_BYTES
    assert error.message.lstrip("é") == "…"
    assert len(error.message) > MAX_ERROR_MESSAGE_BYTES // 2 - 4


@pytest.mark.parametrize("is_replayed", [True, False])
def test_restamp_changes_seq_and_the_replayed_flag_alone(
    is_replayed: bool, frame: bytes, header: StepHeader, make_columns: Make, same: Same
) -> None:
    again = restamp(
        restamp(frame, seq=9, is_replayed=not is_replayed), seq=2**64 - 1, is_replayed=is_replayed
    )
    decoded_header, decoded = decode_step(again)
    assert decoded_header == dataclasses.replace(
        header, seq=2**64 - 1, is_replayed=is_replayed, frame_bytes=len(frame)
    )
    same(decoded, make_columns())
    assert again[96:] == frame[96:]
