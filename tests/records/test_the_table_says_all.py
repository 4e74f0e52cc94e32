"""What the tables say of a column is what becomes of it: nothing is left out of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_worker.link.outbox import Weight
from baton_worker.link.parts import TAIL_LIMIT, weigh
from baton_worker.records import columns, scored
from baton_worker.records.coalesce import coalesce
from baton_worker.records.columns import COLUMNS, StepColumns
from baton_worker.records.encode import encode_step
from baton_worker.records.header import StepHeader
from baton_worker.records.scored import ScoredRow, ScoredTokens
from baton_worker.records.table import Table


def arrays_of(kind: type[Any]) -> list[str]:
    """Return the attributes that are columns."""
    return [field.name for field in dataclasses.fields(kind) if "NDArray" in str(field.type)]


@pytest.mark.parametrize(
    ("kind", "table"), [(StepColumns, COLUMNS), (ScoredTokens, scored.COLUMNS)], ids=str
)
def test_every_attribute_has_its_line_and_every_line_its_attribute(
    kind: type[Any], table: Table
) -> None:
    assert sorted(arrays_of(kind)) == sorted(column.name for column in table)


def test_a_column_has_the_type_that_its_line_says() -> None:
    said = {field.name: str(field.type) for field in dataclasses.fields(StepColumns)}
    for column in COLUMNS:
        assert said[column.name] == f"npt.NDArray[np.{column.dtype.name}]"


def test_every_column_has_one_place_in_a_record() -> None:
    places = (columns.ROW_COLUMNS, columns.TOKEN_COLUMNS, columns.DRAFT_COLUMNS)
    found = [line for table in (*places, *columns.EXTENSION_COLUMNS.values()) for line in table]
    assert sorted(found) == sorted(COLUMNS)


def test_columns_of_tokens_need_no_gaps_between_them() -> None:
    """Their bytes are counted and written one after the other."""
    assert len({column.dtype.itemsize for column in columns.TOKEN_COLUMNS}) == 1


@given(data=st.data())
def test_a_record_of_several_steps_is_no_longer_than_what_they_weigh(
    data: st.DataObject, any_columns: Any, header: StepHeader
) -> None:
    parts = data.draw(st.lists(any_columns, min_size=1, max_size=3))
    assert len(encode_step(coalesce(parts), header)) <= sum(weigh(part).n_bytes for part in parts)


def prompts_of(n_rows: int) -> StepColumns:
    """A step that tells rows of 300 prompt tokens with 20 alternatives, as a long chunk does."""
    told = ScoredRow(1, [1] * 300, 21, [-1.0] * 300, [2] * 300, [3] * 6000, [-2.0] * 6000)
    none = np.zeros(n_rows, np.uint8)
    return StepColumns(
        handle=np.arange(n_rows, dtype=np.uint64),
        position=np.zeros(n_rows, np.uint32),
        n_tokens=none,
        width=none,
        flags=none,
        attempt=none,
        prompt_tokens=ScoredTokens.of([told] * n_rows),
    )


def test_steps_that_tell_long_prompts_share_no_record_that_cannot_be_written(
    header: StepHeader,
) -> None:
    """Together they are longer than a frame may be, and all their requests would be given up."""
    steps = [prompts_of(10), prompts_of(11)]
    weights = [weigh(step) for step in steps]
    for step, weight in zip(steps, weights, strict=True):
        assert len(encode_step(step, header)) <= weight.n_bytes
        assert weight.within(TAIL_LIMIT)
    assert not weights[0].plus(weights[1]).within(TAIL_LIMIT)


def test_prompt_tokens_count_against_what_a_record_may_hold() -> None:
    weight = weigh(prompts_of(3))
    assert weight == Weight(weight.n_bytes, 3, 900, 18_000, 0)
