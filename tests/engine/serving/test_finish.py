"""A request ends at the right token, for the right reason, and nothing follows (R24, R37)."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from baton_worker.records.columns import Finish

ENGINES = ("paddle", "device")

PROMPT = tuple(range(5, 25))


@pytest.fixture(scope="module")
def free(make_bench: Any) -> list[int]:
    """The greedy continuation with nothing to stop it."""
    bench = make_bench()
    key = bench.submit(1, PROMPT, temperature=0.0, max_tokens=30)
    bench.drain()
    return list(bench.reader[key].tokens)


def _first_at_or_after(tokens: list[int], index: int) -> int:
    """Return the first index >= `index` whose token did not occur before."""
    return next(i for i in range(index, len(tokens)) if tokens[i] not in tokens[:i])


@pytest.mark.parametrize("n_draft", [0, 1, 5])
@pytest.mark.parametrize("earliest", [0, 1, 4])
def test_a_stop_token_ends_the_request_and_is_kept(
    make_bench: Any, free: list[int], n_draft: int, earliest: int
) -> None:
    end = _first_at_or_after(free, earliest)
    bench = make_bench(n_draft=n_draft)
    key = bench.submit(
        1, PROMPT, temperature=0.0, max_tokens=30, stop_token_ids=(free[end],), logprobs_k=0
    )
    bench.drain()
    stream = bench.reader[key]
    assert stream.tokens == free[: end + 1]
    assert len(stream.logprobs) == end + 1
    assert stream.finish is Finish.STOP


@pytest.mark.parametrize("n_draft", [0, 3])
def test_eos_ends_the_request_unless_ignored(
    tiny: Any, make_bench: Any, free: list[int], n_draft: int
) -> None:
    end = _first_at_or_after(free, 3)
    shape = dataclasses.replace(tiny.shape, eos_token_ids=(1, free[end]))
    bench = make_bench(dataclasses.replace(tiny, shape=shape), n_draft=n_draft)
    options = {"temperature": 0.0, "max_tokens": 30}
    ends = bench.submit(1, PROMPT, ignore_eos=False, **options)
    goes_on = bench.submit(2, PROMPT, ignore_eos=True, **options)
    bench.drain()
    assert bench.reader[ends].tokens == free[: end + 1]
    assert bench.reader[ends].finish is Finish.STOP
    assert bench.reader[goes_on].tokens == free
    assert bench.reader[goes_on].finish is Finish.LENGTH


@pytest.mark.parametrize("n_draft", [0, 2, 5])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7])
def test_max_tokens_is_exact(
    make_bench: Any, free: list[int], n_draft: int, max_tokens: int
) -> None:
    bench = make_bench(n_draft=n_draft)
    key = bench.submit(1, PROMPT, temperature=0.0, max_tokens=max_tokens, logprobs_k=0)
    bench.drain()
    assert bench.reader[key].tokens == free[:max_tokens]
    assert len(bench.reader[key].logprobs) == max_tokens
    assert bench.reader[key].finish is Finish.LENGTH


@pytest.mark.parametrize("n_draft", [0, 4])
def test_the_models_length_ends_a_request(make_bench: Any, free: list[int], n_draft: int) -> None:
    bench = make_bench(n_draft=n_draft, max_model_len=32)
    key = bench.submit(1, PROMPT, temperature=0.0, max_tokens=100)
    bench.drain()
    assert bench.reader[key].tokens == free[: 32 - len(PROMPT)]
    assert bench.reader[key].finish is Finish.LENGTH


def test_a_stop_token_at_the_length_limit_counts_as_stop(make_bench: Any, free: list[int]) -> None:
    end = _first_at_or_after(free, 3)
    bench = make_bench(n_draft=1)
    key = bench.submit(1, PROMPT, temperature=0.0, max_tokens=end + 1, stop_token_ids=(free[end],))
    bench.drain()
    assert bench.reader[key].finish is Finish.STOP


@pytest.mark.parametrize("n_draft", [0, 1, 5])
def test_min_tokens_holds_stop_tokens_back(make_bench: Any, free: list[int], n_draft: int) -> None:
    """Every token that greedy would pick early is a stop token; none may come before min_tokens."""
    stops = tuple(free[:6])
    bench = make_bench(n_draft=n_draft)
    key = bench.submit(
        1, PROMPT, temperature=0.0, max_tokens=30, min_tokens=8, stop_token_ids=stops
    )
    bench.drain()
    stream = bench.reader[key]
    assert not set(stream.tokens[:8]) & set(stops)
    assert all(token not in stops for token in stream.tokens[:-1])
    if stream.finish is Finish.STOP:
        assert stream.tokens[-1] in stops


def test_accepted_counts_are_those_before_truncation(make_bench: Any, free: list[int]) -> None:
    """A stop inside a verified run drops what follows, but acceptance says what was accepted."""
    bench = make_bench(n_draft=5)
    whole = bench.submit(1, PROMPT, temperature=0.0, max_tokens=30)
    bench.drain()
    accepted = bench.reader[whole].accepted
    assert max(accepted) >= 2, "the prompt is chosen so that a run is accepted"
    run = next(i for i, n in enumerate(accepted) if n >= 2)
    start = 1 + sum(n + 1 for n in accepted[:run])
    stop = free[start]
    assert stop not in free[:start], "the prompt is chosen so that this token is new"
    key = bench.submit(2, PROMPT, temperature=0.0, max_tokens=30, stop_token_ids=(stop,))
    bench.drain()
    assert bench.reader[key].tokens == free[: start + 1]
    assert bench.reader[key].accepted == accepted[: run + 1]
