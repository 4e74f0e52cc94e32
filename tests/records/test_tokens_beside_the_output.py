"""Verified drafts and prompt tokens: their bytes, their rows, and frames that say them wrongly."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable

import numpy as np
import pytest

from baton_worker.records.coalesce import coalesce, split_rows
from baton_worker.records.columns import StepColumns
from baton_worker.records.decode import decode_step
from baton_worker.records.encode import encode_step
from baton_worker.records.errors import RecordError, RefusalReason
from baton_worker.records.header import StepHeader
from baton_worker.records.layout import Limits
from baton_worker.records.rows import rows
from baton_worker.records.scored import NO_SCORED, ScoredRow, ScoredTokens, from_bytes

Make = Callable[..., StepColumns]
Same = Callable[[StepColumns, StepColumns], None]
Reseal = Callable[[bytes | bytearray], bytes]
HEAD_BYTES = 3 * 9 + 1


def last_value(frame: bytes) -> int:
    """Where the value of the frame's last extension, the prompt tokens, starts."""
    return frame.rindex(struct.pack("<HH", 4, 0)) + 8


def test_each_row_gets_what_was_put_into_it(make_columns: Make, header: StepHeader) -> None:
    drafts = [ScoredRow(7, [1, 2, 3], 3, [-1.0, -2.0], [1, 9], [5, 6, 7, 8], [-0.5] * 4), None]
    prompt = [None, ScoredRow(1, [40, 41], 1, [-0.25, -0.5], [2, 1], [], [])]
    columns = make_columns(
        2, verified_drafts=ScoredTokens.of(drafts), prompt_tokens=ScoredTokens.of(prompt)
    )
    read = list(rows(decode_step(encode_step(columns, header))[1]))
    assert [row.verified_drafts for row in read] == drafts
    assert [row.prompt_tokens for row in read] == prompt


def test_records_without_them_have_no_extension_for_them(make_columns: Make) -> None:
    columns = make_columns(2, verified_drafts=NO_SCORED, prompt_tokens=NO_SCORED)
    assert all(row.verified_drafts is row.prompt_tokens is None for row in rows(columns))
    assert ScoredTokens.of([None, ScoredRow(3, [], 0, [], [], [], [])]) is NO_SCORED


def edits(value: int) -> list[tuple[str, Callable[[bytearray], object]]]:
    """Each way to break the prompt tokens' extension, which starts at `value`."""
    put = struct.pack_into
    return [
        ("more tokens than bytes", lambda f: put("<H", f, value + 12, 9)),
        ("more logprobs than tokens", lambda f: put("<H", f, value + 18, 2)),
        ("logprobs without width", lambda f: f.__setitem__(value + 24, 0)),
        ("width without logprobs", lambda f: put("<H", f, value + 18, 0)),
        ("a width beyond the format", lambda f: f.__setitem__(value + 24, 66)),
        ("bytes behind the columns", lambda f: (f.extend(bytes(4)), grow(f, value, 4))),
        ("bytes missing", lambda f: (f.__delitem__(slice(-4, None)), grow(f, value, -4))),
        ("no room for the rows", lambda f: (f.__delitem__(slice(value + 8, None)), fix(f, value))),
    ]


def grow(frame: bytearray, value: int, by: int) -> None:
    (length,) = struct.unpack_from("<I", frame, value - 4)
    struct.pack_into("<I", frame, value - 4, length + by)


def fix(frame: bytearray, value: int) -> None:
    struct.pack_into("<I", frame, value - 4, len(frame) - value)


@pytest.mark.parametrize("name", [name for name, _ in edits(0)])
def test_a_frame_that_says_them_wrongly_is_refused(name: str, frame: bytes, reseal: Reseal) -> None:
    value = last_value(frame)
    broken = bytearray(frame)
    dict(edits(value))[name](broken)
    with pytest.raises(RecordError) as refused:
        decode_step(reseal(broken))
    assert refused.value.reason is RefusalReason.SCORED_TOKENS


@pytest.mark.parametrize("limits", [Limits(tokens=7), Limits(topk=12)])
def test_the_readers_caps_hold_for_them_and_splitting_respects_them(
    limits: Limits, make_columns: Make, header: StepHeader, same: Same
) -> None:
    row = ScoredRow(1, [4, 5, 6], 5, [-0.5, -0.5], [3, 3], [9] * 8, [-0.25] * 8)
    columns = make_columns(3, prompt_tokens=ScoredTokens.of([row] * 3))
    with pytest.raises(RecordError) as refused:
        encode_step(columns, header, limits=limits)
    assert refused.value.reason is RefusalReason.SCORED_TOKENS
    pieces = split_rows(columns, limits=limits)
    for piece in pieces:
        encode_step(piece, header, limits=limits)
    same(coalesce(pieces), columns)


def test_a_large_prompt_is_split_over_records_that_fit(
    make_columns: Make, header: StepHeader, same: Same
) -> None:
    row = ScoredRow(1, [4] * 500, 21, [-0.5] * 500, [3] * 500, [9] * 10_000, [-0.25] * 10_000)
    columns = make_columns(20, prompt_tokens=ScoredTokens.of([row] * 20))
    pieces = split_rows(columns)
    assert len(pieces) > 1
    assert all(len(encode_step(piece, header)) <= 1 << 20 for piece in pieces)
    same(coalesce(pieces), columns)


def test_decoded_columns_are_views_of_the_frame(frame: bytes) -> None:
    prompt = decode_step(frame)[1].prompt_tokens
    assert not prompt.token.flags.owndata
    assert prompt.token.tolist() == [7, 7, 7]
    assert np.array_equal(prompt.first, [0, 1, 2])


def test_rows_that_tell_nothing_leave_no_columns_behind() -> None:
    row = ScoredRow(1, [4, 5, 6], 5, [-0.5, -0.5], [3, 3], [9] * 8, [-0.25] * 8)
    both = ScoredTokens.of([None, row])
    assert both.between(0, 1) is NO_SCORED
    assert both.row_bytes().tolist() == [9, 9 + 3 * 4 + 2 * 8 + 8 * 8]
    dataclasses.replace(NO_SCORED).check(3, Limits())
    assert from_bytes(memoryview(bytes(12)), 1, Limits()).count.tolist() == [0]
