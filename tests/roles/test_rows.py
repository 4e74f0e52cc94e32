"""Rows reach the gateway that owns them, with exactly their share of every column."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from baton_worker.identity import RequestKey, make_handle
from baton_worker.records.coalesce import select_rows
from baton_worker.records.columns import ErrorCode, Finish, RowError, StepColumns
from baton_worker.records.scored import ScoredRow, ScoredTokens
from baton_worker.roles.rows import by_incarnation, ends, error_columns

ROW = st.tuples(
    st.integers(1, 3),  # incarnation
    st.integers(0, 4),  # tokens
    st.integers(0, 4),  # width
    st.integers(0, 2),  # drafts
    st.booleans(),  # error
)


def build(rows: list[tuple[int, int, int, int, bool]]) -> StepColumns:
    n = np.array([r[1] for r in rows], np.uint8)
    w = np.array([r[2] for r in rows], np.uint8)
    d = np.array([r[3] for r in rows], np.uint8)
    wide = n.astype(int) * (w > 0)
    topk = n.astype(int) * np.maximum(w.astype(int) - 1, 0)
    return StepColumns(
        handle=np.array([make_handle(r[0], i) for i, r in enumerate(rows)], np.uint64),
        position=np.arange(len(rows), dtype=np.uint32),
        n_tokens=n,
        width=w,
        flags=np.array([Finish.ERROR if r[4] else 0 for r in rows], np.uint8),
        attempt=np.zeros(len(rows), np.uint8),
        token=np.arange(n.sum(), dtype=np.int32),
        logprob=np.arange(wide.sum(), dtype=np.float32),
        rank=np.arange(wide.sum(), dtype=np.int32),
        topk_token=np.arange(topk.sum(), dtype=np.int32),
        topk_logprob=np.arange(topk.sum(), dtype=np.float32),
        draft_count=d if d.any() else np.empty(0, np.uint8),
        draft=np.arange(d.sum(), dtype=np.int32),
        n_proposed=n,
        n_accepted=n,
        n_reused=np.arange(len(rows), dtype=np.uint32) * np.uint32(70_000),
        errors=tuple(RowError(i, ErrorCode.INTERNAL, str(i)) for i, r in enumerate(rows) if r[4]),
        verified_drafts=ScoredTokens.of([beside(i, r[3]) for i, r in enumerate(rows)]),
        prompt_tokens=ScoredTokens.of([beside(90 + i, r[2]) for i, r in enumerate(rows)]),
    )


def beside(number: int, count: int) -> ScoredRow:
    """`count` tokens that tell the row, all but the last with a logprob and an alternative."""
    scored = max(count - 1, 0)
    values = [-float(number)] * scored
    return ScoredRow(
        number,
        [number] * count,
        2 if scored else 0,
        values,
        [1] * scored,
        [number] * scored,
        values,
    )


def per_row(columns: StepColumns) -> list[tuple]:
    """Cut the columns row by row, one at a time: the plain meaning of the layout."""
    out, t, lp, k, d = [], 0, 0, 0, 0
    nothing = [None] * columns.n_rows
    drafts_shown = list(columns.verified_drafts.rows()) or nothing
    prompts = list(columns.prompt_tokens.rows()) or nothing
    errors = {e.row: e.message for e in columns.errors}
    for i in range(columns.n_rows):
        n, w = int(columns.n_tokens[i]), int(columns.width[i])
        drafts = int(columns.draft_count[i]) if len(columns.draft_count) else 0
        n_lp, n_k = n if w else 0, n * max(w - 1, 0)
        out.append(
            (
                int(columns.handle[i]),
                int(columns.position[i]),
                columns.token[t : t + n].tolist(),
                columns.logprob[lp : lp + n_lp].tolist(),
                columns.rank[lp : lp + n_lp].tolist(),
                columns.topk_token[k : k + n_k].tolist(),
                columns.topk_logprob[k : k + n_k].tolist(),
                columns.draft[d : d + drafts].tolist(),
                int(columns.n_proposed[i]),
                int(columns.n_reused[i]),
                errors.get(i),
                drafts_shown[i],
                prompts[i],
            )
        )
        t, lp, k, d = t + n, lp + n_lp, k + n_k, d + drafts
    assert (t, lp, k, d) == (
        len(columns.token), len(columns.logprob), len(columns.topk_token), len(columns.draft),
    )  # fmt: skip
    return out


@given(st.lists(ROW, max_size=12))
def test_splitting_by_gateway_loses_and_moves_nothing(rows):
    columns = build(rows)
    whole = per_row(columns)
    parts = by_incarnation(columns)
    for incarnation, part in parts.items():
        assert per_row(part) == [row for row in whole if row[0] >> 40 == incarnation]
    assert sum(part.n_rows for part in parts.values()) == len(rows)


@given(st.lists(ROW, max_size=12), st.data())
def test_selecting_rows_keeps_exactly_their_columns(rows, data):
    keep = np.array([data.draw(st.booleans()) for _ in rows], bool)
    columns = build(rows)
    want = [row for row, kept in zip(per_row(columns), keep, strict=True) if kept]
    assert per_row(select_rows(columns, keep)) == want


def test_those_with_a_finish_end_by_it():
    columns = build([(1, 1, 0, 0, True), (1, 1, 0, 0, False)])
    assert ends(columns) == [(RequestKey(make_handle(1, 0), 0), Finish.ERROR)]


def test_an_error_row_ends_its_request_and_says_why():
    key = RequestKey(make_handle(2, 9), 3)
    columns = error_columns(key, ErrorCode.DECODE_FULL, "full")
    assert ends(columns) == [(key, Finish.ERROR)]
    assert columns.errors == (RowError(0, ErrorCode.DECODE_FULL, "full"),)
