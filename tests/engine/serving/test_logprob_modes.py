"""Each logprob mode is what its definition gives in float64, in every path (R33, R34, R37)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from baton_testing import numpy_reference as reference
from baton_worker.engine.api import EngineRefusedError
from baton_worker.records.columns import Finish
from baton_worker.sampling import LogprobParams, SamplingParams

ENGINES = ("paddle", "device")

TOLERANCE = 5e-5
LOWEST = float(np.finfo(np.float32).min)
MODES = [
    LogprobParams(),
    LogprobParams(processed=True),
    LogprobParams(temp_scaled=True),
    LogprobParams(top_p_normalized=True),
    LogprobParams(processed=True, top_p_normalized=True),
    LogprobParams(temp_scaled=True, top_p_normalized=True),
    LogprobParams(processed=True, temp_scaled=True),
]
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0, "repetition_penalty": 1.3, "bad_words": ((65,), (300, 300))},
    {"temperature": 0.7, "top_p": 0.8, "logit_bias": ((40, 3.0), (41, -3.0))},
    {"temperature": 1.6, "top_p": 0.5, "top_k": 30, "frequency_penalty": 0.6},
    {"temperature": 0.9, "top_p": 0.9, "min_p": 0.02, "min_tokens": 9, "ignore_eos": False},
    {"temperature": 0.0, "presence_penalty": 1.1, "top_p": 0.6},
]
N_REQUESTS = len(MODES) * len(SAMPLING)


def _options(number: int) -> dict[str, Any]:
    sampling = SAMPLING[number % len(SAMPLING)]
    return {
        "seed": number,
        "max_tokens": 14 - number % 3,
        "logprobs_k": (0, 4, 20)[number % 3],
        "logprobs": MODES[number // len(SAMPLING)],
    } | sampling


def _processed(row: Any, prompt: Any, output: list[int], p: SamplingParams, eos: Any) -> Any:
    """Bias, penalties and masks from their definitions, on one row of float64 logits."""
    x = row.copy()
    for token, value in p.logit_bias:
        x[token] += value
    for token in {*prompt, *output}:
        x[token] = (
            x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
        )
    for token in set(output):
        x[token] -= p.presence_penalty + p.frequency_penalty * output.count(token)
    for *before, last in p.bad_words:
        if not before or output[-len(before) :] == before:
            x[last] = -np.inf
    if len(output) < p.min_tokens:
        x[list(eos)] = -np.inf
    return x


def oracle(model: Any, prompt: Any, output: list[int], options: dict[str, Any]) -> Any:
    """f64[T, V]: what each output token's logprobs are to be."""
    mode = options["logprobs"]
    p = SamplingParams(
        **{k: v for k, v in options.items() if k not in ("logprobs", "logprobs_k", "hand_over")}
    )
    logits = reference.forward(model.weights, model.shape, [*prompt, *output][:-1]).logits
    rows = []
    for index, row in enumerate(logits[len(prompt) - 1 :]):
        x = row
        if mode.processed:
            x = _processed(row, prompt, output[:index], p, model.shape.eos_token_ids)
        if (mode.processed or mode.temp_scaled) and p.temperature:
            x = x / p.temperature
        if mode.top_p_normalized and p.top_p < 1.0:
            weight = np.exp(x - x.max())
            order = sorted(range(len(x)), key=lambda t: (-x[t], t))
            before = np.cumsum(weight[order]) - weight[order]
            x = x.copy()
            x[np.array(order)[before > p.top_p * weight.sum()]] = -np.inf
        rows.append(reference.log_softmax(x))
    return np.maximum(np.array(rows), LOWEST)


def _check(model: Any, prompt: Any, stream: Any, options: dict[str, Any]) -> None:
    expected = oracle(model, prompt, stream.tokens, options)
    k = options["logprobs_k"]
    assert len(stream.tokens) == len(stream.logprobs) == len(expected)
    got = np.array(stream.logprobs)
    want = expected[np.arange(len(expected)), stream.tokens]
    np.testing.assert_allclose(np.maximum(got, -1e30), np.maximum(want, -1e30), atol=TOLERANCE)
    if k:
        best = -np.sort(-expected, axis=1)[:, :k]
        top = np.array([[value for _, value in row] for row in stream.topk])
        np.testing.assert_allclose(np.maximum(top, -1e30), np.maximum(best, -1e30), atol=TOLERANCE)
    if options["logprobs"].processed:
        assert (got > LOWEST).all(), "what was chosen is never outside"


@pytest.fixture(scope="module")
def prompts(make_prompts: Any) -> Any:
    return make_prompts(N_REQUESTS, seed=44, longest=50)


@pytest.mark.parametrize(
    ("n_draft", "prefill_tokens"), [(0, 512), (2, 512), (5, 9)], ids=["plain", "mtp", "chunks"]
)
def test_one_batch_of_all_modes_gives_each_its_own(
    tiny: Any, make_bench: Any, prompts: Any, n_draft: int, prefill_tokens: int
) -> None:
    bench = make_bench(n_draft=n_draft, prefill_tokens=prefill_tokens, max_running=64)
    keys = [bench.submit(n, p, **_options(n)) for n, p in enumerate(prompts)]
    bench.drain()
    for number, (key, prompt) in enumerate(zip(keys, prompts, strict=True)):
        _check(tiny, prompt, bench.reader[key], _options(number))


@pytest.mark.slow
def test_prefill_scores_the_first_token_and_decode_the_rest(
    tiny: Any, make_bench: Any, prompts: Any, hand_over: Any
) -> None:
    prefill = make_bench(n_draft=2, max_running=64)
    decode = make_bench(n_draft=3, max_running=64, reader=prefill.reader)
    keys = [prefill.submit(n, p, hand_over=True, **_options(n)) for n, p in enumerate(prompts)]
    hand_over(prefill, decode, prefill.handoffs())
    decode.drain()
    for number, (key, prompt) in enumerate(zip(keys, prompts, strict=True)):
        _check(tiny, prompt, decode.reader[key], _options(number))


@pytest.mark.slow
def test_the_token_that_ends_a_request_is_scored_in_its_mode(tiny: Any, make_bench: Any) -> None:
    prompt, number = tuple(range(5, 30)), 0
    first = make_bench(n_draft=3)
    key = first.submit(1, prompt, temperature=0.0, max_tokens=12)
    first.drain()
    stop = first.reader[key].tokens[7]
    for mode in MODES:
        for ending in ({"stop_token_ids": (stop,)}, {"max_tokens": 5}):
            number += 1
            bench = make_bench(n_draft=3)
            options: dict[str, Any] = {
                "temperature": 0.0,
                "repetition_penalty": 1.0,
                "top_p": 0.4,
                "max_tokens": 12,
                "logprobs_k": 2,
                "logprobs": mode,
            } | ending
            key = bench.submit(number, prompt, **options)
            bench.drain()
            stream = bench.reader[key]
            assert stream.finish is (Finish.STOP if "stop_token_ids" in ending else Finish.LENGTH)
            _check(tiny, prompt, stream, options)


@pytest.mark.slow
def test_preemption_keeps_each_mode(tiny: Any, make_bench: Any, prompts: Any) -> None:
    bench = make_bench(n_draft=2, block_size=8, n_blocks=32, max_running=12)
    keys = [bench.submit(n, p, **_options(n)) for n, p in enumerate(prompts)]
    assert sum(r.stats.preempted for r in bench.drain()) > 0
    for number, (key, prompt) in enumerate(zip(keys, prompts, strict=True)):
        _check(tiny, prompt, bench.reader[key], _options(number))


def test_other_modes_in_the_batch_leave_raw_bits_alone(make_bench: Any, make_prompts: Any) -> None:
    prompt = make_prompts(1, seed=3)[0]
    streams = []
    for others in (0, 6):
        bench = make_bench(n_draft=1)
        key = bench.submit(90, prompt, seed=5, max_tokens=10, logprobs_k=5)
        for n in range(others):
            bench.submit(n, prompt, seed=n, max_tokens=10, logprobs_k=3, logprobs=MODES[n + 1])
        bench.drain()
        streams.append(bench.reader[key])
    assert streams[0].logprobs == streams[1].logprobs
    assert streams[0].topk == streams[1].topk


@pytest.mark.parametrize("temperature", [1e-9, 1e-5, 2.0])
def test_extreme_temperatures_stay_finite(make_bench: Any, temperature: float) -> None:
    bench = make_bench(n_draft=1)
    key = bench.submit(
        1,
        range(5, 30),
        temperature=temperature,
        top_p=0.5,
        max_tokens=6,
        logprobs_k=3,
        logprobs=LogprobParams(processed=True, top_p_normalized=True),
    )
    bench.drain()
    stream = bench.reader[key]
    assert all(-1e4 < value <= 1e-3 for value in stream.logprobs)
    if temperature < 1.0:
        assert stream.logprobs == pytest.approx([0.0] * 6, abs=1e-6)


def test_64_alternatives_where_the_configuration_allows_them(tiny: Any, make_bench: Any) -> None:
    bench = make_bench(n_draft=2, max_top_k=64)
    prompt = tuple(range(5, 30))
    keys = {k: bench.submit(k, prompt, max_tokens=8, logprobs_k=k, seed=1) for k in (64, 21, 0)}
    bench.drain()
    widest = bench.reader[keys[64]]
    assert [len(row) for row in widest.topk] == [64] * 8
    assert [row[:21] for row in widest.topk] == bench.reader[keys[21]].topk
    _check(tiny, prompt, widest, {"logprobs_k": 64, "logprobs": MODES[0], "temperature": 1.0})
    with pytest.raises(EngineRefusedError, match="logprobs_k is 65"):
        bench.submit(1, prompt, logprobs_k=65)
