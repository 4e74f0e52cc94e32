"""With overlap a device is given a prompt's next chunk while it computes the one before."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from baton_testing.engine_bench import LoadedModel
from baton_testing.pool_pair import LONG, Pair, alone, said
from baton_worker.engine.api import DeviceError
from baton_worker.engine.backends.device.program import Program
from baton_worker.engine.backends.device.runner import DeviceRunner
from baton_worker.engine.options import DraftSources
from baton_worker.engine.scheduling.plans import StepPlan
from baton_worker.records.columns import ErrorCode, Finish
from baton_worker.sampling import LogprobParams

ENGINES = ("device",)

CHUNK = 16
POISON = 9


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, StepPlan]]:
    """Of each launch, whether it was behind a step under way, and its plan."""
    noted: list[tuple[bool, StepPlan]] = []
    start, start_ahead = DeviceRunner.start, DeviceRunner.start_ahead
    is_ahead: list[bool] = []

    def noted_start(self: Any, plan: StepPlan, *given: Any) -> Any:
        if not is_ahead:
            noted.append((False, plan))
        return start(self, plan, *given)

    def noted_ahead(self: Any, behind: Any, plan: StepPlan, *given: Any) -> Any:
        is_ahead.append(True)
        flight = start_ahead(self, behind, plan, *given)
        is_ahead.clear()
        if flight is not None:
            noted.append((True, plan))
        return flight

    monkeypatch.setattr(DeviceRunner, "start", noted_start)
    monkeypatch.setattr(DeviceRunner, "start_ahead", noted_ahead)
    return noted


SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0.7, "repetition_penalty": 1.3, "frequency_penalty": 0.2},
    {"temperature": 0.0, "logit_bias": ((5, 3.0),), "bad_words": ((9,),)},
)


def prompt(n_tokens: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(10, 60, n_tokens).tolist())


def _served(bench: Any, lengths: Any, every: int = 3, **more: Any) -> Any:
    """Serve prompts of these lengths; a new one comes with each so many steps."""
    keys: list[Any] = []
    number = 0
    while len(keys) < len(lengths) or bench.engine.has_work():
        if number % every == 0 and len(keys) < len(lengths):
            n = len(keys)
            sampling = SAMPLINGS[n % 4] | {"seed": n, "max_tokens": 6 + 5 * n} | more
            params = LogprobParams(draft_logprobs=n % 2 == 0, processed=n % 4 == 1)
            wanted = {"logprobs_k": (-1, 0, 4)[n % 3], "logprobs": params} | sampling
            keys.append(bench.submit(n, prompt(lengths[n], n), **wanted))
        if bench.engine.has_work():
            bench.step()
        number += 1
    streams = [bench.reader[key] for key in keys]
    bench.check_nothing_is_left()
    return [(s.tokens, s.logprobs, s.ranks, s.topk, s.finish) for s in streams]


@pytest.mark.parametrize("n_draft", [0, 1, 3])
def test_a_prompt_alone_waits_for_its_host_once(
    make_bench: Any, launches: list[tuple[bool, StepPlan]], n_draft: int
) -> None:
    """Its first token is that of chunks that wait for each other, and so are its drafts."""
    found = []
    for overlap in (False, True):
        launches.clear()
        bench = make_bench(n_draft=n_draft, overlap=overlap, prefill_tokens=CHUNK)
        bench.submit(1, prompt(100), temperature=0.0, max_tokens=9, logprobs_k=2, hand_over=True)
        (handoff,) = bench.handoffs()
        found.append((handoff.state, *[np.array(array).tobytes() for array in handoff.kv]))
        assert [plan.prefill[0].n_tokens for _, plan in launches] == [CHUNK] * 6 + [4]
        assert [plan.prefill[0].start for _, plan in launches] == [*range(0, 100, CHUNK)]
        assert [is_ahead for is_ahead, _ in launches] == [False] + [overlap] * 6
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize("n_draft", [0, 1, 3])
def test_prompts_and_who_decodes_beside_them_say_the_same(
    make_bench: Any, launches: list[tuple[bool, StepPlan]], n_draft: int
) -> None:
    """Prompts end in steps that are ahead, several in one too, and decode behind them."""
    lengths = (3, 70, 33, 90, 5, 7, 61, 2)
    wanted = _served(make_bench(n_draft=n_draft), lengths)
    launches.clear()
    for every in (1, 3, 8):
        bench = make_bench(n_draft=n_draft, overlap=True, prefill_tokens=CHUNK)
        assert _served(bench, lengths, every) == wanted
    ahead = [plan for is_ahead, plan in launches if is_ahead]
    mixed = [plan for plan in ahead if plan.prefill and plan.decode]
    ended = [
        sum(c.request in behind.decode for c in plan.prefill) for plan, behind in pairwise(mixed)
    ]
    assert max(ended) > 1
    assert len(mixed) > 2 * len(lengths), "most chunks stand beside who decodes"


@pytest.mark.parametrize("n_draft", [0, 2])
def test_who_decodes_is_in_every_step_beside_chunks(
    make_bench: Any, launches: list[tuple[bool, StepPlan]], n_draft: int
) -> None:
    """Whether or not a step may go ahead of him: chunks never leave anybody out."""
    for sampling in ({}, {"bad_words": ((7, 8),)}):
        launches.clear()
        bench = make_bench(n_draft=n_draft, overlap=True, prefill_tokens=8)
        short = bench.submit(1, (15, 16, 17), temperature=0.0, max_tokens=60, **sampling)
        bench.step()
        bench.submit(2, prompt(80), temperature=0.0, max_tokens=2)
        bench.step()
        while any(plan.prefill for _, plan in launches[-1:]):
            n_before = len(bench.reader[short].tokens)
            bench.step()
            assert len(bench.reader[short].tokens) > n_before
        chunks = [is_ahead for is_ahead, plan in launches[2:] if plan.prefill]
        assert len(chunks) == 10
        assert sum(chunks) == (0 if sampling else 9), "all but the one that lets it in"
        bench.drain()


def test_who_comes_waits_for_the_chunks_under_way_and_no_other(
    make_bench: Any, launches: list[tuple[bool, StepPlan]]
) -> None:
    """For one more than without steps ahead: the one that is launched already."""
    bench = make_bench(overlap=True, prefill_tokens=CHUNK)
    bench.submit(1, prompt(160), temperature=0.0, max_tokens=2)
    bench.step()  # the first chunk has landed, the second one is under way
    urgent = bench.submit(2, (15, 16, 17), temperature=0.0, max_tokens=2, priority=-1)
    n_launched = len(launches)
    bench.step()
    assert launches[n_launched][1].admitted, "the next launch lets it in"
    assert n_launched == 2
    bench.step()
    assert bench.reader[urgent].tokens


def test_a_prompts_logprobs_are_taken_while_its_step_is_waited_for(
    make_bench: Any, launches: list[tuple[bool, StepPlan]]
) -> None:
    found = []
    for overlap in (False, True):
        launches.clear()
        bench = make_bench(overlap=overlap, prefill_tokens=CHUNK, n_draft=1)
        params = LogprobParams(prompt_k=2)
        scored = bench.submit(1, prompt(70), temperature=0.0, max_tokens=4, logprobs=params)
        plain = bench.submit(2, prompt(50, 3), temperature=0.0, max_tokens=4)
        bench.drain()
        streams = [bench.reader[key] for key in (scored, plain)]
        found.append([(s.prompt, s.tokens, s.logprobs) for s in streams])
        for is_ahead, plan in launches:
            assert not (is_ahead and scored in {chunk.request.key for chunk in plan.prefill})
    assert found[0] == found[1]
    assert any(is_ahead and plan.prefill for is_ahead, plan in launches), "the other one's"


@pytest.mark.parametrize("length", [4, 16, 17, 18, 31, 33, 50])
def test_several_draft_layers_have_the_same_kv(
    make_bench: Any, tiny: LoadedModel, launches: list[tuple[bool, StepPlan]], length: int
) -> None:
    """A last chunk begins at the tokens that all layers are fed again, wherever others ended."""
    mtp = tiny.weights.mtp * 3
    shape = dataclasses.replace(tiny.shape, n_mtp_layers=3)
    model = LoadedModel(shape, dataclasses.replace(tiny.weights, mtp=mtp))
    found = []
    for overlap in (False, True):
        launches.clear()
        options = {"model": model, "n_draft": 3, "prefill_tokens": CHUNK, "overlap": overlap}
        bench = make_bench(**options)
        first = bench.submit(1, prompt(length), temperature=0.0, max_tokens=12, logprobs_k=1)
        bench.drain()
        stream = bench.reader[first]
        found.append((stream.tokens, stream.logprobs, stream.proposed, stream.accepted))
    assert found[0] == found[1]
    chunks = [is_ahead for is_ahead, plan in launches if plan.prefill]
    assert chunks == [False] + [True] * (len(chunks) - 1)


def test_a_prompt_without_drafts_by_the_model_goes_ahead_too(
    make_bench: Any, launches: list[tuple[bool, StepPlan]]
) -> None:
    from baton_worker.engine.ngram import NgramSizes

    sources = DraftSources(0, NgramSizes(1, 3))
    lookup = {"n_draft": 2, "use_mtp": False, "drafts": sources, "prefill_tokens": CHUNK}
    found = []
    for overlap in (False, True):
        launches.clear()
        bench = make_bench(overlap=overlap, **lookup)
        found.append(_served(bench, (60, 40)))
    assert found[0] == found[1]
    assert launches[1][0], "the second chunk"


@pytest.mark.parametrize("when", ["one under way", "two under way"])
def test_a_prompt_that_is_cancelled_between_two_chunks_leaves_nothing(
    make_bench: Any, launches: list[tuple[bool, StepPlan]], when: str
) -> None:
    """Its blocks come free with the last chunk that was planned before anybody knew."""
    bench = make_bench(overlap=True, prefill_tokens=CHUNK, n_draft=1)
    other = bench.submit(1, prompt(20, 1), temperature=0.0, max_tokens=40, logprobs_k=1)
    victim = bench.submit(2, prompt(150, 2), temperature=0.0, max_tokens=9)
    for _ in range(3):
        bench.step()
    request = bench.engine._requests[victim]
    n_computed = request.n_computed
    if when == "one under way":
        assert bench.engine.abort(victim)
    else:  # noted behind the launch of the next chunk, while the one before is waited for

        def cancel() -> None:
            bench.engine.abort(victim)

        landed = DeviceRunner.start_ahead
        with pytest.MonkeyPatch.context() as patch:

            def launched(self: Any, *given: Any) -> Any:
                flight = landed(self, *given)
                cancel()
                return flight

            patch.setattr(DeviceRunner, "start_ahead", launched)
            bench.step()
        assert launches[-1][1].chunk_of(request) is not None
    assert bench.reader[victim].finish is (Finish.NONE if when == "one under way" else Finish.ABORT)
    bench.step()
    assert bench.reader[victim].finish is Finish.ABORT
    assert not request.n_blocks
    assert request.n_computed <= n_computed + CHUNK
    bench.drain()
    bench.check_nothing_is_left()
    plain = make_bench(prefill_tokens=CHUNK, n_draft=1)
    wanted = plain.submit(1, prompt(20, 1), temperature=0.0, max_tokens=40, logprobs_k=1)
    plain.drain()
    found = bench.reader[other]
    assert (found.tokens, found.logprobs) == (
        plain.reader[wanted].tokens,
        plain.reader[wanted].logprobs,
    )


@pytest.fixture(scope="module")
def poisoned(make_model: Callable[..., Any]) -> Any:
    """A model in which one token's embedding is NaN, and that token is never chosen."""
    model = make_model(3)
    embed, head = model.weights.embed.copy(), model.weights.lm_head.copy()
    embed[POISON], head[:, POISON] = np.nan, 0.0
    return dataclasses.replace(
        model, weights=dataclasses.replace(model.weights, embed=embed, lm_head=head)
    )


def test_all_blocks_of_a_prompt_that_failed_are_cleared_also_those_that_a_chunk_ahead_writes(
    make_bench: Any, launches: list[tuple[bool, StepPlan]], poisoned: Any
) -> None:
    """What is ahead computes NaN for nobody, into blocks that are free already."""
    bench = make_bench(model=poisoned, prefill_tokens=CHUNK, overlap=True)
    tokens = list(prompt(3 * CHUNK))
    tokens[3] = tokens[CHUNK + 3] = POISON
    victim = bench.submit(1, tokens, temperature=0.0, max_tokens=5)
    request, blocks = bench.engine._requests[victim], []
    bench.engine.step(lambda: blocks.extend(request.blocks))
    assert [(is_ahead, plan.prefill[0].start) for is_ahead, plan in launches] == [
        (False, 0),
        (True, CHUNK),
    ]
    assert not request.n_blocks, "it has failed"
    assert len(blocks) == 3
    bench.drain()
    allocator = bench.engine._parts.allocator
    allocator.allocate(allocator.n_free)
    assert set(allocator.take_uncleared()) == set(blocks)


def test_a_chunk_of_who_has_ended_says_nothing_of_the_one_behind_it(
    make_bench: Any, launches: list[tuple[bool, StepPlan]], poisoned: Any
) -> None:
    """The first prompt fails while both are in the step ahead, each with a chunk."""
    bench = make_bench(model=poisoned, prefill_tokens=CHUNK, overlap=True)
    tokens = list(prompt(20))
    tokens[3] = tokens[CHUNK + 1] = POISON
    broken = bench.submit(1, tokens, temperature=0.0, max_tokens=8)
    living = bench.submit(2, prompt(30, 1), temperature=0.0, max_tokens=8)
    bench.drain()
    is_ahead, plan = launches[1]
    assert is_ahead
    assert [(c.request.key, c.start, c.n_tokens) for c in plan.prefill] == [
        (broken, CHUNK, 4),
        (living, 0, 12),
    ]
    assert bench.reader[broken].error is not None
    assert bench.reader[broken].error[0] is ErrorCode.ARITHMETIC
    assert bench.reader[living].error is None
    assert len(bench.reader[living].tokens) == 8
    bench.check_nothing_is_left()


def test_a_rank_that_failed_a_chunk_is_told_before_anything_of_it_counts(
    make_bench: Any, monkeypatch: pytest.MonkeyPatch, launches: list[tuple[bool, StepPlan]]
) -> None:
    """The next one is under way by then, and nothing of either is."""
    bench = make_bench(overlap=True, prefill_tokens=CHUNK)
    key = bench.submit(1, prompt(100), temperature=0.0, max_tokens=5)
    bench.step()
    request = bench.engine._requests[key]
    assert request.n_computed == CHUNK

    def refuse(*given: Any) -> None:
        raise DeviceError("rank 1 gave up on rank 0")

    monkeypatch.setattr(Program, "check_ranks", refuse)
    with pytest.raises(DeviceError):
        bench.engine.step()
    assert request.n_computed == CHUNK
    assert launches[-1][1].prefill[0].start == 2 * CHUNK


def test_decode_is_told_of_blocks_when_they_are_computed_and_not_when_they_are_launched(
    make_bench: Any, launches: list[tuple[bool, StepPlan]]
) -> None:
    pair = Pair(make_bench, overlap=True)
    key = pair.submit(1, LONG)
    request = pair.prefill.engine._requests[key]
    for n_told in (2, 4, 6, 8):
        (filled,) = pair.prefill.step().filled
        assert len(filled.kv.blocks) == n_told == request.n_computed // CHUNK
        assert launches[-1][1].prefill[0].start == n_told * CHUNK, "the next one is under way"
        pair.tell(filled)
    (handoff,) = pair.compute()
    pair.offer(handoff)
    pair.finish()
    assert said(pair.decode, key) == alone(make_bench, 1, LONG)
    pair.check_nothing_is_left()


@pytest.mark.slow
@pytest.mark.parametrize("n_draft", [0, 3])
def test_few_blocks_preempt_the_same_and_say_the_same(
    make_bench: Any, launches: list[tuple[bool, StepPlan]], n_draft: int
) -> None:
    few = {"n_draft": n_draft, "n_blocks": 14, "max_running": 4, "prefix_caching": True}
    lengths = (40, 70, 33, 50, 20, 60)
    wanted = _served(make_bench(n_draft=n_draft), lengths, max_tokens=60)
    bench = make_bench(**few, overlap=True, prefill_tokens=CHUNK)
    launches.clear()
    assert _served(bench, lengths, max_tokens=60) == wanted
    assert any(plan.preempted for _, plan in launches)
    assert any(is_ahead and plan.prefill for is_ahead, plan in launches)


def test_who_is_held_back_between_chunks_goes_on_where_he_stood(make_bench: Any) -> None:
    wanted = _served(make_bench(n_draft=2), (70, 40, 55))
    bench = make_bench(n_draft=2, overlap=True, prefill_tokens=CHUNK)
    number, plain_step = 0, bench.step

    def step() -> Any:
        nonlocal number
        number += 1
        bench.engine.set_paused(frozenset({1}) if number % 4 == 3 else frozenset())
        return plain_step() if bench.engine.has_work() else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "step", step)
        has_work = bench.engine.has_work
        patch.setattr(bench.engine, "has_work", lambda: has_work() or bool(bench.known()))
        assert _served(bench, (70, 40, 55)) == wanted
