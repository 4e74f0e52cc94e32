"""Rows that no record can carry are left out, request by request; the rest of the frame goes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from baton_worker.identity import RequestKey, Role, make_handle
from baton_worker.link.api import RowsRefused
from baton_worker.link.parts import FrameWriter, StepPart
from baton_worker.records.columns import Finish
from baton_worker.records.errors import RecordError
from baton_worker.records.layout import Limits

BAD = (1, 3)


def key(n: int) -> RequestKey:
    return RequestKey(make_handle(77, n), 0)


@pytest.fixture
def step(columns):
    """Five requests' rows, one token each: two tokens are no ids, one of those ends its request."""
    whole = columns(77, range(5))
    token = np.arange(5, dtype=np.int32)
    token[list(BAD)] = 300, -1
    flags = whole.flags.copy()
    flags[[3, 4]] = int(Finish.STOP)
    return replace(whole, token=token, n_tokens=np.ones(5, np.uint8), flags=flags)


def test_the_others_rows_arrive_and_the_bad_ones_requests_are_told(
    pair, step, columns, read_metric
) -> None:
    gateway, worker = pair
    worker.link.publish(77, step, 1)
    worker.link.publish(77, columns(77, [9]), 2)
    gateway.log.wait(lambda log: 9 in gateway.rows())
    assert gateway.rows() == [0, 2, 4, 9]
    refusal = worker.log.wait_for(RowsRefused)[0]
    assert refusal == RowsRefused(77, (key(1), key(3)), "token_range", (key(3),))
    assert read_metric(worker.factory, "baton_link_dropped_rows_total", reason="unwritable") == 2
    assert read_metric(worker.factory, "baton_link_refused_frames_total", reason="token_range") == 1


def test_a_step_of_bad_rows_alone_leaves_no_hole_in_the_numbering(
    pair, step, columns, read_metric
) -> None:
    gateway, worker = pair
    only = replace(columns(77, [1]), token=np.array([999], np.int32), n_tokens=np.ones(1, np.uint8))
    for number in range(3):
        worker.link.publish(77, only, number)
        worker.link.publish(77, columns(77, [10 + number]), number)
    gateway.log.wait(lambda log: len(gateway.rows()) == 3)
    assert gateway.rows() == [10, 11, 12]
    told = [refusal.keys for refusal in worker.log.wait_for(RowsRefused, 3)]
    assert told == [(key(1),)] * 3


def test_rows_of_several_steps_keep_their_order_and_all_rows_of_a_bad_request_go(
    step, columns
) -> None:
    writer = FrameWriter(Role.DECODE, 1, limits=Limits(vocab_size=256))
    parts = [StepPart(columns(77, range(5)), 7), StepPart(step, 8)]
    sorted_out = writer.sort_out(parts)
    kept = [[h & 0xFF for h in part.columns.handle.tolist()] for part in sorted_out.good]
    assert kept == [[0, 2, 4], [0, 2, 4]]
    assert [part.step_id for part in sorted_out.good] == [7, 8]
    assert sorted_out.bad is not None
    assert sorted_out.bad.requests() == (key(1), key(3))
    assert sorted_out.bad.ended() == (key(3),)
    assert {type(fault) for fault in sorted_out.faults.values()} == {RecordError}
    writer.write(sorted_out.good, 1, 1, 0)
