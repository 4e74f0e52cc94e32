"""Speculative output equals plain output token for token, greedy and sampled, in any batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest

from baton_worker.engine.ngram import NgramSizes
from baton_worker.engine.options import DraftSources

ENGINES = ("paddle", "device")

TOKENS = 20
PROMPTS = 49  # seven of each way of sampling
BAD_WORDS = ((65,), (200, 201), (300, 300))
NGRAM = {"use_mtp": False, "drafts": DraftSources(0, NgramSizes(1, 3))}
MTP_NGRAM = {"use_mtp": True, "drafts": DraftSources(1, NgramSizes(2, 4))}

slow = partial(pytest.param, marks=pytest.mark.slow)


def _sampling(number: int) -> dict[str, Any]:
    """A mix over requests: greedy, sampled, truncated, penalised."""
    variants: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "seed": number},
        {"temperature": 1.0, "top_p": 0.9, "top_k": 40, "seed": 2**63 + number},
        {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.4},
        {"temperature": 0.7, "frequency_penalty": 0.5, "seed": number, "min_tokens": 6},
        {"temperature": 0.0, "bad_words": BAD_WORDS, "logit_bias": ((300, 4.0), (65, -2.0))},
        {"temperature": 0.9, "min_p": 0.08, "bad_words": BAD_WORDS, "seed": number},
    ]
    return variants[number % len(variants)] | {"max_tokens": TOKENS - number % 3}


@pytest.fixture(scope="module")
def plain(make_bench: Any, make_prompts: Any) -> Callable[[int], Any]:
    """`plain(number)`: the stream of that prompt run alone, without MTP."""
    bench, prompts = make_bench(max_running=1), make_prompts(PROMPTS)

    @cache
    def alone(number: int) -> Any:
        prompt = prompts[number - 1]
        key = bench.submit(number, prompt, logprobs_k=2, ignore_eos=False, **_sampling(number))
        bench.drain()
        return bench.reader[key]

    return alone


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "n_draft", "batch", "first", "count"),
    [
        slow({}, 1, 32, 1, 42),
        ({}, 2, 8, 26, 24),
        ({}, 3, 32, 8, 42),
        slow({}, 4, 5, 36, 14),
        slow({}, 5, 1, 1, 14),
        (NGRAM, 1, 32, 8, 42),
        (NGRAM, 3, 7, 26, 24),
        slow(NGRAM, 5, 1, 15, 14),
        (MTP_NGRAM, 1, 8, 36, 14),
        (MTP_NGRAM, 3, 32, 1, 42),
        (MTP_NGRAM, 5, 5, 22, 21),
    ],
)
def test_any_draft_count_and_batch_gives_the_plain_tokens(
    make_bench: Any,
    make_prompts: Any,
    plain: Callable[[int], Any],
    method: dict[str, Any],
    n_draft: int,
    batch: int,
    first: int,
    count: int,
) -> None:
    prompts = make_prompts(PROMPTS)
    bench = make_bench(n_draft=n_draft, max_running=batch, **method)
    keys = {
        number: bench.submit(
            number, prompts[number - 1], logprobs_k=2, ignore_eos=False, **_sampling(number)
        )
        for number in range(first, first + count)
    }
    results = bench.drain()
    assert sum(int(r.stats.accepted_by_position.sum()) for r in results) > 0
    for number, key in keys.items():
        stream, expected = bench.reader[key], plain(number)
        assert stream.tokens == expected.tokens, f"prompt {number}"
        assert stream.finish == expected.finish
        assert stream.ranks == expected.ranks
        assert stream.logprobs == pytest.approx(expected.logprobs, abs=5e-5)


@pytest.mark.slow
@pytest.mark.parametrize("method", [{"use_mtp": True}, NGRAM, MTP_NGRAM])
def test_draft_count_may_change_at_any_step(
    make_bench: Any, make_prompts: Any, plain: Callable[[int], Any], method: dict[str, Any]
) -> None:
    prompts = make_prompts(PROMPTS)
    bench = make_bench(n_draft=2, **method)
    keys = {
        n: bench.submit(n, prompts[n - 1], logprobs_k=2, ignore_eos=False, **_sampling(n))
        for n in range(1, 13)
    }
    schedule = [0, 3, 5, 1, 0, 0, 2]
    steps = 0
    while bench.engine.has_work():
        bench.engine.set_num_speculative_tokens(schedule[steps % len(schedule)])
        bench.step()
        steps += 1
    for number, key in keys.items():
        assert bench.reader[key].tokens == plain(number).tokens


@pytest.mark.parametrize("count", [-1, 6])
def test_a_draft_count_out_of_range_is_refused(make_bench: Any, count: int) -> None:
    with pytest.raises(ValueError, match=f"num_speculative_tokens is {count}"):
        make_bench(n_draft=1).engine.set_num_speculative_tokens(count)


def test_drafts_of_an_engine_without_a_method_are_refused(make_bench: Any) -> None:
    with pytest.raises(ValueError, match="makes no drafts"):
        make_bench().engine.set_num_speculative_tokens(1)
