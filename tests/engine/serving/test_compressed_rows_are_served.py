"""A model with MLA keeps one row a token, and says the same bits however that row came to be there:
computed at once or in chunks, found in the cache, sent, or pulled out of another pool.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from baton_testing.pool_pair import LONG, Pair, alone, said
from baton_worker.identity import RequestKey
from baton_worker.records.columns import ErrorCode

ENGINES = ("paddle", "device")

OPTIONS: dict[str, Any] = {"max_tokens": 12, "logprobs_k": 2}
CASES = pytest.mark.parametrize("q_rank", [20, None], ids=["compressed", "whole-queries"])


@pytest.fixture
def make(make_checkpoint: Callable[..., Any], load_model: Any, make_bench: Any) -> Any:
    """`make(q_rank)`: what makes benches of a small DeepSeek-V3."""

    def made(q_rank: int | None) -> Callable[..., Any]:
        model = load_model(make_checkpoint("deepseek_v3", q_lora_rank=q_rank).path)
        return lambda **options: make_bench(model, **options)

    return made


def submitted(bench: Any, prompts: Any, start: int = 0, **options: Any) -> list[RequestKey]:
    return [
        bench.submit(start + n, prompt, temperature=0.9 * (n % 2), seed=n, **(OPTIONS | options))
        for n, prompt in enumerate(prompts)
    ]


def test_a_block_is_one_row_a_token_and_layer(make: Any) -> None:
    """16 of the compressed row and 6 of the key that all four heads share, in float32."""
    shape = make(20)(n_draft=2).engine.kv.shape
    assert (shape.kv_heads, shape.head_dim, shape.n_parts) == (1, 16 + 6, 1)
    assert shape.block_bytes == shape.block_size * (3 + 1) * (16 + 6) * 4


@pytest.mark.slow
@CASES
@pytest.mark.parametrize("n_draft", [0, 3])
def test_what_is_sent_goes_on_with_the_same_bits(
    make: Any, make_prompts: Any, hand_over: Any, q_rank: int | None, n_draft: int
) -> None:
    bench_of = make(q_rank)
    prompts = make_prompts(6, seed=9, longest=70, vocab_size=96)
    mixed = bench_of(n_draft=n_draft)
    keys = submitted(mixed, prompts)
    mixed.drain()
    prefill = bench_of(n_draft=n_draft, prefill_tokens=19)
    decode = bench_of(n_draft=n_draft, reader=prefill.reader)
    assert submitted(prefill, prompts, hand_over=True) == keys
    hand_over(prefill, decode, prefill.handoffs())
    decode.drain()
    for key in keys:
        assert said(decode, key) == said(mixed, key)
    for bench in (prefill, decode):
        bench.check_nothing_is_left()


@pytest.mark.slow
@CASES
def test_what_is_pulled_while_it_is_computed_goes_on_with_the_same_bits(
    make: Any, q_rank: int | None
) -> None:
    bench_of = make(q_rank)
    pair = Pair(bench_of, n_draft=2)
    key = pair.submit(1, LONG)
    for handoff in pair.compute():
        pair.offer(handoff)
    pair.finish()
    assert said(pair.decode, key) == alone(bench_of, 1, LONG, n_draft=2)
    ahead, behind = pair.pulled()
    assert ahead > 0
    assert behind > 0
    pair.check_nothing_is_left()


@pytest.mark.slow
@CASES
def test_what_was_kept_is_not_computed_again(make: Any, q_rank: int | None) -> None:
    bench_of = make(q_rank)
    cached, plain = bench_of(n_draft=1), bench_of(n_draft=1, prefix_caching=False)
    start = tuple(range(5, 53))
    n_hits = 0
    for number, tail in enumerate([(60, 61, 62), (70,), (60, 61, 90)]):
        told = []
        for bench in (cached, plain):
            keys = submitted(bench, [start + tail], start=number)
            results = bench.drain()
            told.append(said(bench, keys[0]))
            n_hits += sum(result.stats.prefix_hit_tokens for result in results)
        assert told[0] == told[1]
    assert n_hits == (2 + 3) * 16, "full blocks, of which the draft layer needs a token behind"


@pytest.mark.slow
@CASES
def test_what_was_preempted_is_computed_again_with_the_same_bits(
    make: Any, make_prompts: Any, q_rank: int | None
) -> None:
    bench_of = make(q_rank)
    prompts = make_prompts(8, seed=4, longest=30, vocab_size=96)
    roomy = bench_of(n_draft=2, max_model_len=128)
    tight = bench_of(n_draft=2, max_model_len=128, block_size=8, n_blocks=18)
    keys = submitted(roomy, prompts, max_tokens=30)
    submitted(tight, prompts, max_tokens=30)
    roomy.drain()
    assert sum(result.stats.preempted for result in tight.drain()) > 0
    for key in keys:
        assert said(tight, key) == said(roomy, key)


@pytest.mark.slow
def test_a_row_that_is_no_number_ends_its_request_alone(make: Any) -> None:
    """Nobody else attends to it, and nobody gets its block before it is cleared."""
    bench_of = make(20)
    prompts = [tuple(range(5 + n, 30 + n)) for n in range(3)]
    whole = bench_of(prefix_caching=False)
    expected = submitted(whole, prompts, max_tokens=20)
    whole.drain()
    bench = bench_of(prefix_caching=False)
    keys = submitted(bench, prompts, max_tokens=20)
    while bench.engine._requests[keys[1]].n_output < 3:
        bench.step()
    pool, block = bench.engine._parts.pool, bench.engine._requests[keys[1]].blocks[0]
    pool.import_blocks([block], [np.full_like(array, np.nan) for array in pool.shape.zeros(1)])
    failed = [failure for result in bench.drain() for failure in result.failed]
    assert [(failure.key, failure.code) for failure in failed] == [(keys[1], ErrorCode.ARITHMETIC)]
    for n in (0, 2):
        assert said(bench, keys[n]) == said(whole, expected[n])
    again = submitted(bench, prompts, start=10, max_tokens=20)
    assert not [failure for result in bench.drain() for failure in result.failed]
    for key, other in zip(again, expected, strict=True):
        assert said(bench, key) == said(whole, other)
