"""A preempted request is recomputed and continues exactly; nothing is emitted twice."""

from __future__ import annotations

from typing import Any

import pytest

ENGINES = ("paddle", "device")


@pytest.fixture(scope="module")
def prompts(make_prompts: Any) -> list[tuple[int, ...]]:
    return make_prompts(12, seed=4, longest=30)


@pytest.fixture(scope="module")
def alone(make_bench: Any, prompts: Any) -> Any:
    """The reader of each prompt's solo run."""
    bench = make_bench(max_running=1, max_model_len=128)
    _submit(bench, prompts)
    bench.drain()
    return bench.reader


def _submit(bench: Any, prompts: Any) -> list[Any]:
    return [
        bench.submit(
            number,
            prompt,
            temperature=0.8 * (number % 2),
            seed=number,
            max_tokens=30,
            repetition_penalty=1.1 if number % 3 == 0 else 1.0,
            logprobs_k=1,
        )
        for number, prompt in enumerate(prompts)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("n_draft", "n_blocks"), [(0, 16), (2, 18), (5, 20)])
def test_a_tiny_pool_gives_the_solo_output(
    make_bench: Any, prompts: Any, alone: Any, n_draft: int, n_blocks: int
) -> None:
    tight = make_bench(max_model_len=128, block_size=8, n_blocks=n_blocks, n_draft=n_draft)
    keys = _submit(tight, prompts)
    results = tight.drain()
    assert sum(r.stats.preempted for r in results) > 0
    for key in keys:
        stream, expected = tight.reader[key], alone[key]
        assert stream.tokens == expected.tokens
        assert stream.ranks == expected.ranks
        assert stream.logprobs == pytest.approx(expected.logprobs, abs=5e-5)
        assert stream.finish == expected.finish


def test_the_youngest_is_preempted_and_returns_first(make_bench: Any) -> None:
    bench = make_bench(max_model_len=64, block_size=8, n_blocks=8)
    old = bench.submit(1, range(5, 25), temperature=0.0, max_tokens=30)
    young = bench.submit(2, range(30, 50), temperature=0.0, max_tokens=20)
    last = bench.submit(3, range(60, 80), temperature=0.0, max_tokens=4)
    ended, finished = [], set()
    for result in iter(lambda: bench.step() if bench.engine.has_work() else None, None):
        assert result.stats.preempted <= 1
        ended += [key for key in (old, young, last) if key in bench.reader.ended - finished]
        finished |= set(ended)
    assert ended == [old, young, last]


@pytest.mark.slow
def test_a_handed_over_request_survives_preemption_at_decode(
    make_bench: Any, make_prompts: Any, hand_over: Any
) -> None:
    prompts = make_prompts(8, seed=6, longest=30)
    alone = make_bench(max_model_len=128)
    prefill = make_bench(max_model_len=128, block_size=8, n_draft=2)
    decode = make_bench(
        max_model_len=128, block_size=8, n_draft=2, n_blocks=16, reader=prefill.reader
    )
    options = {"temperature": 0.5, "max_tokens": 40, "logprobs_k": 2}
    keys = [alone.submit(n, p, seed=n, **options) for n, p in enumerate(prompts)]
    alone.drain()
    for number, prompt in enumerate(prompts):
        prefill.submit(number, prompt, seed=number, hand_over=True, **options)
    hand_over(prefill, decode, prefill.handoffs())
    results = decode.drain()
    assert sum(r.stats.preempted for r in results) > 0
    for key in keys:
        assert decode.reader[key].tokens == alone.reader[key].tokens
        assert decode.reader[key].echoed
