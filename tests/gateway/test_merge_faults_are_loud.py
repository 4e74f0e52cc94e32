"""What cannot be one sequence is an error at once, never a hole and never a wrong token."""

import pytest

from baton_worker.gateway.output.merge import (
    MAX_GAP_SECONDS,
    MAX_HELD_ROWS,
    MAX_HELD_TOKENS,
    Fault,
    RowMerge,
)
from baton_worker.records.columns import FLAG_ECHO, Finish
from baton_worker.records.rows import Row


def make_row(position, tokens, finish=Finish.NONE, attempt=0, flags=0):
    return Row(1, attempt, position, list(tokens), 0, flags | finish, [], [], [], [], [])


def offered(*rows):
    merge = RowMerge()
    return merge, [merge.offer(row, now=0.0) for row in rows]


def test_an_overlap_with_other_ids_is_a_mismatch():
    _, merged = offered(make_row(0, [1, 2]), make_row(1, [9, 3]))
    assert merged[1].fault is Fault.OVERLAP_MISMATCH
    assert merged[1].parts == ()


def test_an_echo_of_another_first_token_is_a_mismatch():
    _, merged = offered(make_row(0, [1]), make_row(0, [2], flags=FLAG_ECHO))
    assert merged[1].fault is Fault.OVERLAP_MISMATCH


def test_an_end_before_what_was_delivered_is_a_mismatch():
    _, merged = offered(make_row(0, [1, 2, 3]), make_row(0, [1], Finish.STOP))
    assert merged[1].fault is Fault.OVERLAP_MISMATCH


def test_an_end_that_comes_with_known_tokens_still_ends():
    _, merged = offered(make_row(0, [1, 2]), make_row(0, [1, 2], Finish.STOP))
    assert merged[1].finish is Finish.STOP
    assert merged[1].parts == ()


def test_a_mismatch_behind_a_closed_gap_is_found():
    _, merged = offered(make_row(2, [7, 8]), make_row(0, [1, 2, 9]))
    assert merged[1].fault is Fault.OVERLAP_MISMATCH
    assert [part.row.tokens for part in merged[1].parts] == [[1, 2, 9]]


@pytest.mark.parametrize("finish", [Finish.ABORT, Finish.ERROR])
def test_abort_and_error_apply_at_once_even_beyond_a_gap(finish):
    _, merged = offered(make_row(7, [], finish))
    assert merged[0].finish is finish


def test_a_stop_beyond_a_gap_waits_for_the_tokens_before_it():
    _, merged = offered(make_row(1, [2], Finish.STOP), make_row(0, [1]))
    assert merged[0].finish is Finish.NONE
    assert merged[1].finish is Finish.STOP


def test_an_end_that_waits_is_not_lost_behind_an_equal_row_without_one():
    _, merged = offered(make_row(1, [2]), make_row(1, [2], Finish.STOP), make_row(0, [1]))
    assert [m.duplicates for m in merged] == [0, 0, 0]
    assert merged[2].finish is Finish.STOP
    assert [part.row.tokens for part in merged[2].parts] == [[1], [2]]


def test_nothing_is_delivered_behind_an_end():
    merge, merged = offered(make_row(1, [2]), make_row(0, [1], Finish.STOP))
    assert merged[1].finish is Finish.STOP
    assert [part.row.tokens for part in merged[1].parts] == [[1]]
    assert (merged[1].held, merge.held_rows) == (0, 1)


def test_nothing_is_delivered_behind_a_mismatch():
    merge, merged = offered(make_row(0, [1]), make_row(2, [3]), make_row(0, [9, 2]))
    assert merged[2].fault is Fault.OVERLAP_MISMATCH
    assert (merged[2].parts, merge.held_rows) == ((), 1)


def test_a_notice_without_tokens_is_no_repetition_and_known_tokens_are():
    _, merged = offered(
        make_row(0, [1]), make_row(1, [], Finish.PREEMPTED), make_row(1, []), make_row(0, [1])
    )
    assert [m.duplicates for m in merged] == [0, 0, 0, 1]
    assert [m.finish for m in merged] == [Finish.NONE] * 4


@pytest.mark.parametrize("bits", [6, 7])
def test_a_way_to_end_that_this_version_does_not_know_is_none(bits):
    _, merged = offered(make_row(0, [1], flags=bits))
    assert merged[0].finish is Finish.NONE
    assert [part.row.tokens for part in merged[0].parts] == [[1]]


def test_a_gap_may_hide_64_rows_256_tokens_and_2_seconds():
    assert (MAX_HELD_ROWS, MAX_HELD_TOKENS, MAX_GAP_SECONDS) == (64, 256, 2.0)


def test_too_many_waiting_rows_are_a_gap_timeout():
    rows = [make_row(2 * i + 1, [i]) for i in range(MAX_HELD_ROWS + 1)]
    merge, merged = offered(*rows)
    assert [m.fault for m in merged] == [None] * MAX_HELD_ROWS + [Fault.GAP_TIMEOUT]
    assert sum(m.held for m in merged) == merge.held_rows


def test_too_many_waiting_tokens_are_a_gap_timeout():
    rows = [make_row(1 + 64 * i, [0] * 64) for i in range(MAX_HELD_TOKENS // 64)]
    _, merged = offered(*rows, make_row(1000, [0]))
    assert [m.fault for m in merged] == [None] * 4 + [Fault.GAP_TIMEOUT]


def test_a_gap_expires_after_its_time_and_not_before():
    merge = RowMerge()
    merge.offer(make_row(1, [2]), now=10.0)
    assert not merge.gap_expired(10.0 + MAX_GAP_SECONDS - 0.01)
    assert merge.gap_expired(10.0 + MAX_GAP_SECONDS)
    merge.offer(make_row(0, [1]), now=11.0)
    assert not merge.gap_expired(100.0)


def test_rows_of_another_attempt_are_dropped():
    merge = RowMerge(attempt=1)
    assert merge.offer(make_row(0, [1], Finish.ERROR, attempt=0), now=0.0).stale
    assert merge.offer(make_row(0, [1], attempt=2), now=0.0).stale
    assert merge.next_position == 0
