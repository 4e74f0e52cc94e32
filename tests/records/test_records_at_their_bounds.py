"""The last byte, row, token, code and number that a record may hold, and the first it may not."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable

import numpy as np
import pytest

from baton_worker.records.coalesce import FIXED_BYTES, coalesce, row_sizes, split_rows
from baton_worker.records.columns import FLAG_HAS_DRAFT, ErrorCode, Finish, RowError, StepColumns
from baton_worker.records.control import Hello, Welcome, Who, decode_control, encode_control
from baton_worker.records.decode import decode_step
from baton_worker.records.encode import encode_step, restamp
from baton_worker.records.errors import RecordError, RefusalReason
from baton_worker.records.extensions import error_message_bytes
from baton_worker.records.header import StepHeader
from baton_worker.records.layout import Limits
from baton_worker.records.scored import NO_SCORED, ScoredRow, ScoredTokens

Make = Callable[..., StepColumns]
Reseal = Callable[[bytes | bytearray], bytes]
Same = Callable[[StepColumns, StepColumns], None]


def refusal(action: Callable[[], object]) -> RefusalReason | None:
    """Return why it is refused, if it is."""
    try:
        action()
    except RecordError as error:
        return error.reason
    return None


def test_a_frame_of_just_the_readers_size_is_read(frame: bytes) -> None:
    decode_step(frame, Limits(frame_bytes=len(frame)))
    small = Limits(frame_bytes=len(frame) - 1)
    assert refusal(lambda: decode_step(frame, small)) is RefusalReason.FRAME_SIZE
    who = encode_control(Who(1, 2))
    assert decode_control(who, len(who)) == Who(1, 2)
    assert refusal(lambda: decode_control(who, len(who) - 1)) is RefusalReason.FRAME_SIZE


def test_a_control_message_may_be_as_long_as_a_frame_that_is_sent() -> None:
    body = bytes((1 << 20) - 64 - 4)
    hello = Hello(1, 2, 3, 4, 5, body)
    assert decode_control(encode_control(hello)) == hello
    longer = dataclasses.replace(hello, body=body + b"x")
    assert refusal(lambda: encode_control(longer)) is RefusalReason.FRAME_SIZE


@pytest.mark.parametrize("crc", [0, 1])
def test_a_body_without_bytes_has_a_checksum_of_nothing(crc: int, reseal: Reseal) -> None:
    empty = bytearray(encode_control(Hello(1, 2, 3, 4, 5, b"x")))
    del empty[64:]
    sealed = reseal(bytes(empty) + struct.pack("<I", 0))[:64] + struct.pack("<I", crc)
    if crc:
        assert refusal(lambda: decode_control(sealed)) is RefusalReason.BODY_CRC
    else:
        assert decode_control(sealed) == Hello(1, 2, 3, 4, 5, b"")
    cut = reseal(bytes(empty) + bytes(3))
    assert refusal(lambda: decode_control(cut)) is RefusalReason.CONTROL_BODY


def test_a_welcome_may_offer_every_command_and_credit_up_to_the_last_number() -> None:
    last = (1 << 64) - 1
    welcome = Welcome(1, 7, 0, last - 5, last, 100, 77, b"x")
    assert decode_control(encode_control(welcome)) == welcome


@pytest.mark.parametrize(("seq", "is_one"), [(-1, False), (0, True), ((1 << 64) - 1, True)])
def test_a_record_may_have_any_number_of_64_bits(frame: bytes, seq: int, is_one: bool) -> None:
    if not is_one:
        reason = refusal(lambda: restamp(frame, seq=seq, is_replayed=True))
        assert reason is RefusalReason.FIELD_RANGE
        return
    header, _ = decode_step(restamp(frame, seq=seq, is_replayed=True))
    assert (header.seq, header.is_replayed) == (seq, True)


def test_a_record_sent_again_as_it_was_is_the_same_bytes(frame: bytes) -> None:
    assert restamp(frame, seq=42, is_replayed=False) == frame
    again = restamp(frame, seq=42, is_replayed=True)
    assert again[7] == frame[7] | 4
    assert restamp(again, seq=42, is_replayed=False) == frame


def test_rows_with_drafts_say_so_whatever_their_flags_held(
    make_columns: Make, header: StepHeader
) -> None:
    columns = make_columns(3, flags=np.zeros(3, np.uint8))
    _, read = decode_step(encode_step(columns, header))
    assert read.flags.tolist() == [FLAG_HAS_DRAFT] * 3


@pytest.mark.parametrize("column", ["logprob", "topk_logprob"])
@pytest.mark.parametrize(("value", "is_one"), [(0.0009, True), (0.0011, False)])
def test_a_logprob_exceeds_nothing_by_rounding_only(
    column: str, value: float, is_one: bool, make_columns: Make, header: StepHeader
) -> None:
    columns = make_columns()
    changed = getattr(columns, column).copy()
    changed[-1] = value
    changed = dataclasses.replace(columns, **{column: changed})
    reason = refusal(lambda: encode_step(changed, header))
    assert reason is (None if is_one else RefusalReason.LOGPROB_RANGE)


@pytest.mark.parametrize(
    ("token", "vocab_size", "is_one"),
    [((1 << 31) - 1, None, True), (-1, None, False), (511, 512, True), (512, 512, False)],
)
@pytest.mark.parametrize("column", ["token", "topk_token", "draft"])
def test_a_token_is_below_the_vocabulary_or_else_not_negative(
    column: str,
    token: int,
    vocab_size: int | None,
    is_one: bool,
    make_columns: Make,
    header: StepHeader,
) -> None:
    columns = make_columns()
    changed = getattr(columns, column).copy()
    changed[-1] = token
    changed = dataclasses.replace(columns, **{column: changed})
    limits = Limits(vocab_size=vocab_size)
    reason = refusal(lambda: encode_step(changed, header, limits=limits))
    assert reason is (None if is_one else RefusalReason.TOKEN_RANGE)


def test_a_row_may_have_as_many_tokens_as_a_byte_counts(
    make_columns: Make, header: StepHeader
) -> None:
    columns = make_columns(
        1,
        n_tokens=np.full(1, 255, np.uint8),
        width=np.zeros(1, np.uint8),
        token=np.zeros(255, np.int32),
        logprob=np.empty(0, np.float32),
        rank=np.empty(0, np.int32),
        topk_token=np.empty(0, np.int32),
        topk_logprob=np.empty(0, np.float32),
    )
    encode_step(columns, header, limits=Limits(tokens_per_row=255))
    reason = refusal(lambda: encode_step(columns, header, limits=Limits(tokens_per_row=254)))
    assert reason is RefusalReason.ROW_TOKENS


def failed(make_columns: Make, *rows: int) -> StepColumns:
    flags = np.full(3, Finish.ERROR | FLAG_HAS_DRAFT, np.uint8)
    errors = tuple(RowError(row, ErrorCode.INTERNAL, "x") for row in rows)
    return make_columns(3, flags=flags, errors=errors)


@pytest.mark.parametrize(
    ("rows", "is_one"),
    [((0, 1, 2), True), ((0, 0), False), ((1, 0), False), ((3,), False), ((-1,), False)],
)
def test_errors_belong_to_rows_that_there_are_each_to_one(
    rows: tuple[int, ...], is_one: bool, make_columns: Make, header: StepHeader
) -> None:
    columns = failed(make_columns, *rows)
    reason = refusal(lambda: encode_step(columns, header))
    assert reason is (None if is_one else RefusalReason.ERROR_DETAIL)


@pytest.mark.parametrize(("row", "is_one"), [(1, True), (0, False), (3, False)])
def test_errors_in_a_frame_belong_to_rows_that_there_are_each_to_one(
    row: int, is_one: bool, make_columns: Make, header: StepHeader, reseal: Reseal
) -> None:
    frame = bytearray(encode_step(failed(make_columns, 0, 1), header))
    at = frame.rindex(struct.pack("<IHH", 1, ErrorCode.INTERNAL, 1))
    struct.pack_into("<I", frame, at, row)
    reason = refusal(lambda: decode_step(reseal(frame)))
    assert reason is (None if is_one else RefusalReason.ERROR_DETAIL)


@pytest.mark.parametrize("n_bytes", [1023, 1024, 1025, 1026])
def test_a_message_is_cut_at_1024_bytes_and_not_before(n_bytes: int) -> None:
    encoded = error_message_bytes("a" * n_bytes)
    assert len(encoded) == min(n_bytes, 1024)
    assert encoded.decode().endswith("…") == (n_bytes > 1024)


@pytest.mark.parametrize(("n_more", "is_one"), [(27, True), (28, False)])
def test_a_record_has_32_extensions_at_most(
    n_more: int, is_one: bool, make_columns: Make, header: StepHeader, reseal: Reseal
) -> None:
    frame = encode_step(failed(make_columns, 0), header)
    more = b"".join(struct.pack("<HHI", 100 + n, 0, 0) for n in range(n_more))
    reason = refusal(lambda: decode_step(reseal(frame + more)))
    assert reason is (None if is_one else RefusalReason.EXTENSION_COUNT)


ROW = ScoredRow(1, [4, 5, 6], 5, [-0.5, -0.5], [3, 3], [9] * 8, [-0.25] * 8)


@pytest.mark.parametrize(("cap", "most"), [("tokens", 9), ("topk", 24), ("width", 5)])
def test_tokens_beside_the_output_fill_the_readers_caps(
    cap: str, most: int, make_columns: Make, header: StepHeader
) -> None:
    columns = make_columns(3, prompt_tokens=ScoredTokens.of([ROW] * 3))
    frame = encode_step(columns, header, limits=Limits(**{cap: most}))
    decode_step(frame, Limits(**{cap: most}))
    less = Limits(**{cap: most - 1})
    assert refusal(lambda: encode_step(columns, header, limits=less)) is (
        RefusalReason.SCORED_TOKENS
    )
    assert refusal(lambda: decode_step(frame, less)) is RefusalReason.SCORED_TOKENS


def test_a_record_takes_148_bytes_besides_its_rows_at_most() -> None:
    assert FIXED_BYTES == 96 + 5 * 8 + 4 * 3


TIGHT = [
    {"rows": 7}, {"tokens": 14}, {"topk": 28}, {"drafts": 14}, {"max_bytes": 1000},
]  # fmt: skip


@pytest.mark.parametrize("caps", TIGHT, ids=str)
def test_a_piece_is_as_large_as_its_caps_let_it_be(
    caps: dict[str, int], make_columns: Make, header: StepHeader, same: Same
) -> None:
    columns = make_columns(30, verified_drafts=NO_SCORED, prompt_tokens=NO_SCORED)
    max_bytes = caps.get("max_bytes", 1 << 20)
    limits = Limits(**{cap: most for cap, most in caps.items() if cap != "max_bytes"})
    pieces = split_rows(columns, max_bytes, limits)
    same(coalesce(pieces), columns)
    singles = split_rows(columns, limits=Limits(rows=1))
    at = 0
    for piece in pieces[:-1]:
        at += piece.n_rows
        larger = coalesce([piece, singles[at]])
        if "max_bytes" in caps:
            assert row_sizes(larger).bytes.sum() > max_bytes - FIXED_BYTES
        else:
            reason = refusal(lambda more=larger: encode_step(more, header, limits=limits))
            assert reason is RefusalReason(f"{next(iter(caps))}_cap")


def test_a_row_that_just_fits_a_frame_is_a_piece_of_its_own(make_columns: Make) -> None:
    columns = make_columns(3)
    size = int(row_sizes(columns).bytes.max())
    assert len(split_rows(columns, FIXED_BYTES + size)) == 3
    reason = refusal(lambda: split_rows(columns, FIXED_BYTES + size - 1))
    assert reason is RefusalReason.FRAME_SIZE


def test_a_known_end_with_a_draft_flag_that_has_no_drafts_is_refused_for_the_flag(
    make_columns: Make, header: StepHeader, reseal: Reseal
) -> None:
    flags = np.full(1, max(Finish), np.uint8)
    none = {"draft_count": np.empty(0, np.uint8), "draft": np.empty(0, np.int32)}
    frame = bytearray(encode_step(make_columns(1, flags=flags, **none), header))
    frame[96 + 14] |= FLAG_HAS_DRAFT
    assert refusal(lambda: decode_step(reseal(frame))) is RefusalReason.DRAFT_FLAG
