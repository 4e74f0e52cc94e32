"""How prompts are cut into chunks, and the plan of a step behind one that is under way."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_worker.engine.kv.pool import BlockAllocator
from baton_worker.engine.scheduling.chunks import cut
from baton_worker.engine.scheduling.plans import StepPlan
from baton_worker.engine.scheduling.requests import RequestLimits, RequestState, new_state
from baton_worker.engine.scheduling.scheduler import Scheduler, SchedulerLimits
from baton_worker.identity import make_handle
from baton_worker.messages import DecodeTarget, Submit
from baton_worker.sampling import SamplingParams

MOST = 400
BLOCK = 4


def prompt(number: int, n_tokens: int, *, hands: bool = True, n_open: int = 1) -> RequestState:
    """Return a prompt; `hands`: that goes to decode."""
    limits = RequestLimits(100, MOST, 4, MOST // BLOCK + 4, n_open_tokens=n_open)
    source = Submit(
        make_handle(1, number),
        0,
        prompt_token_ids=tuple(2 + index % 90 for index in range(n_tokens)),
        sampling=SamplingParams(max_tokens=40),
        decode=DecodeTarget("decode-0", "") if hands else None,
        turn=number,
    )
    return new_state(source, limits, 0.0)


def pieces(request: RequestState, tokens: int) -> list[int]:
    """Return the sizes of a prompt's chunks where nobody else is."""
    found, start = [], 0
    while True:
        (chunk,) = cut([(request, start)], tokens)
        assert chunk.start == start
        found.append(chunk.n_tokens)
        if chunk.is_last:
            return found
        start = request.settled(chunk.stop)


sizes = st.integers(1, 200)


@given(sizes, st.integers(1, 64))
def test_chunks_are_the_whole_prompt_in_order(n_tokens: int, tokens: int) -> None:
    found = pieces(prompt(1, n_tokens), tokens)
    assert sum(found) == n_tokens
    assert found[:-1] == [tokens] * (len(found) - 1)


@given(st.integers(1, 40), st.integers(3, 16), st.integers(1, 3))
def test_open_tokens_are_fed_in_one_piece(n_tokens: int, tokens: int, n_open: int) -> None:
    """Those that all draft layers are fed again: the last chunk holds them all."""
    found = pieces(prompt(1, n_tokens, n_open=n_open), tokens)
    assert found[-1] >= min(n_open, n_tokens)


@given(st.lists(st.tuples(sizes, st.integers(0, 150)), min_size=1, max_size=5), st.integers(1, 300))
def test_nobody_gets_what_the_more_urgent_have_no_room_for(
    asked: list[tuple[int, int]], tokens: int
) -> None:
    prompts = [(prompt(n, size), min(start, size - 1)) for n, (size, start) in enumerate(asked)]
    chunks = cut(prompts, tokens)
    assert sum(chunk.n_tokens for chunk in chunks) <= tokens
    assert [(chunk.request, chunk.start) for chunk in chunks] == prompts[: len(chunks)]
    assert all(chunk.is_last for chunk in chunks[:-1])


def land(scheduler: Scheduler, plan: StepPlan) -> None:
    """Do to requests what a step does: each row yields a token, nobody ends."""
    for chunk in plan.prefill:
        whole = chunk.is_last
        if whole:
            chunk.request.tokens.append(1)
        chunk.request.settle(chunk.stop)
        if whole and chunk.request.hand_over:
            scheduler.hold(chunk.request)
    for decoded in plan.decode:
        decoded.tokens.append(1)
        decoded.settle(len(decoded.tokens) - 1)


prompts = st.lists(st.tuples(st.integers(1, 90), st.booleans()), min_size=1, max_size=5)


@given(prompts, st.integers(3, 40), st.integers(1, 3), st.integers(0, 3))
def test_a_plan_ahead_is_the_plan_that_would_have_waited(
    asked: Sequence[tuple[int, bool]], tokens: int, n_open: int, n_draft: int
) -> None:
    """Where nobody ends in the step under way, and nobody else comes."""
    limits = SchedulerLimits(BLOCK, 8, 8, tokens)
    ahead, waiting = (Scheduler(limits, BlockAllocator(400)) for _ in range(2))
    for scheduler in (ahead, waiting):
        for number, (n_tokens, hands) in enumerate(asked):
            scheduler.enqueue(prompt(number, n_tokens, hands=hands, n_open=n_open))
    under_way, plain = ahead.plan(n_draft), waiting.plan(n_draft)
    for _ in range(30):
        following = ahead.plan_ahead(under_way, (), n_draft, n_draft)
        land(ahead, under_way)
        land(waiting, plain)
        plain = waiting.plan(n_draft)
        assert following is not None or not (plain.decode or plain.prefill)
        if following is None:
            return
        assert fed(following) == fed(plain)
        if n_open == 1:  # else nobody who decodes is fed ahead
            assert following.most_tokens >= plain.most_tokens
        under_way = following


def fed(plan: StepPlan) -> tuple[list[int], list[tuple[int, int, int]]]:
    chunks = [(c.request.turn, c.start, c.n_tokens) for c in plan.prefill]
    return [request.turn for request in plan.decode], chunks


@pytest.mark.parametrize("ended", [1, 2])
def test_who_is_to_end_is_not_in_the_step_behind(ended: int) -> None:
    scheduler = Scheduler(SchedulerLimits(BLOCK, 8, 8, 20), BlockAllocator(100))
    requests = {number: prompt(number, 30, hands=False) for number in (1, 2)}
    for request in requests.values():
        scheduler.enqueue(request)
    before = scheduler.plan(0)
    plan = scheduler.plan_ahead(before, {requests[ended].key}, 0, 0)
    assert plan is not None
    assert {chunk.request for chunk in plan.prefill} == {requests[3 - ended]}


def test_where_blocks_are_too_few_for_all_the_step_waits_and_takes_none() -> None:
    scheduler = Scheduler(SchedulerLimits(BLOCK, 8, 8, 40), allocator := BlockAllocator(14))
    for number in (1, 2):
        scheduler.enqueue(prompt(number, 15, hands=False))
    land(scheduler, scheduler.plan(0))
    before = scheduler.plan(0)  # each fills its fourth block, and needs one more behind that
    assert len(before.decode) == 2
    spare = allocator.allocate(allocator.n_free - 1)
    assert scheduler.plan_ahead(before, (), 0, 0) is None
    assert allocator.n_free == 1
    allocator.free(spare[:1])
    assert scheduler.plan_ahead(before, (), 0, 0) is not None
    assert allocator.n_free == 0
