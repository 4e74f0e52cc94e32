"""Requests of every kind, and the ways to serve them: in one engine, or handed over to another.

Owns what is asked and in which order it arrives. Knows no device: engines are handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from baton_testing.engine_bench import Bench, Reader
from baton_testing.exactness.said import Said, said_of
from baton_worker.engine.engine import StepEngine
from baton_worker.identity import RequestKey
from baton_worker.sampling import LogprobParams

MOST_STEPS = 200_000
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 0.7, "top_k": 20, "min_p": 0.02},
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"temperature": 1.2, "presence_penalty": 0.6, "repetition_penalty": 1.1, "top_p": 0.95},
    {"temperature": 0.8, "logit_bias": ((7, 4.0), (11, -3.0)), "bad_words": ((9,), (5, 6))},
)
SCORED: tuple[tuple[int, LogprobParams], ...] = (
    (-1, LogprobParams()),
    (0, LogprobParams()),
    (5, LogprobParams()),
    (20, LogprobParams(prompt_k=5)),
    (2, LogprobParams(processed=True)),
    (1, LogprobParams(temp_scaled=True, prompt_k=0)),
    (3, LogprobParams(top_p_normalized=True)),
    (0, LogprobParams(processed=True, top_p_normalized=True)),
    (20, LogprobParams(temp_scaled=True, top_p_normalized=True)),
    (0, LogprobParams()),
    (64, LogprobParams()),
)


@dataclass(frozen=True)
class Ask:
    """A request: its prompt, how its tokens are chosen, and what is told of them."""

    prompt: tuple[int, ...]
    tokens: int
    sampling: dict[str, Any] = field(default_factory=dict)
    logprobs_k: int = 0
    logprobs: LogprobParams = field(default_factory=LogprobParams)


def mixture(
    count: int, vocab_size: int, longest: int, tokens: int, *, seed: int = 0, max_top_k: int = 20
) -> list[Ask]:
    """Return requests of every kind of sampling with every mode of logprobs, in turn.

    Prompts have 1 to `longest` tokens, half of them short; some are the beginnings of others, and
    some repeat themselves.
    """
    rng = np.random.default_rng(seed)
    asks: list[Ask] = []
    for n in range(count):
        size = int(rng.integers(1, longest + 1) if n % 2 else rng.integers(1, 2 + longest // 8))
        prompt = tuple(rng.integers(2, vocab_size, size).tolist())
        if n % 5 == 4:
            prompt = (asks[n - 1].prompt + prompt)[:longest]
        if n % 7 == 6:
            prompt = (prompt[: 1 + size // 4] * 4)[:longest]
        k, params = SCORED[n % len(SCORED)]
        chosen = SAMPLING[n % len(SAMPLING)] | {"seed": 1000 + n}
        asks.append(Ask(prompt, tokens, chosen, min(k, max_top_k), params))
    return asks


def serve(
    engine: StepEngine,
    asks: Sequence[Ask],
    *,
    arriving: int = 0,
    each_step: Callable[[StepEngine, int], object] = lambda engine, step: None,
    counted: list[int] | None = None,
) -> list[Said]:
    """Serve requests and return what each was told.

    Args:
        arriving: requests that arrive before each step, 0 for all at once.
        each_step: called before each step with its number.
        counted: gets each step's number of preempted requests.
    """
    bench = Bench(engine, Reader())
    keys: list[RequestKey] = []
    step = 0
    while len(keys) < len(asks) or engine.has_work():
        for ask in asks[len(keys) : len(keys) + (arriving or len(asks))]:
            keys.append(submit(bench, len(keys) + 1, ask))
        each_step(engine, step)
        if engine.has_work():
            result = engine.step()
            bench.reader.read(result)
            if counted is not None:
                counted.append(result.stats.preempted)
        step += 1
        assert step < MOST_STEPS, "requests end"
    engine.check_integrity()
    return [said_of(bench.reader[key]) for key in keys]


def submit(bench: Bench, number: int, ask: Ask, *, hand_over: bool = False) -> RequestKey:
    """Submit a request and return its key."""
    return bench.submit(
        number,
        ask.prompt,
        hand_over=hand_over,
        max_tokens=ask.tokens,
        logprobs_k=ask.logprobs_k,
        logprobs=ask.logprobs,
        **ask.sampling,
    )


def serve_in_pair(
    prefill: StepEngine, decode: StepEngine, asks: Sequence[Ask], apart: int = 3
) -> list[Said]:
    """Prefill in one engine, hand each request over as the roles do, decode in the other.

    Args:
        apart: steps of prefill for each one of decode, while there are both.
    """
    reader = Reader()
    here = Bench(prefill, reader)
    keys = [submit(here, n + 1, ask, hand_over=True) for n, ask in enumerate(asks)]
    step = 0
    while prefill.has_work() or decode.has_work():
        if prefill.has_work():
            result = prefill.step()
            reader.read(result)
            for handoff in result.handoffs:
                decode.admit_handoff(handoff)
        if decode.has_work() and (step % apart == 0 or not prefill.has_work()):
            result = decode.step()
            reader.read(result)
            for key in result.imported:
                prefill.release_handoff(key)
        step += 1
        assert step < MOST_STEPS, "requests end"
    assert all(reader[key].echoed for key in keys), "every request was handed over"
    for engine in (prefill, decode):
        engine.check_integrity()
    return [said_of(reader[key]) for key in keys]
