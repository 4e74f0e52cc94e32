"""Rows that a gateway will never get end their requests with a row that says so (R7)."""

from __future__ import annotations

import pytest

from baton_worker.handoff.api import HandoffFailed
from baton_worker.identity import RequestKey, make_handle
from baton_worker.link.api import Pressure, RowsRefused
from baton_worker.messages import Abort, DecodeTarget, Reserve, Submit
from baton_worker.records.columns import ErrorCode, Finish
from baton_worker.sampling import SamplingParams

GATEWAY = 77
PROMPT = tuple(range(20, 60))


def handle(n: int = 1) -> int:
    return make_handle(GATEWAY, n)


def submit(n: int, decode: str | None = None, max_tokens: int = 200) -> Submit:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    target = None if decode is None else DecodeTarget(decode, "memory")
    return Submit(
        handle(n), 0, prompt_token_ids=PROMPT, sampling=sampling, logprobs_k=1, decode=target
    )


def counted(worker, name: str, **labels: str) -> float:
    registry = worker.registry
    return registry.get_sample_value(name, {"model": "tiny", "role": "mixed", **labels}) or 0.0


def test_refused_rows_end_their_requests_by_name_and_no_other(make_worker):
    worker = make_worker("mixed-0")
    for n in (1, 2, 3):
        worker.command(submit(n, max_tokens=30))
    worker.turn(3)
    lost = tuple(RequestKey(handle(n), 0) for n in (1, 3))
    worker.loop.inbox.put(RowsRefused(GATEWAY, lost, "ring_full"))
    worker.run()
    for n in (1, 3):
        assert worker.finish(handle(n)) is Finish.ERROR
        error = worker.rows(handle(n))[-1].error
        assert error.code is ErrorCode.INTERNAL
        assert "ring_full" in error.message
    assert worker.finish(handle(2)) is Finish.LENGTH
    assert len(worker.tokens(handle(2))) == 30
    assert worker.is_clean()


def test_a_request_whose_last_row_was_refused_is_ended_once_more(make_worker):
    """The worker is done with it, the gateway never heard so: without another row it would wait."""
    worker = make_worker("mixed-0")
    for n in (1, 2):
        worker.command(submit(n, max_tokens=3))
    worker.run()
    keys = tuple(RequestKey(handle(n), 0) for n in (1, 2))
    worker.loop.inbox.put(RowsRefused(GATEWAY, keys, "rank_range", keys[1:]))
    worker.run()
    assert [row.finish for row in worker.rows(handle(1))][-1] is Finish.LENGTH
    last = worker.rows(handle(2))[-1]
    assert (last.finish, last.error.code) == (Finish.ERROR, ErrorCode.INTERNAL)
    assert "rank_range" in last.error.message
    assert counted(worker, "baton_worker_refused_total", reason="internal") == 1
    assert worker.is_clean()


def test_a_refusal_while_the_handoff_waits_frees_both_sides(make_worker):
    prefill, decode = make_worker("prefill-0"), make_worker("decode-0")
    decode.command(Reserve(handle(), 0, len(PROMPT), 12, 60.0))
    decode.turn()
    decode.transport.is_deaf = True
    prefill.command(submit(1, "decode-0"))
    prefill.run()
    assert prefill.loop.parts.engine.load().held_handoffs == 1
    prefill.loop.inbox.put(RowsRefused(GATEWAY, (RequestKey(handle(), 0),), "corrupt"))
    prefill.run()
    assert prefill.finish(handle()) is Finish.ERROR
    assert prefill.is_clean()
    decode.command(Abort(handle(), 0))  # what the gateway sends when a request is over
    decode.run()
    assert decode.is_clean()


@pytest.mark.parametrize("turns", range(5))
def test_an_abort_may_come_any_number_of_times(make_worker, turns):
    """R50: the first abort ends the request, later ones change and say nothing."""
    prefill, decode = make_worker("prefill-0"), make_worker("decode-0")
    decode.command(Reserve(handle(), 0, len(PROMPT), 200, 60.0))
    prefill.command(submit(1, "decode-0"))
    for _ in range(turns):
        prefill.turn()
        decode.turn()
    said = []
    for _ in range(3):
        for worker in (prefill, decode):
            worker.command(Abort(handle(), 0))
        for worker in (prefill, decode, prefill, decode):
            worker.run()
        assert prefill.is_clean()
        assert decode.is_clean()
        said.append([len(worker.rows(handle())) for worker in (prefill, decode)])
    assert said[0] == said[1] == said[2]
    for worker in (prefill, decode):
        ends = [r for r in worker.rows(handle()) if r.finish is not Finish.NONE]
        assert len(ends) <= 1
        assert all(row.finish is Finish.ABORT for row in ends)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_stalled_gateway_costs_each_of_its_requests_one_row(make_worker, overlap):
    """The ladder is looked at before a step and between two that overlap."""
    worker = make_worker("mixed-0", overlap=overlap)
    for n in (1, 2, 3):
        worker.command(submit(n))
    worker.turn(3)
    worker.link.level = Pressure.STALLED
    worker.run()
    assert [worker.finish(handle(n)) for n in (1, 2, 3)] == [Finish.ERROR] * 3
    assert counted(worker, "baton_worker_refused_total", reason="link_stalled") == 3
    assert worker.is_clean()


@pytest.fixture
def offered(make_worker):
    """A prefill worker whose handoff waits for an answer."""
    prefill, decode = make_worker("prefill-0"), make_worker("decode-0")
    decode.transport.is_deaf = True
    prefill.command(submit(1, "decode-0"))
    prefill.run()
    return prefill


FAILED = HandoffFailed(RequestKey(handle(), 0), ErrorCode.HANDOFF_TIMEOUT, "too late")


def test_a_handoff_that_fails_behind_its_abort_says_nothing(offered):
    said = len(offered.link.published)
    offered.command(Abort(handle(), 0))
    offered.loop.inbox.put(FAILED)  # was on its way when the abort cancelled the offer
    offered.run()
    assert len(offered.link.published) == said
    assert counted(offered, "baton_worker_refused_total", reason="handoff_timeout") == 0
    assert offered.is_clean()


def test_a_handoff_that_fails_behind_a_refusal_of_its_rows_ends_the_request_once(offered):
    offered.loop.inbox.put(RowsRefused(GATEWAY, (RequestKey(handle(), 0),), "corrupt"))
    offered.loop.inbox.put(FAILED)
    offered.run()
    assert offered.finish(handle()) is Finish.ERROR
    assert offered.is_clean()


def test_an_abort_behind_a_refusal_changes_nothing(make_worker):
    worker = make_worker("mixed-0")
    worker.command(submit(1))
    worker.turn(3)
    worker.loop.inbox.put(RowsRefused(GATEWAY, (RequestKey(handle(), 0),), "corrupt"))
    worker.command(Abort(handle(), 0))
    worker.loop.inbox.put(RowsRefused(GATEWAY, (RequestKey(handle(), 0),), "corrupt"))
    worker.run()
    assert worker.finish(handle()) is Finish.ERROR
    assert counted(worker, "baton_worker_refused_total", reason="internal") == 1
    assert worker.is_clean()


@pytest.mark.parametrize("why", ["backed up", "full"])
def test_a_handoff_whose_place_was_refused_is_turned_away(make_worker, why):
    """Nobody would tell decode to stop: its refusal has ended the attempt, for all others."""
    prefill = make_worker("prefill-0")
    decode = make_worker("decode-0", ledger_capacity=0 if why == "full" else 8)
    if why == "backed up":
        decode.link.level = Pressure.STOP_ADMITTING
    decode.command(Reserve(handle(), 0, len(PROMPT), 12, 60.0))
    decode.run()
    assert decode.finish(handle()) is Finish.ERROR
    decode.link.level = Pressure.OPEN
    decode.loop.parts.ledger.capacity = 8
    prefill.command(submit(1, "decode-0"))
    for worker in (prefill, decode, prefill):
        worker.run()
    assert decode.transport.answers == [(RequestKey(handle(), 0), "DECODE_FULL")]
    assert decode.is_clean()
    assert prefill.is_clean()


def test_an_abort_of_a_request_that_never_came_says_nothing(make_worker):
    worker = make_worker("mixed-0")
    worker.command(Abort(handle(5), 0))
    worker.run()
    assert worker.link.published == []
