"""Drafts are told with the draft layer's own logprobs, by position; no token changes (R28)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from baton_testing import numpy_reference as reference
from baton_worker.engine.ngram import NgramSizes
from baton_worker.engine.options import DraftSources
from baton_worker.sampling import LogprobParams

ENGINES = ("paddle", "device")

TOLERANCE = 5e-5
IDS = LogprobParams(draft_ids=True)
SCORES = LogprobParams(draft_logprobs=True)


def oracle(model: Any, tokens: list[int], count: int) -> Any:
    """Return (draft, f64[V] logprobs) of `count` drafts behind `tokens`."""
    return reference.drafts(model.weights, model.shape, tokens, count)


def _check(model: Any, prompt: Any, stream: Any, k: int) -> int:
    """Compare every draft of a stream with the oracle; return how many there were."""
    n_drafts = 0
    for row in filter(None, stream.shown):
        known = [*prompt, *stream.tokens[: row.first]]
        assert len(row.logprobs) == len(row.ranks) == len(row.tokens)
        assert row.width == 1 + k
        expected = list(oracle(model, known, len(row.tokens)))
        assert row.tokens == [draft for draft, _ in expected]
        for i, (draft, scores) in enumerate(expected):
            assert row.logprobs[i] == pytest.approx(scores[draft], abs=TOLERANCE)
            assert row.ranks[i] == 1
            best = -np.sort(-scores)[:k]
            np.testing.assert_allclose(
                row.topk_logprobs[i * k : (i + 1) * k], best, rtol=0, atol=TOLERANCE
            )
        n_drafts += len(row.tokens)
    return n_drafts


@pytest.fixture(scope="module")
def prompts(make_prompts: Any) -> Any:
    return make_prompts(8, seed=61, longest=40)


def _options(number: int, **more: Any) -> dict[str, Any]:
    temperature = 0.8 * (number % 2)
    return {"temperature": temperature, "seed": number, "max_tokens": 16} | more


@pytest.mark.slow
@pytest.mark.parametrize(("n_draft", "k"), [(1, 0), (3, 2), (5, 20)])
@pytest.mark.parametrize("prefill_tokens", [512, 9], ids=["whole", "chunks"])
def test_each_draft_has_the_layers_own_logprob(
    tiny: Any, make_bench: Any, prompts: Any, n_draft: int, k: int, prefill_tokens: int
) -> None:
    bench = make_bench(n_draft=n_draft, prefill_tokens=prefill_tokens)
    keys = [
        bench.submit(n, p, logprobs_k=k, logprobs=SCORES, **_options(n))
        for n, p in enumerate(prompts)
    ]
    bench.drain()
    for key, prompt in zip(keys, prompts, strict=True):
        stream = bench.reader[key]
        assert _check(tiny, prompt, stream, k) == sum(stream.proposed) > 0


def test_drafts_of_prefill_are_told_by_decode_with_their_logprobs(
    tiny: Any, make_bench: Any, prompts: Any, hand_over: Any
) -> None:
    prefill = make_bench(n_draft=3)
    decode = make_bench(n_draft=2, reader=prefill.reader)
    keys = [
        prefill.submit(n, p, logprobs_k=2, logprobs=SCORES, hand_over=True, **_options(n))
        for n, p in enumerate(prompts)
    ]
    hand_over(prefill, decode, prefill.handoffs())
    decode.drain()
    for key, prompt in zip(keys, prompts, strict=True):
        stream = decode.reader[key]
        first = next(row for row in stream.shown if row is not None)
        assert (first.first, len(first.tokens)) == (1, 3)
        _check(tiny, prompt, stream, 2)


def test_what_is_told_is_what_was_verified(make_bench: Any, prompts: Any) -> None:
    """Positions join: an accepted draft is the token at its position, the next one is not."""
    bench = make_bench(n_draft=4)
    keys = [bench.submit(n, p, logprobs=IDS, **_options(n)) for n, p in enumerate(prompts)]
    bench.drain()
    for stream in (bench.reader[key] for key in keys):
        rows = [row for row in stream.shown if row is not None]
        assert sum(len(row.tokens) for row in rows) == sum(stream.proposed) > 0
        assert all(row.width == 0 and not row.logprobs for row in rows)
        for row, accepted in zip(stream.shown, stream.accepted, strict=True):
            if row is None:
                continue
            output = stream.tokens[row.first : row.first + accepted]
            assert row.tokens[: len(output)] == output
            if accepted < len(row.tokens) and row.first + accepted < len(stream.tokens):
                assert row.tokens[accepted] != stream.tokens[row.first + accepted]


@pytest.mark.slow
def test_only_those_who_ask_are_told_and_nobodys_tokens_change(
    make_bench: Any, prompts: Any
) -> None:
    wants = [LogprobParams(), IDS, SCORES, LogprobParams(processed=True)]
    streams = []
    for told in (False, True):
        bench = make_bench(n_draft=3, max_running=4)
        keys = [
            bench.submit(
                n,
                p,
                logprobs_k=n % 3,
                logprobs=wants[n % 4] if told else LogprobParams(processed=n % 4 == 3),
                **_options(n),
            )
            for n, p in enumerate(prompts)
        ]
        bench.drain()
        streams.append([bench.reader[key] for key in keys])
    for number, (without, asked) in enumerate(zip(*streams, strict=True)):
        assert without.tokens == asked.tokens
        assert without.logprobs == asked.logprobs
        assert not any(without.shown)
        assert any(asked.shown) == (number % 4 in (1, 2))


def test_drafts_that_were_looked_up_have_ids_and_no_logprobs(make_bench: Any) -> None:
    """Behind the layer's own drafts: a missing logprob loses neither token nor draft."""
    bench = make_bench(n_draft=4, use_mtp=True, drafts=DraftSources(2, NgramSizes(1, 3)))
    prompt = tuple(range(40, 60)) * 3
    key = bench.submit(1, prompt, logprobs_k=1, logprobs=SCORES, temperature=0.0, max_tokens=40)
    bench.drain()
    rows = [row for row in bench.reader[key].shown if row is not None]
    assert {len(row.logprobs) for row in rows} <= {1, 2}
    assert any(len(row.tokens) > len(row.logprobs) for row in rows)
    assert sum(len(row.tokens) for row in rows) == sum(bench.reader[key].proposed)


@pytest.mark.slow
def test_preemption_drops_drafts_and_no_token(make_bench: Any, prompts: Any) -> None:
    streams = []
    for options in ({}, {"block_size": 8, "n_blocks": 32, "max_running": 8}):
        bench = make_bench(n_draft=2, **options)
        keys = [
            bench.submit(n, p, logprobs_k=1, logprobs=SCORES, **_options(n) | {"max_tokens": 60})
            for n, p in enumerate(prompts)
        ]
        results = bench.drain()
        streams.append([bench.reader[key] for key in keys])
        assert bool(options) == (sum(r.stats.preempted for r in results) > 0)
    for calm, preempted in zip(*streams, strict=True):
        assert calm.tokens == preempted.tokens
        for row in filter(None, preempted.shown):
            assert len(row.logprobs) == len(row.tokens)
