"""Rows are the columns, cut where the counts say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_worker.records.columns import (
    FLAG_ECHO,
    FLAG_HAS_DRAFT,
    ErrorCode,
    Finish,
    RowError,
    StepColumns,
)
from baton_worker.records.rows import Row, rows
from baton_worker.records.scored import NO_SCORED

Make = Callable[..., StepColumns]


def test_each_row_gets_its_own_values(make_columns: Make) -> None:
    columns = make_columns(
        3,
        width=np.array([0, 1, 3], np.uint8),
        flags=np.array([0, FLAG_ECHO, Finish.ERROR | FLAG_HAS_DRAFT], np.uint8),
        logprob=-np.arange(5, dtype=np.float32),
        rank=np.arange(1, 6, dtype=np.int32),
        topk_token=np.arange(6, dtype=np.int32),
        topk_logprob=-np.arange(6, dtype=np.float32),
        draft_count=np.array([0, 0, 2], np.uint8),
        draft=np.array([8, 9], np.int32),
        errors=(RowError(2, ErrorCode.DRAINING, "going"),),
        n_reused=np.array([70_000, 0, 16], np.uint32),
    )
    first, second, third = rows(columns)
    assert (first.tokens, first.logprobs, first.ranks, first.topk_tokens) == ([0], [], [], [])
    assert (second.tokens, second.logprobs, second.ranks) == ([1, 2], [0.0, -1.0], [1, 2])
    assert (second.topk_tokens, second.is_echo, second.drafts) == ([], True, [])
    assert (third.tokens, third.logprobs, third.ranks) == ([3, 4, 5], [-2.0, -3.0, -4.0], [3, 4, 5])
    assert third.topk_tokens == [0, 1, 2, 3, 4, 5]
    assert third.topk_logprobs == [0.0, -1.0, -2.0, -3.0, -4.0, -5.0]
    assert (third.drafts, third.finish) == ([8, 9], Finish.ERROR)
    assert third.error == RowError(2, ErrorCode.DRAINING, "going")
    assert (first.error, first.finish, first.is_echo) == (None, Finish.NONE, False)
    assert [row.position for row in (first, second, third)] == [0, 10, 20]
    assert [row.n_reused for row in (first, second, third)] == [70_000, 0, 16]
    assert (third.n_proposed, third.n_accepted, third.handle) == (3, 1, (7 << 40) + 2)


@given(data=st.data())
def test_rows_partition_every_column(data: st.DataObject, any_columns: Any) -> None:
    columns = data.draw(any_columns)
    found = list(rows(columns))
    for name, column in (
        ("tokens", columns.token),
        ("logprobs", columns.logprob),
        ("ranks", columns.rank),
        ("topk_tokens", columns.topk_token),
        ("topk_logprobs", columns.topk_logprob),
        ("drafts", columns.draft),
    ):
        assert [value for row in found for value in getattr(row, name)] == column.tolist()
    for row in found:
        n_logprobs = len(row.tokens) if row.width else 0
        assert len(row.logprobs) == len(row.ranks) == n_logprobs
        assert len(row.topk_tokens) == n_logprobs * max(0, row.width - 1)
    assert [row.handle for row in found] == columns.handle.tolist()


def test_what_a_record_does_not_tell_is_nothing_in_its_rows(make_columns: Make) -> None:
    none = np.empty(0, np.uint8)
    silent = {"draft_count": none, "draft": np.empty(0, np.int32), "n_proposed": none}
    silent |= {"n_accepted": none, "n_reused": np.empty(0, np.uint32)}
    (row,) = rows(make_columns(1, **silent))
    assert (row.drafts, row.n_proposed, row.n_accepted, row.n_reused) == ([], 0, 0, 0)
    (told,) = rows(make_columns(1))
    assert (told.drafts, told.n_proposed, told.n_accepted, told.n_reused) == ([0, 1], 3, 1, 70_000)
    plain = Row(1, 0, 0, [], 0, 0, [], [], [], [], [])
    assert (plain.n_proposed, plain.n_accepted, plain.n_reused) == (0, 0, 0)


@pytest.mark.parametrize("alone", ["verified_drafts", "prompt_tokens"])
def test_either_kind_of_tokens_beside_the_output_is_told_alone(
    alone: str, make_columns: Make
) -> None:
    other = ({"verified_drafts", "prompt_tokens"} - {alone}).pop()
    (row,) = rows(make_columns(1, **{other: NO_SCORED}))
    assert getattr(row, alone) is not None
    assert getattr(row, other) is None
