"""Overlap scheduling changes when work is done and nothing else (R15, R16, R29)."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from baton_testing.numpy_engine import NumpyEngine
from baton_worker.engine.backends.paddle.engine import PaddleEngine
from baton_worker.engine.options import DraftSources, EngineOptions
from baton_worker.engine.scheduling.plans import StepPlan
from baton_worker.identity import RequestKey
from baton_worker.messages import Submit
from baton_worker.records.columns import ErrorCode, Finish
from baton_worker.sampling import RAW_LOGPROBS, LogprobParams, SamplingParams

ENGINES = ("paddle", "device")

SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 7},
    {"temperature": 0.7, "top_p": 0.8, "repetition_penalty": 1.3, "seed": 8},
    {"temperature": 0.0, "frequency_penalty": 0.5, "min_tokens": 6, "ignore_eos": False},
)
LOGPROBS = (-1, 0, 5, 20)
MODES = (
    RAW_LOGPROBS,
    LogprobParams(processed=True),
    LogprobParams(temp_scaled=True, top_p_normalized=True),
)


def _submit_many(bench: Any, prompts: Any, hand_over: bool = False) -> list[RequestKey]:
    return [
        bench.submit(
            number,
            prompt,
            max_tokens=3 + number % 14,
            logprobs_k=LOGPROBS[number // 2 % 4],
            logprobs=MODES[number % 3],
            hand_over=hand_over,
            **SAMPLINGS[number % 4],
        )
        for number, prompt in enumerate(prompts)
    ]


def _said(bench: Any) -> Any:
    """Return what streams say; not what was done for it, where steps are planned by bounds."""
    streams = bench.reader.streams
    if isinstance(bench.engine, PaddleEngine):
        return streams
    return {
        key: dataclasses.replace(stream, proposed=[], accepted=[], shown=[])
        for key, stream in streams.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n_draft", "chunk", "n_blocks"),
    [
        (0, 7, 64),
        (0, 512, 9),
        (1, 7, 9),
        (1, 512, 64),
        (3, 7, 64),
        pytest.param(3, 7, 9, marks=pytest.mark.slow),
        pytest.param(3, 512, 9, marks=pytest.mark.slow),
    ],
)
def test_every_bit_of_every_stream_is_the_same(
    make_bench: Any, make_prompts: Any, n_draft: int, chunk: int, n_blocks: int
) -> None:
    streams, preempted = [], []
    for overlap in (False, True):
        bench = make_bench(
            n_draft=n_draft,
            prefill_tokens=chunk,
            max_running=6,
            max_model_len=64,
            block_size=8,
            n_blocks=n_blocks,
            overlap=overlap,
        )
        _submit_many(bench, make_prompts(14, seed=3))
        preempted.append(sum(result.stats.preempted for result in bench.drain()))
        streams.append(_said(bench))
    assert streams[0] == streams[1]
    if isinstance(bench.engine, PaddleEngine):
        assert preempted[0] == preempted[1]
    if n_blocks == 9:
        assert preempted[0], "the pool is meant to be too small"


@pytest.mark.slow
def test_prefill_and_decode_say_the_same(make_bench: Any, make_prompts: Any) -> None:
    prompts = make_prompts(12, seed=4)
    outcomes = []
    for overlap in (False, True):
        prefill = make_bench(n_draft=2, prefill_tokens=40, max_running=12, overlap=overlap)
        decode = make_bench(n_draft=2, max_running=12, overlap=overlap, reader=prefill.reader)
        _submit_many(prefill, prompts, hand_over=True)
        handoffs = prefill.handoffs()
        for handoff in handoffs:
            decode.engine.admit_handoff(handoff)
            prefill.engine.release_handoff(RequestKey(handoff.state.handle, 0))
        decode.drain()
        kv = [[array.tobytes() for array in handoff.kv] for handoff in handoffs]
        outcomes.append((prefill.reader.streams, [h.state for h in handoffs], kv))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("end", ["abort", "fail"])
def test_a_request_ended_in_flight_leaves_no_trace_of_that_step(make_bench: Any, end: str) -> None:
    bench = make_bench(n_draft=2, overlap=True)
    options = {"temperature": 0.0, "max_tokens": 30, "logprobs_k": 3}
    gone, stays = bench.submit(1, range(5, 30), **options), bench.submit(2, range(6, 40), **options)
    for _ in range(4):
        bench.step()
    said, used = len(bench.reader[gone].tokens), bench.engine.load().kv_blocks_used
    assert said
    if end == "abort":
        assert bench.engine.abort(gone)
        assert not bench.engine.abort(gone), "it ends once"
    else:
        assert bench.engine.fail(gone, ErrorCode.LINK_STALLED, "why")
        assert not bench.engine.fail(gone, ErrorCode.INTERNAL, "another")
    assert bench.engine.load().kv_blocks_used == used, "the step in flight still writes there"
    bench.step()
    assert bench.engine.load().kv_blocks_used < used
    assert bench.reader[gone].finish is (Finish.ABORT if end == "abort" else Finish.ERROR)
    assert len(bench.reader[gone].tokens) == said
    assert bench.reader[gone].error == (None if end == "abort" else (ErrorCode.LINK_STALLED, "why"))
    bench.drain()
    alone = make_bench(n_draft=2)
    same = alone.submit(2, range(6, 40), **options)
    alone.drain()
    assert bench.reader[stays].tokens == alone.reader[same].tokens


def test_the_only_request_ended_in_flight_is_answered_by_the_next_step(make_bench: Any) -> None:
    bench = make_bench(overlap=True)
    key = bench.submit(1, range(5, 30), temperature=0.0, max_tokens=30)
    bench.step()
    bench.engine.abort(key)
    result = bench.step()
    assert bench.reader[key].finish is Finish.ABORT
    assert result.stats.emitted_tokens == 0
    assert not bench.engine.has_work()


def test_a_prompt_ended_in_flight_is_not_handed_over(make_bench: Any) -> None:
    bench = make_bench(n_draft=1, prefill_tokens=10, overlap=True)
    key = bench.submit(1, range(5, 25), temperature=0.0, max_tokens=9, hand_over=True)
    bench.step()  # its second and last chunk is in flight now
    bench.engine.abort(key)
    results = bench.drain()
    assert not any(result.handoffs for result in results)
    assert bench.reader[key].tokens == []
    assert bench.engine.load().kv_blocks_used == 0


def test_a_handoff_ended_in_flight_is_neither_echoed_nor_acknowledged(
    make_bench: Any, make_prompts: Any
) -> None:
    prefill = make_bench(n_draft=1)
    prompts = [*make_prompts(1, seed=6), range(5, 45)]
    _submit_many(prefill, prompts, hand_over=True)
    first, second = prefill.handoffs()
    decode = make_bench(n_draft=1, overlap=True, reader=prefill.reader, kv_bytes_per_step=1)
    decode.engine.admit_handoff(first)
    while not decode.step().imported:
        pass
    decode.engine.admit_handoff(second)
    decode.step()  # a block of the second one's three is copied, beside a step in flight
    assert decode.engine._in_flight.plan.imports
    key = RequestKey(second.state.handle, second.state.attempt)
    decode.engine.abort(key)
    result = decode.step()
    assert result.imported == ()
    assert not decode.reader[key].echoed
    assert decode.reader[key].finish is Finish.ABORT
    decode.drain()
    assert decode.engine.load().kv_blocks_used == 0


def test_what_comes_while_a_step_runs_is_in_the_next_one(make_bench: Any) -> None:
    bench = make_bench(overlap=True)
    options = {"temperature": 0.0, "max_tokens": 9}
    first = bench.submit(1, range(5, 30), **options)
    second: list[RequestKey] = []
    bench.reader.read(
        bench.engine.step(lambda: second or second.append(bench.submit(2, range(6, 20), **options)))
    )
    bench.step()
    assert bench.reader[first].tokens
    assert bench.reader[second[0]].tokens, "it was launched with the second step"
    bench.drain()


def test_a_prompt_ended_between_two_steps_is_not_handed_over(make_bench: Any) -> None:
    """Its blocks are free by the time its KV would be read."""
    bench = make_bench(n_draft=1, overlap=True)
    key = bench.submit(1, range(5, 25), temperature=0.0, max_tokens=9, hand_over=True)
    result = bench.engine.step(lambda: bench.engine.abort(key))
    bench.reader.read(result)
    assert result.handoffs == ()
    assert len(bench.reader[key].tokens) == 1, "the token was chosen before, and is told"
    bench.drain()
    assert bench.reader[key].finish is Finish.ABORT
    assert bench.engine.load().kv_blocks_used == 0


def test_steps_that_overlap_do_not_count_the_same_time_twice(make_bench: Any) -> None:
    bench = make_bench(n_draft=1, overlap=True)
    for number in range(3):
        bench.submit(number, range(5, 30), temperature=0.0, max_tokens=9, logprobs_k=2)
    clock = bench.engine._clock
    before = clock()
    counted = sum(result.stats.step_seconds for result in bench.drain())
    assert 0.0 < counted <= clock() - before


class _Watched:
    """A model that says when a forward pass begins, and how many tokens it was fed."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.begun = threading.Semaphore(0)
        self.fed: list[int] = []

    def forward(self, tokens: Any, plan: Any, *more: Any) -> Any:
        self.fed.append(len(tokens))
        self.begun.release()
        return self.model.forward(tokens, plan, *more)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def _engine(
    tiny: Any, clock: Callable[[], float], engine_class: Any = PaddleEngine, **options: Any
) -> Any:
    fields: dict[str, Any] = {
        "block_size": 16,
        "n_blocks": 64,
        "max_running": 8,
        "max_waiting": 64,
        "max_model_len": 128,
        "prefill_tokens": 512,
        "n_draft": 1,
        "use_mtp": True,
        "max_top_k": 20,
        "overlap": True,
        "drafts": DraftSources(),
    }
    return engine_class(tiny.shape, tiny.weights, EngineOptions(**(fields | options)), clock)


def test_a_step_runs_while_the_output_of_the_one_before_is_made(tiny: Any, key: Any) -> None:
    """The logprob op's clock waits until the next forward pass has begun: without overlap it would
    wait in vain."""
    finishing: list[bool] = []

    def clock() -> float:
        if finishing == [False] and engine._in_flight is not None:
            finishing[0] = watched.begun.acquire(timeout=20.0)
        return 0.0

    engine = _engine(tiny, clock)
    watched = _Watched(engine._parts.runner._model)
    engine._parts.runner._model = watched
    sampling = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    engine.submit(
        Submit(*key(1), prompt_token_ids=tuple(range(5, 25)), sampling=sampling, logprobs_k=2)
    )
    landed = engine._collect(engine._launches.launch(), lambda filled: None)
    assert watched.begun.acquire(timeout=20.0)
    engine._in_flight = engine._launches.launch()
    finishing.append(False)
    result = engine._finish(landed)
    assert finishing == [True]
    assert len(result.columns.logprob) == 1


@pytest.mark.slow
def test_the_plan_bounds_what_a_step_feeds(tiny: Any, key: Any) -> None:
    rng = np.random.default_rng(9)
    engine = _engine(tiny, lambda: 0.0, prefill_tokens=24, n_draft=5, n_blocks=24)
    watched = _Watched(engine._parts.runner._model)
    engine._parts.runner._model = watched
    bounds: list[int] = []
    run = engine._parts.runner.run

    def noting(plan: Any, *more: Any) -> Any:
        bounds.append(plan.most_tokens)
        return run(plan, *more)

    engine._parts.runner.run = noting
    for number in range(24):
        sampling = SamplingParams(
            temperature=0.0, max_tokens=int(rng.integers(1, 30)), ignore_eos=True
        )
        prompt = tuple(rng.integers(5, 500, rng.integers(1, 40)).tolist())
        engine.submit(Submit(*key(number), prompt_token_ids=prompt, sampling=sampling))
        engine.set_num_speculative_tokens(int(rng.integers(0, 6)))
        engine.step()
    while engine.has_work():
        engine.step()
    assert len(bounds) == len(watched.fed)
    assert all(fed <= bound for fed, bound in zip(watched.fed, bounds, strict=True))
    assert any(fed < bound for fed, bound in zip(watched.fed, bounds, strict=True))


def test_a_step_beyond_its_bound_is_stopped_before_the_model_is_fed(tiny: Any, key: Any) -> None:
    engine = _engine(tiny, lambda: 0.0)
    sampling = SamplingParams(temperature=0.0, max_tokens=3)
    engine.submit(Submit(*key(1), prompt_token_ids=tuple(range(5, 25)), sampling=sampling))
    plan = engine._parts.scheduler.plan(1)
    object.__setattr__(plan, "most_tokens", plan.most_tokens - 1)
    with pytest.raises(AssertionError, match="bound"):
        engine._parts.runner.run(plan, 1)


@pytest.mark.parametrize("length", [10, 60])
def test_a_step_ahead_that_is_beyond_its_bound_is_stopped_too(
    tiny: Any, key: Any, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    """One that decodes, and one with the longer prompt's second chunk beside that."""
    engine = _engine(tiny, lambda: 0.0, NumpyEngine, prefill_tokens=32)
    sampling = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    for number, n_tokens in enumerate((5, length)):
        prompt = tuple(range(5, 5 + n_tokens))
        engine.submit(Submit(*key(number), prompt_token_ids=prompt, sampling=sampling))
    planned: list[StepPlan] = []
    plan_ahead = engine._parts.scheduler.plan_ahead

    def beyond(*given: Any) -> Any:
        planned.append(plan := plan_ahead(*given))
        object.__setattr__(plan, "most_tokens", plan.most_tokens - 1)
        return plan

    monkeypatch.setattr(engine._parts.scheduler, "plan_ahead", beyond)
    with pytest.raises(AssertionError, match="bound"):
        engine.step()
    (plan,) = planned
    assert plan.decode
    assert bool(plan.prefill) == (length == 60)
