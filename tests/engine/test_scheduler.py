"""Who runs and with how many blocks, where one block, token or place more or less decides."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_worker.engine.api import Handoff
from baton_worker.engine.kv.pool import NULL_BLOCK, BlockAllocator
from baton_worker.engine.scheduling.plans import StepPlan
from baton_worker.engine.scheduling.prefix_cache import PrefixCache
from baton_worker.engine.scheduling.requests import (
    Phase,
    RequestLimits,
    RequestState,
    imported_state,
    new_state,
)
from baton_worker.engine.scheduling.scheduler import Scheduler, SchedulerLimits
from baton_worker.identity import RequestKey, make_handle
from baton_worker.messages import HandoffState, Submit
from baton_worker.sampling import LogprobParams, SamplingParams

BLOCK = 4
LIMITS = RequestLimits(vocab_size=100, max_model_len=64, max_top_k=4, table_width=16)


def request(
    number: int, n_prompt: int, *, gateway: int = 1, prompt_k: int = -1, **fields: Any
) -> RequestState:
    """Return a request for 40 tokens whose prompt is like no other's."""
    max_tokens = fields.pop("max_tokens", 40)
    prompt = tuple(10 * number + index % 10 for index in range(n_prompt))
    key = RequestKey(make_handle(gateway, number), 0)
    source = Submit(
        *key,
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=max_tokens),
        logprobs=LogprobParams(prompt_k=prompt_k),
        **fields,
    )
    return new_state(source, LIMITS, 0.0)


def imported(number: int, n_prompt: int, **fields: Any) -> RequestState:
    state = HandoffState(
        handle=make_handle(1, number),
        attempt=0,
        model_fingerprint="m",
        dtype="float32",
        n_layers=1,
        kv_heads=1,
        block_size=BLOCK,
        head_dim=1,
        n_cached=n_prompt,
        prompt_token_ids=(7,) * n_prompt,
        sampling=SamplingParams(max_tokens=40),
        logprobs_k=-1,
        first_token=3,
        **fields,
    )
    return imported_state(Handoff(state, ()), LIMITS, 0.0)


class Bench:
    """A scheduler, and a runner that does as it is told: each row yields one token."""

    def __init__(self, n_blocks: int = 32, *, shares: bool = False, **limits: int) -> None:
        self.allocator = BlockAllocator(n_blocks)
        prefix = PrefixCache(self.allocator, BLOCK, "model") if shares else None
        defaults = {"block_size": BLOCK, "max_running": 8, "max_waiting": 8, "prefill_tokens": 64}
        self.scheduler = Scheduler(SchedulerLimits(**(defaults | limits)), self.allocator, prefix)

    def enqueue(self, *requests: RequestState) -> None:
        for each in requests:
            self.scheduler.enqueue(each)

    def step(self, n_model_drafts: int = 0) -> StepPlan:
        plan = self.scheduler.plan(n_model_drafts)
        for chunk in plan.prefill:
            fed, tokens = chunk.request, chunk.request.tokens
            fed.n_computed += chunk.n_tokens
            if fed.n_computed == len(tokens):
                tokens.append(1)
        for decoded in plan.decode:
            decoded.n_computed += 1
            decoded.tokens.append(1)
        for given_over in plan.imports:
            given_over.n_computed = len(given_over.tokens) - 1
            given_over.incoming = None
        held = [each.blocks for each in self.scheduler.requests()]
        self.allocator.check_integrity(held)
        return plan


def blocks_for(n_positions: int) -> int:
    return -(-n_positions // BLOCK)


sizes = st.integers(1, 20)


@given(n_prompt=sizes, drafts=st.integers(0, 4))
def test_a_prompt_is_given_blocks_for_itself_and_the_drafting_behind_it(
    n_prompt: int, drafts: int
) -> None:
    bench, one = Bench(), request(1, n_prompt)
    bench.enqueue(one)
    plan = bench.scheduler.plan(drafts)
    assert plan.admitted == (one,)
    assert one.n_blocks == blocks_for(n_prompt + max(drafts - 1, 0))


@given(n_prompt=sizes, drafts=st.integers(0, 4), n_verified=st.integers(0, 4))
def test_a_decoding_request_is_given_blocks_for_what_it_feeds_and_drafts(
    n_prompt: int, drafts: int, n_verified: int
) -> None:
    bench, one = Bench(), request(1, n_prompt)
    bench.enqueue(one)
    bench.step()
    one.drafts = (5,) * n_verified
    bench.scheduler.plan(drafts)
    fed = n_prompt + 1 + n_verified + max(drafts - 1, 0)
    assert one.n_blocks == blocks_for(fed)


@given(n_prompt=st.integers(2, 20), raised=st.integers(0, 4))
def test_a_prompt_under_way_is_given_blocks_for_a_raised_draft_count(
    n_prompt: int, raised: int
) -> None:
    bench, one = Bench(prefill_tokens=1), request(1, n_prompt)
    bench.enqueue(one)
    bench.step(0)
    bench.scheduler.plan(raised)
    assert one.n_blocks == blocks_for(n_prompt + max(raised - 1, 0))


def test_a_lowered_draft_count_takes_no_blocks_back() -> None:
    bench, one = Bench(prefill_tokens=1), request(1, 8)
    bench.enqueue(one)
    bench.step(4)
    assert one.n_blocks == 3
    bench.step(0)
    assert one.n_blocks == 3


def test_positions_behind_the_last_token_need_no_blocks() -> None:
    bench, one = Bench(), request(1, 7, max_tokens=1)
    bench.enqueue(one)
    bench.scheduler.plan(4)
    assert one.n_blocks == blocks_for(8)


def test_it_is_full_when_every_place_to_run_and_to_wait_is_taken() -> None:
    bench = Bench(max_running=1, max_waiting=2)
    for number in range(3):
        assert not bench.scheduler.is_full
        bench.enqueue(request(number, 4))
    assert bench.scheduler.is_full
    bench.step()
    assert bench.scheduler.is_full
    assert (bench.scheduler.n_running, bench.scheduler.n_waiting) == (1, 2)


def test_no_more_run_than_may() -> None:
    bench = Bench(max_running=2)
    bench.enqueue(*(request(number, 4) for number in range(3)))
    assert len(bench.step().admitted) == 2
    assert not bench.step().admitted


@pytest.mark.parametrize(("n_blocks", "n_admitted"), [(3, 2), (2, 1)])
def test_an_admission_leaves_each_running_request_a_block_to_grow(
    n_blocks: int, n_admitted: int
) -> None:
    bench = Bench(n_blocks)
    bench.enqueue(request(1, 4), request(2, 4))
    assert len(bench.scheduler.plan(0).admitted) == n_admitted


def test_the_last_free_block_is_grown_into_without_a_preemption() -> None:
    bench, one = Bench(2), request(1, 4)
    bench.enqueue(one)
    bench.step()
    plan = bench.step()
    assert (plan.preempted, plan.decode, one.n_blocks) == ((), (one,), 2)


def test_the_least_urgent_is_preempted_and_starts_anew_without_blocks() -> None:
    bench = Bench(3)
    first, second, third = (request(number, 3) for number in (1, 2, 3))
    for each in (first, second, third):
        bench.enqueue(each)
    bench.scheduler.plan(0)
    assert bench.scheduler.n_running == 2
    for each in (first, second):
        each.n_computed = 3
        each.tokens.append(1)
        each.drafts = (5, 6)
    second.has_foreign_kv = True
    first.drafts = (5,) * 5
    second.n_imported_blocks = 1
    plan = bench.scheduler.plan(0)
    assert plan.preempted == (second,)
    assert (plan.decode, first.n_blocks) == ((first,), 3)
    assert second.phase is Phase.WAITING
    assert (second.n_computed, second.n_imported_blocks, second.n_blocks) == (0, 0, 0)
    assert (second.drafts, second.has_foreign_kv, second.n_named) == ((), False, 0)
    assert set(second.table.tolist()) == {NULL_BLOCK}
    assert plan.admitted == (), "nobody comes in a step that somebody must leave"


def test_of_three_that_run_the_last_is_preempted() -> None:
    bench = Bench(5)
    three = [request(number, 4) for number in (1, 2, 3)]
    bench.enqueue(*three)
    bench.step()
    assert bench.scheduler.n_running == 3
    plan = bench.scheduler.plan(0)
    assert plan.preempted == (three[2],)
    assert [each.n_blocks for each in three] == [2, 2, 0]


def test_who_is_the_last_itself_gives_way_and_is_given_nothing() -> None:
    bench = Bench(3)
    first, second = request(1, 3), request(2, 3)
    bench.enqueue(first, second)
    bench.step()
    second.drafts = (5,) * 8
    plan = bench.scheduler.plan(0)
    assert (plan.preempted, plan.decode) == ((second,), (first,))
    assert (second.n_blocks, second.phase) == (0, Phase.WAITING)


def test_a_preempted_import_keeps_its_drafts_for_it_is_imported_once_more() -> None:
    bench = Bench(4)
    first, second = request(1, 4), imported(2, 3, drafts=(5, 6))
    bench.enqueue(first, second)
    plan = bench.scheduler.plan(0)
    assert (plan.imports, [c.request for c in plan.prefill]) == ((second,), [first])
    first.n_computed, first.drafts = 4, (5,) * 8
    first.tokens.append(1)
    second.n_imported_blocks = 1
    assert bench.scheduler.plan(0).preempted == (second,)
    assert (second.drafts, second.has_foreign_kv) == ((5, 6), True)
    assert second.n_imported_blocks == 0


@given(drafts=st.integers(0, 4), n_verified=st.integers(0, 4))
def test_who_brings_kv_decodes_in_the_step_that_it_is_brought_for(
    drafts: int, n_verified: int
) -> None:
    bench, one = Bench(), imported(1, 3, drafts=(5,) * n_verified)
    bench.enqueue(one)
    given_blocks = []

    def bring_in(requests: list[RequestState]) -> None:
        assert requests == [one]
        given_blocks.append(one.n_blocks)
        one.n_computed, one.incoming = 3, None

    plan = bench.scheduler.plan(drafts, bring_in)
    assert (plan.admitted, plan.decode, plan.imports) == ((one,), (one,), ())
    assert given_blocks == [blocks_for(4 + n_verified + max(drafts - 1, 0))]
    assert plan.most_tokens == 1 + n_verified


def test_who_is_brought_in_does_not_make_room_in_the_same_plan() -> None:
    bench = Bench(4)
    first, second = request(1, 4), imported(2, 3)
    bench.enqueue(first, second)
    bench.scheduler.plan(0)
    first.n_computed, first.drafts = 4, (5,) * 8
    first.tokens.append(1)
    brought: list[RequestState] = []
    assert bench.scheduler.plan(0, brought.extend).preempted == (second,)
    assert not brought


def test_the_most_urgent_is_brought_in_first_and_nobody_who_is_held_back() -> None:
    bench = Bench()
    late, urgent = imported(1, 3, priority=2), imported(2, 3, priority=1)
    bench.enqueue(late, urgent)
    brought: list[RequestState] = []
    bench.scheduler.plan(0, brought.extend)
    assert brought == [urgent, late]
    bench.scheduler.set_paused(frozenset({1}))
    brought.clear()
    bench.scheduler.plan(0, brought.extend)
    assert not brought


def test_prompts_share_the_steps_tokens_down_to_the_last() -> None:
    bench = Bench(prefill_tokens=8)
    first, second, third = request(1, 9), request(2, 8), request(3, 2)
    bench.enqueue(first, second, third)

    def chunks() -> list[tuple[RequestState, int]]:
        return [(chunk.request, chunk.n_tokens) for chunk in bench.step().prefill]

    assert chunks() == [(first, 8)]
    assert chunks() == [(first, 1), (second, 7)]
    assert chunks() == [(second, 1), (third, 2)]


def test_a_plan_foresees_what_its_step_may_feed() -> None:
    bench = Bench()
    first, second = request(1, 4), request(2, 4)
    bench.enqueue(first, second)
    assert bench.step().most_tokens == 8
    second.drafts = (5, 6)
    bench.enqueue(request(3, 3))
    assert bench.step().most_tokens == 2 * (1 + 2) + 3


def test_requests_leave_whatever_they_are_doing_and_leave_nothing() -> None:
    bench = Bench(max_running=2)
    running, held, waiting = (request(number, 5) for number in (1, 2, 3))
    bench.enqueue(running, held, waiting)
    bench.step()
    bench.scheduler.hold(held)
    assert (held.phase, bench.scheduler.n_held) == (Phase.HELD, 1)
    for each in (running, held, waiting):
        bench.scheduler.remove(each)
        assert (each.n_blocks, each.n_named) == (0, 0)
    assert list(bench.scheduler.requests()) == []
    assert bench.allocator.n_used == 0


def test_only_who_is_paused_is_held_back() -> None:
    bench = Bench()
    theirs, ours = request(1, 4, gateway=7), request(2, 4, gateway=8)
    bench.enqueue(theirs, ours)
    bench.scheduler.set_paused(frozenset({7}))
    assert bench.step().admitted == (ours,)
    bench.scheduler.set_paused(frozenset({8}))
    assert bench.step().admitted == (theirs,)
    bench.scheduler.set_paused(frozenset({7, 8}))
    assert not bench.scheduler.can_progress(0)
    bench.scheduler.set_paused(frozenset())
    assert bench.step().decode == (theirs, ours)


def test_it_can_progress_while_anybody_runs_or_can_come() -> None:
    bench = Bench(1)
    assert not bench.scheduler.can_progress(0)
    one = request(1, 4)
    bench.enqueue(one)
    assert bench.scheduler.can_progress(0), "somebody can come"
    bench.step()
    assert bench.scheduler.can_progress(0), "somebody runs"
    bench.scheduler.hold(one)
    bench.enqueue(request(2, 4))
    assert not bench.scheduler.can_progress(0), "who waits has no room"


def test_an_admission_delays_who_waits_or_is_half_computed_and_nobody_else() -> None:
    bench = Bench(max_running=4, prefill_tokens=8)
    decoding, half = request(1, 4), request(2, 9)
    bench.enqueue(decoding)
    bench.step()
    paused = request(3, 4, gateway=7)
    bench.enqueue(half, paused)
    bench.scheduler.set_paused(frozenset({7}))
    bench.step()
    assert (decoding.is_decoding, half.n_computed) == (True, 8)
    bench.enqueue(request(4, 4, priority=-1))
    bench.scheduler.plan(0)
    assert (decoding.n_overtaken, half.n_overtaken, paused.n_overtaken) == (0, 1, 0)


def test_without_a_cache_nothing_is_looked_up() -> None:
    bench = Bench()
    bench.enqueue(request(1, 4))
    assert bench.step().prefix == (0, 0)


def test_hits_count_the_tokens_of_those_that_were_looked_up() -> None:
    bench = Bench(shares=True)
    first = request(1, 9)
    bench.enqueue(first)
    assert bench.step().prefix == (9, 0)
    again, other, brought = request(1, 9), request(1, 9, prompt_k=2), imported(2, 6)
    bench.enqueue(again, other, brought)
    assert bench.step().prefix == (9, 8), "not who wants its prompt scored, nor who brings KV"
    assert (again.n_reused, other.n_reused, brought.n_reused) == (8, 0, 0)
    assert again.blocks[:2] == first.blocks[:2]
    assert bench.step().prefix == (0, 0)


def test_what_was_reused_is_told_of_the_first_admission_and_by_who_brought_it() -> None:
    bench = Bench(6, shares=True)
    first, one = request(1, 4), request(2, 9)
    bench.enqueue(first, one)
    bench.step()
    one.admitted_at = 1.0
    first.drafts = (5,) * 11
    assert bench.scheduler.plan(0).preempted == (one,)
    bench.scheduler.remove(first)
    brought = imported(3, 6, n_reused=4)
    bench.enqueue(brought)
    assert bench.scheduler.plan(0).admitted == (one, brought)
    assert (one.n_computed, one.n_reused, brought.n_reused) == (8, 0, 4)
