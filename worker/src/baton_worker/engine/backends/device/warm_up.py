"""Graphs made before the first request: decoding steps of every size, taken twice.

Owns which sizes those are. A step's graph is captured when its like comes for the second time;
without this each size would hold up the requests that first need it. Knows no framework.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable

from baton_worker.engine.api import DeviceError
from baton_worker.engine.backends.device.engine import DeviceEngine, parts_of
from baton_worker.engine.backends.device.runner import DeviceRunner
from baton_worker.engine.backends.device.shapes import sequence_bucket
from baton_worker.engine.engine import StepEngine
from baton_worker.engine.options import EngineOptions
from baton_worker.engine.output.snapshot import StepSnapshot
from baton_worker.engine.scheduling.plans import StepPlan
from baton_worker.engine.step.in_flight import Mark
from baton_worker.identity import RequestKey
from baton_worker.messages import Submit
from baton_worker.sampling import SamplingParams

log = logging.getLogger(__name__)

_STEPS = 3
"""One may still feed a prompt; one launches, the next one captures."""


def decode_sizes(max_running: int) -> tuple[int, ...]:
    """Return the numbers of sequences that decoding steps are rounded up to, the largest first."""
    sizes = {sequence_bucket(count, max_running) for count in range(1, max_running + 1)}
    return tuple(sorted(sizes, reverse=True))


def warm_up(engine: DeviceEngine, clock: Callable[[], float] = time.monotonic) -> None:
    """Take decoding steps of every size, for greedy requests and for sampled ones, without
    logprobs, with a token's own, and with alternatives; where lookup is a source, with as many of
    its drafts as there may be, and with none.

    Alternatives come first: where more graphs are made than are kept, those that most steps need
    are the newest.

    Nothing of it stays in the engine: the requests run in another one over the same pool and
    runner, whose blocks hold nothing yet.

    Raises:
        DeviceError: the model gives numbers that are none, as it would to every request.
    """
    started = clock()
    sizes = decode_sizes(engine.options.max_running)
    for logprobs_k in sorted({-1, 0, engine.options.max_top_k}, reverse=True):
        for temperature in (0.0, 1.0):
            for found in _found(engine.options):
                _descend(_beside(engine, clock, found), sizes, temperature, logprobs_k)
    log.info(
        "decoding steps captured",
        extra={"sizes": sizes[::-1], "seconds": round(clock() - started, 3)},
    )


def _found(options: EngineOptions) -> tuple[tuple[int, ...], ...]:
    """Return what lookup is taken to have found: nothing, and all that it may."""
    most = options.n_draft - options.drafts.model_steps(options.n_draft)
    return ((), (0,) * most) if options.drafts.ngram is not None and most else ((),)


def _beside(engine: DeviceEngine, clock: Callable[[], float], found: tuple[int, ...]) -> StepEngine:
    options = dataclasses.replace(engine.options, overlap=False, prefix_caching=False)
    parts = parts_of(engine.model, engine.pool, engine.runner, options)
    n_model = options.drafts.model_steps(options.n_draft)
    runner = _Finding(engine.runner, n_model, found)
    return StepEngine(dataclasses.replace(parts, runner=runner), options, clock)


@dataclasses.dataclass(frozen=True, slots=True)
class _Finding:
    """A runner behind whose steps lookup has found `found`, whatever there was."""

    runner: DeviceRunner
    n_model: int
    found: tuple[int, ...]

    def run(self, plan: StepPlan, n_draft: int, mark: Mark = lambda n_layers: None) -> StepSnapshot:
        """See `StepRunner.run`."""
        snapshot = self.runner.run(plan, n_draft, mark)
        for request in (*plan.decode, *(chunk.request for chunk in plan.prefill)):
            request.drafts = request.drafts[: self.n_model] + self.found
        return snapshot


def _descend(
    engine: StepEngine, sizes: tuple[int, ...], temperature: float, logprobs_k: int
) -> None:
    """Decode with ever fewer requests."""
    keys = [RequestKey(number, 0) for number in range(1, sizes[0] + 1)]
    n_prompt = _prompt_tokens(engine.options)
    for key in keys:
        engine.submit(_request(key, n_prompt, engine.max_model_len, temperature, logprobs_k))
    # No more than all prompts take: who finds no room would wait for the whole output of others.
    for _ in range(-(-sizes[0] // (engine.options.prefill_tokens // n_prompt))):
        _step(engine)
    for size in sizes:
        for key in keys[size:]:
            engine.abort(key)
        for _ in range(_STEPS):
            _step(engine)
    for key in keys:
        engine.abort(key)
    while engine.has_work():
        _step(engine)
    engine.close()


def _prompt_tokens(options: EngineOptions) -> int:
    """Return how long prompts are: as many tokens as a step feeds again, for behind fewer ones it
    feeds fewer and no drafts. The scheduler feeds so short a prompt whole.
    """
    return min(options.n_open_tokens, options.max_model_len - 1)


def _step(engine: StepEngine) -> None:
    failed = engine.step().failed if engine.has_work() else ()
    if failed:
        n_prompt = _prompt_tokens(engine.options)
        length = "one token" if n_prompt == 1 else f"{n_prompt} tokens"
        raise DeviceError(
            f"the model cannot answer a prompt of {length}: {failed[0].message}; the checkpoint "
            "may be broken, or its numbers too large for engine.dtype"
        )


def _request(
    key: RequestKey, n_prompt: int, max_len: int, temperature: float, logprobs_k: int
) -> Submit:
    sampling = SamplingParams(
        max_tokens=max_len - n_prompt, temperature=temperature, ignore_eos=True, seed=key.handle
    )
    prompt = (0,) * n_prompt
    return Submit(*key, prompt_token_ids=prompt, sampling=sampling, logprobs_k=logprobs_k)
