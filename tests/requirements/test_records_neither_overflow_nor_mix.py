"""Counts, columns and flags of a record keep to themselves over their whole range (R1-R5, R14)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_worker.identity import RequestKey, Role, make_handle
from baton_worker.link.parts import FrameWriter
from baton_worker.records.coalesce import coalesce, select_rows
from baton_worker.records.columns import (
    FLAG_ECHO,
    FLAG_FIRST_TOKEN,
    ErrorCode,
    Finish,
    RowError,
    StepColumns,
)
from baton_worker.records.decode import decode_step
from baton_worker.records.encode import encode_step
from baton_worker.records.errors import RecordError, RefusalReason
from baton_worker.records.header import StepHeader
from baton_worker.records.rows import rows
from baton_worker.roles.rows import error_columns

HEADER = StepHeader(epoch=1, seq=2, step_id=3, role=Role.DECODE, semantic_hash=4, sent_unix_ns=5)
MAX_DRAFTS = 5


def columns_of(n_tokens: list[int], width: list[int], **over: Any) -> StepColumns:
    """Rows of the given counts; every value tells which row, token and column it belongs to."""
    n_rows = len(n_tokens)
    scored = sum(n for n, w in zip(n_tokens, width, strict=True) if w)
    n_topk = sum(n * (w - 1) for n, w in zip(n_tokens, width, strict=True) if w)
    fields: dict[str, Any] = {
        "handle": np.array([make_handle(1, row) for row in range(n_rows)], np.uint64),
        "position": np.arange(n_rows, dtype=np.uint32),
        "n_tokens": np.array(n_tokens, np.uint8),
        "width": np.array(width, np.uint8),
        "flags": np.zeros(n_rows, np.uint8),
        "attempt": np.zeros(n_rows, np.uint8),
        "token": np.arange(sum(n_tokens), dtype=np.int32),
        "logprob": -np.arange(scored, dtype=np.float32),
        "rank": np.arange(1, scored + 1, dtype=np.int32),
        "topk_token": np.arange(n_topk, dtype=np.int32),
        "topk_logprob": -np.arange(n_topk, dtype=np.float32) / 2,
    }
    return StepColumns(**(fields | over))


def through_the_wire(columns: StepColumns) -> StepColumns:
    return decode_step(encode_step(columns, HEADER))[1]


@pytest.mark.parametrize("proposed", range(MAX_DRAFTS + 1))
@pytest.mark.parametrize("k", [0, 20])
def test_every_acceptance_of_every_draft_count_keeps_emitted_and_proposed_apart(
    proposed: int, k: int
) -> None:
    for accepted in range(proposed + 1):
        columns = columns_of(
            [accepted + 1],
            [k + 1],
            n_proposed=np.array([proposed], np.uint8),
            n_accepted=np.array([accepted], np.uint8),
        )
        (row,) = rows(through_the_wire(columns))
        assert (len(row.tokens), row.n_proposed, row.n_accepted) == (
            accepted + 1,
            proposed,
            accepted,
        )
        assert len(row.logprobs) == accepted + 1
        assert len(row.topk_tokens) == k * (accepted + 1)


@given(n_tokens=st.integers(65, 255), width=st.integers(0, 3))
def test_a_count_beyond_a_row_is_refused_whatever_the_columns_hold(
    n_tokens: int, width: int
) -> None:
    with pytest.raises(RecordError) as refused:
        encode_step(columns_of([n_tokens], [width]), HEADER)
    assert refused.value.reason is RefusalReason.ROW_TOKENS


@given(said=st.integers(0, 64), held=st.integers(0, 64))
def test_a_count_that_the_columns_do_not_bear_out_is_refused(said: int, held: int) -> None:
    columns = replace(columns_of([held], [1]), n_tokens=np.array([said], np.uint8))
    if said == held:
        through_the_wire(columns)
        return
    with pytest.raises(RecordError) as refused:
        encode_step(columns, HEADER)
    assert refused.value.reason is RefusalReason.ROW_SUMS


@given(width=st.integers(66, 255))
def test_more_columns_than_the_format_has_are_refused(width: int) -> None:
    with pytest.raises(RecordError) as refused:
        encode_step(columns_of([1], [width]), HEADER)
    assert refused.value.reason is RefusalReason.ROW_WIDTH


@given(
    data=st.data(),
    n_columns=st.sampled_from([1, 2, 6, 21, 65]),
    n_tokens=st.lists(st.integers(0, 6), min_size=1, max_size=40),
)
def test_a_matrix_of_any_width_arrives_bit_for_bit(
    data: st.DataObject, n_columns: int, n_tokens: list[int]
) -> None:
    seed = data.draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    total, k = sum(n_tokens), n_columns - 1
    ids = rng.integers(0, 2**31 - 1, (total, n_columns)).astype(np.int32)
    scores = -rng.gamma(1.0, 5.0, (total, n_columns)).astype(np.float32)
    columns = columns_of(
        n_tokens,
        [n_columns] * len(n_tokens),
        token=ids[:, 0].copy(),
        logprob=scores[:, 0].copy(),
        topk_token=ids[:, 1:].reshape(-1),
        topk_logprob=scores[:, 1:].reshape(-1),
    )
    got = through_the_wire(columns)
    all_ids = np.column_stack((got.token, got.topk_token.reshape(total, k)))
    all_scores = np.column_stack((got.logprob, got.topk_logprob.reshape(total, k)))
    assert all_ids.tobytes() == ids.tobytes()
    assert all_scores.tobytes() == scores.tobytes()


@given(
    n_tokens=st.integers(0, 64),
    width=st.integers(0, 65),
    attempt=st.integers(0, 255),
    finish=st.sampled_from(Finish),
    extra=st.sampled_from([0, FLAG_ECHO, FLAG_FIRST_TOKEN, FLAG_ECHO | FLAG_FIRST_TOKEN]),
    position=st.integers(0, 2**32 - 1),
)
def test_no_field_of_a_row_alters_another(
    n_tokens: int, width: int, attempt: int, finish: Finish, extra: int, position: int
) -> None:
    columns = columns_of(
        [n_tokens],
        [width],
        attempt=np.array([attempt], np.uint8),
        flags=np.array([finish | extra], np.uint8),
        position=np.array([position], np.uint32),
    )
    (row,) = rows(through_the_wire(columns))
    assert (len(row.tokens), row.width, row.attempt, row.flags, row.position) == (
        n_tokens,
        width,
        attempt,
        finish | extra,
        position,
    )


@given(st.data())
def test_rows_in_any_order_keep_their_own_tokens_and_logprobs(data: st.DataObject) -> None:
    n_tokens = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=12))
    n_rows = len(n_tokens)
    width = data.draw(st.lists(st.integers(0, 5), min_size=n_rows, max_size=n_rows))
    accepted = [max(n - 1, 0) for n in n_tokens]
    columns = columns_of(
        n_tokens,
        width,
        n_proposed=np.full(n_rows, MAX_DRAFTS, np.uint8),
        n_accepted=np.array(accepted, np.uint8),
    )
    order = data.draw(st.permutations(range(n_rows)))
    one = np.arange(n_rows)
    moved = coalesce([select_rows(columns, one == row) for row in order])
    expected = list(rows(columns))
    assert list(rows(through_the_wire(moved))) == [expected[row] for row in order]


@pytest.mark.parametrize("code", ErrorCode)
def test_every_role_made_error_row_is_accepted_by_the_encoder(code: ErrorCode) -> None:
    key = RequestKey(make_handle(7, 9), 3)
    columns = through_the_wire(error_columns(key, code, "why"))
    assert columns.errors == (RowError(0, code, "why"),)
    assert (int(columns.handle[0]), int(columns.attempt[0])) == key


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_the_links_empty_record_is_accepted_by_every_reader(epoch: int, seq: int) -> None:
    header, columns = decode_step(FrameWriter(Role.PREFILL, 1).blank(epoch, seq))
    assert (header.epoch, header.seq, columns.n_rows) == (epoch, seq, 0)
