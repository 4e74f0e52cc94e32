"""Logprobs come from untouched logits under temperature, penalties and speculation (R34)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from baton_worker.engine.sampling.sampler import choose
from baton_worker.engine.scheduling.batch import FedSequence
from baton_worker.engine.scheduling.requests import RequestLimits, new_state

ENGINES = ("paddle", "device")


def _run(make_bench: Any, prompts: Any, n_draft: int) -> list[Any]:
    bench = make_bench(n_draft=n_draft)
    keys = [
        bench.submit(
            n, p, temperature=0.7, repetition_penalty=1.2, seed=n, max_tokens=20, logprobs_k=4
        )
        for n, p in enumerate(prompts)
    ]
    bench.drain()
    return [bench.reader[key] for key in keys]


def test_processed_sampling_reports_raw_logprobs_with_and_without_drafts(
    tiny: Any, make_bench: Any, make_prompts: Any
) -> None:
    prompts = make_prompts(10, seed=21)
    plain, speculative = (_run(make_bench, prompts, k) for k in (0, 3))
    for prompt, one, other in zip(prompts, plain, speculative, strict=True):
        assert one.tokens == other.tokens
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=5e-5)
        raw = tiny.logprobs([*prompt, *one.tokens])[len(prompt) - 1 : -1]
        expected = raw[np.arange(len(raw)), one.tokens]
        np.testing.assert_allclose(other.logprobs, expected, rtol=0, atol=5e-5)


def test_sampling_cannot_write_the_logits_it_is_given(make_bench: Any) -> None:
    """Every processing step runs on a copy: the view is read-only and its bytes stay."""
    from baton_worker.messages import Submit
    from baton_worker.sampling import SamplingParams

    rng = np.random.default_rng(0)
    raw = rng.normal(size=(6, 32)).astype(np.float32)
    before = raw.copy()
    raw.flags.writeable = False
    limits = RequestLimits(32, 64, 4, 8, frozenset({1}))
    params = [
        SamplingParams(temperature=t, top_k=5, top_p=0.8, repetition_penalty=1.2, min_tokens=3)
        for t in (0.0, 0.7)
    ]
    states = [
        new_state(Submit(n, 0, prompt_token_ids=(3, 4), sampling=p), limits, 0.0)
        for n, p in enumerate(params)
    ]
    for subset in (states, states[:1] * 2, states[1:] * 2):
        choose(raw, [FedSequence(state, 3 * i, (7, 8), True) for i, state in enumerate(subset)])
        assert (raw == before).all()
    with pytest.raises(ValueError, match="read-only"):
        raw[0, 0] = 1.0
