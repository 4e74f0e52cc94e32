"""Every emitted token carries its own raw logprob, rank and alternatives (R33-R37, R42)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

ENGINES = ("paddle", "device")

TOLERANCE = 5e-5


@pytest.fixture(scope="module", params=[0, 2], ids=["plain", "speculative"])
def mixed(request: Any, make_bench: Any, make_prompts: Any) -> Any:
    """One batch with every width at once."""
    bench = make_bench(n_draft=request.param)
    prompts = make_prompts(12, seed=5)
    keys = {
        bench.submit(
            n, p, temperature=0.8 * (n % 2), seed=n, max_tokens=15, logprobs_k=(-1, 0, 3, 20)[n % 4]
        ): p
        for n, p in enumerate(prompts)
    }
    bench.drain()
    return bench, keys


def test_logprob_and_rank_are_the_references(tiny: Any, mixed: Any) -> None:
    bench, keys = mixed
    for key, prompt in keys.items():
        stream = bench.reader[key]
        if not stream.logprobs:
            continue
        expected = tiny.logprobs([*prompt, *stream.tokens])[len(prompt) - 1 : -1]
        for row, token, logprob, rank in zip(
            expected, stream.tokens, stream.logprobs, stream.ranks, strict=True
        ):
            assert logprob == pytest.approx(row[token], abs=TOLERANCE)
            at_least = np.count_nonzero(row >= row[token] + TOLERANCE)
            at_most = np.count_nonzero(row >= row[token] - TOLERANCE)
            assert at_least <= rank <= at_most


def test_alternatives_are_the_k_best_in_order(tiny: Any, mixed: Any) -> None:
    bench, keys = mixed
    for number, (key, prompt) in enumerate(keys.items()):
        stream, k = bench.reader[key], (-1, 0, 3, 20)[number % 4]
        assert len(stream.tokens) == 15
        assert len(stream.logprobs) == (15 if k >= 0 else 0)
        assert [len(row) for row in stream.topk] == ([k] * 15 if k > 0 else [])
        if k <= 0:
            continue
        expected = tiny.logprobs([*prompt, *stream.tokens])[len(prompt) - 1 : -1]
        best = -np.sort(-expected, axis=1)[:, :k]
        np.testing.assert_allclose(
            [[value for _, value in row] for row in stream.topk], best, rtol=0, atol=TOLERANCE
        )


@pytest.mark.slow
def test_top_3_is_a_prefix_of_top_20_and_rank_ignores_k(make_bench: Any, make_prompts: Any) -> None:
    results = {}
    for k in (0, 3, 20):
        bench = make_bench(n_draft=1)
        keys = [
            bench.submit(n, p, temperature=1.0, seed=n, max_tokens=12, logprobs_k=k)
            for n, p in enumerate(make_prompts(6, seed=9))
        ]
        bench.drain()
        results[k] = [bench.reader[key] for key in keys]
    for none, three, twenty in zip(results[0], results[3], results[20], strict=True):
        assert none.tokens == three.tokens == twenty.tokens
        assert none.logprobs == three.logprobs == twenty.logprobs
        assert none.ranks == three.ranks == twenty.ranks
        assert three.topk == [row[:3] for row in twenty.topk]


def test_logprobs_take_no_blocks(make_bench: Any, make_prompts: Any) -> None:
    """Drafts and logprobs together once allocated twice elsewhere (R32)."""
    used = []
    for k in (-1, 20):
        bench = make_bench(n_draft=1)
        for n, p in enumerate(make_prompts(6, seed=9)):
            bench.submit(n, p, temperature=0.0, max_tokens=20, logprobs_k=k)
        steps = []
        while bench.engine.has_work():
            bench.step()
            steps.append(bench.engine.load().kv_blocks_used)
        used.append(steps)
    assert used[0] == used[1]
    assert used[0][0] > 0


@pytest.mark.parametrize("k", [-2, 21])
def test_more_alternatives_than_allowed_are_refused(make_bench: Any, k: int) -> None:
    from baton_worker.engine.api import EngineRefusedError
    from baton_worker.records.columns import ErrorCode

    with pytest.raises(EngineRefusedError, match=f"logprobs_k is {k}") as refusal:
        make_bench().submit(1, (5, 6), logprobs_k=k)
    assert refusal.value.code is ErrorCode.INVALID_REQUEST
