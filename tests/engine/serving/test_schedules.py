"""Under any schedule of submissions, endings, steps and handoffs, streams equal their solo runs.

Block accounting is checked after every step by the bench.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton_worker.engine.api import Handoff
from baton_worker.engine.ngram import NgramSizes
from baton_worker.engine.options import DraftSources
from baton_worker.identity import RequestKey
from baton_worker.records.columns import ErrorCode, Finish
from baton_worker.sampling import LogprobParams

ENGINES = ("paddle", "device")

N_PROMPTS = 16
GATEWAY = 1
DRAFTS = (
    DraftSources(),
    DraftSources(0, NgramSizes(1, 2)),
    DraftSources(1, NgramSizes(1, 2)),
)


def _options(number: int) -> dict[str, Any]:
    variants: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "seed": number},
        {"temperature": 0.7, "top_p": 0.8, "repetition_penalty": 1.2, "seed": number},
        {"temperature": 0.0, "frequency_penalty": 0.4, "min_tokens": 4},
        {"temperature": 0.0, "bad_words": ((21,), (22, 23), (9, 9)), "logit_bias": ((9, 4.0),)},
        {"temperature": 0.8, "min_p": 0.1, "top_p": 0.6, "seed": number},
    ]
    k = number % 4 - 1
    wanted = LogprobParams(
        processed=number % 3 == 1,
        temp_scaled=number % 5 == 2,
        top_p_normalized=number % 7 > 3,
        draft_ids=number % 2 == 0,
        draft_logprobs=k >= 0 and number % 3 == 0,
        prompt_k=number % 5 - 2,
    )
    wanted = msgspec.structs.replace(wanted, prompt_k=max(wanted.prompt_k, -1))
    asked = {"max_tokens": 3 + number % 11, "logprobs_k": k, "priority": number % 3}
    return variants[number % 6] | asked | {"logprobs": wanted}


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    """Half of them begin with the same 17 tokens, so that they share blocks."""
    rng = np.random.default_rng(33)
    own = [tuple(rng.integers(2, 64, rng.integers(1, 25)).tolist()) for _ in range(N_PROMPTS)]
    return [tuple(range(20, 37)) + p[:7] if n % 2 else p for n, p in enumerate(own)]


@pytest.fixture(scope="module")
def model(make_model: Any) -> Any:
    return make_model(n_layers=1)


@pytest.fixture(scope="module")
def alone(make_bench: Any, model: Any, prompts: Any) -> list[Any]:
    bench = make_bench(model, max_running=1, max_model_len=48)
    keys = [bench.submit(n, p, ignore_eos=False, **_options(n)) for n, p in enumerate(prompts)]
    bench.drain()
    return [bench.reader[key] for key in keys]


def _prompt_of(stream: Any) -> tuple[list[int], list[float]]:
    """Return the prompt tokens that were told, in any pieces, and their logprobs."""
    tokens = [token for row in stream.prompt for token in row.tokens]
    return tokens, [value for row in stream.prompt for value in row.logprobs]


@dataclass
class Fleet:
    """A prefill and a decode engine with tight pools, and the handoffs between them."""

    prefill: Any
    decode: Any
    prompts: list[tuple[int, ...]]
    numbers: dict[RequestKey, int] = field(default_factory=dict)
    offers: list[Handoff] = field(default_factory=list)
    aborted: set[RequestKey] = field(default_factory=set)

    def submit(self, number: int, hand_over: bool) -> None:
        key = self.prefill.submit(
            len(self.numbers),
            self.prompts[number],
            hand_over=hand_over,
            ignore_eos=False,
            **_options(number),
        )
        self.numbers[key] = number

    def step(self, count: int) -> None:
        for _ in range(count):
            for bench in (self.prefill, self.decode):
                if bench.engine.has_work():
                    self.offers += bench.step().handoffs

    def move(self, index: int) -> None:
        if self.offers:
            handoff = self.offers.pop(index % len(self.offers))
            key = RequestKey(handoff.state.handle, handoff.state.attempt)
            self.prefill.engine.release_handoff(key)
            if key not in self.aborted:
                self.decode.engine.admit_handoff(handoff)

    def end(self, index: int, fail: bool) -> None:
        if not self.numbers:
            return
        key = list(self.numbers)[index % len(self.numbers)]
        for bench in (self.prefill, self.decode):
            if fail:
                held = bench.engine.fail(key, ErrorCode.INTERNAL, "test")
            else:
                held = bench.engine.abort(key)
            if held:
                self.aborted.add(key)

    def drafts(self, at_prefill: int, at_decode: int) -> None:
        self.prefill.engine.set_num_speculative_tokens(at_prefill)
        self.decode.engine.set_num_speculative_tokens(at_decode)

    def pause(self, is_paused: bool) -> None:
        for bench in (self.prefill, self.decode):
            bench.engine.set_paused(frozenset({GATEWAY} if is_paused else ()))

    def drain(self) -> None:
        self.pause(False)
        while self.offers or self.prefill.engine.has_work() or self.decode.engine.has_work():
            self.step(1)
            self.move(0)


actions = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(0, N_PROMPTS - 1), st.booleans()),
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("move"), st.integers(0, 9)),
        st.tuples(st.just("end"), st.integers(0, 30), st.booleans()),
        st.tuples(st.just("drafts"), st.integers(0, 5), st.integers(0, 5)),
        st.tuples(st.just("pause"), st.booleans()),
    ),
    max_size=30,
)


@pytest.mark.slow
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    plan=actions,
    n_blocks=st.integers(6, 20),
    chunk=st.sampled_from([4, 17, 100]),
    drafts=st.sampled_from(DRAFTS),
    prefix_caching=st.booleans(),
    overlap=st.booleans(),
)
def test_every_stream_equals_its_solo_run(
    make_bench: Any,
    model: Any,
    prompts: Any,
    alone: list[Any],
    plan: list[Any],
    n_blocks: int,
    chunk: int,
    drafts: DraftSources,
    prefix_caching: bool,
    overlap: bool,
) -> None:
    options = {"max_model_len": 48, "block_size": 8, "n_draft": 2, "max_running": 6}
    options |= {"drafts": drafts, "prefix_caching": prefix_caching, "overlap": overlap}
    options["use_mtp"] = drafts.max_model_steps > 0
    prefill = make_bench(model, prefill_tokens=chunk, n_blocks=n_blocks, **options)
    decode = make_bench(model, n_blocks=n_blocks, reader=prefill.reader, **options)
    fleet = Fleet(prefill, decode, prompts)
    for name, *arguments in plan:
        getattr(fleet, name)(*arguments)
    fleet.drain()
    for bench in (prefill, decode):
        load = bench.engine.load()
        assert (load.running, load.waiting, load.held_handoffs, load.kv_blocks_used) == (0,) * 4
    for key, number in fleet.numbers.items():
        stream, expected = prefill.reader[key], alone[number]
        if key in fleet.aborted:
            assert stream.finish in (Finish.ABORT, Finish.ERROR)
            assert stream.tokens == expected.tokens[: len(stream.tokens)]
        else:
            assert (stream.tokens, stream.finish) == (expected.tokens, expected.finish)
            assert stream.ranks == expected.ranks
            assert stream.logprobs == pytest.approx(expected.logprobs, abs=5e-5)
            told, expected_told = _prompt_of(stream), _prompt_of(expected)
            assert told[0] == expected_told[0]
            assert told[1] == pytest.approx(expected_told[1], abs=5e-5)
            assert stream.echoed or stream.proposed or len(stream.tokens) <= 1
