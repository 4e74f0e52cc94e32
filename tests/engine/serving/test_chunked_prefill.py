"""Chunked prefill equals one pass, and says nothing before the last chunk (R26)."""

from __future__ import annotations

from typing import Any

import pytest

ENGINES = ("paddle", "device")


def _submit(bench: Any, prompts: Any) -> list[Any]:
    return [
        bench.submit(n, p, temperature=0.6, seed=n, max_tokens=10, logprobs_k=3)
        for n, p in enumerate(prompts)
    ]


@pytest.fixture(scope="module")
def whole(make_bench: Any, make_prompts: Any) -> Any:
    prompts = make_prompts(5, seed=2, longest=120)
    bench = make_bench(n_draft=1)
    keys = _submit(bench, prompts)
    bench.drain()
    return prompts, [bench.reader[key] for key in keys]


@pytest.mark.parametrize("budget", [pytest.param(1, marks=pytest.mark.slow), 7, 16, 100])
@pytest.mark.parametrize("n_draft", [0, 2])
def test_chunks_give_the_same_output(
    make_bench: Any, whole: Any, budget: int, n_draft: int
) -> None:
    prompts, expected = whole
    bench = make_bench(n_draft=n_draft, prefill_tokens=budget)
    keys = _submit(bench, prompts)
    results = bench.drain()
    assert max(r.stats.prefill_tokens for r in results) <= budget
    for key, stream in zip(keys, expected, strict=True):
        assert bench.reader[key].tokens == stream.tokens
        assert bench.reader[key].logprobs == pytest.approx(stream.logprobs, abs=5e-5)


def test_unfinished_chunks_emit_no_row(make_bench: Any) -> None:
    bench = make_bench(n_draft=2, prefill_tokens=10)
    bench.submit(1, tuple(range(5, 40)), temperature=0.0, max_tokens=3, hand_over=True)
    rows = [(bench.step().columns.n_rows, bench.engine.load().held_handoffs) for _ in range(4)]
    assert rows == [(0, 0), (0, 0), (0, 0), (1, 1)]


def test_decoding_goes_on_beside_a_long_prefill(make_bench: Any) -> None:
    bench = make_bench(prefill_tokens=8)
    short = bench.submit(1, (5, 6, 7), temperature=0.0, max_tokens=12)
    bench.step()
    bench.submit(2, tuple(range(5, 85)), temperature=0.0, max_tokens=2)
    for emitted in range(2, 10):
        result = bench.step()
        assert len(bench.reader[short].tokens) == emitted
        assert result.stats.prefill_tokens == 8
