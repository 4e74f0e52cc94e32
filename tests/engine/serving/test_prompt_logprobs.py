"""Prompt tokens have the full forward's logprobs, in any chunks, with drafts and handoff (R33)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from baton_worker.engine.api import EngineRefusedError
from baton_worker.engine.step import prompt_logprobs as prompt_module
from baton_worker.records.coalesce import split_rows
from baton_worker.records.encode import encode_step
from baton_worker.records.header import StepHeader
from baton_worker.sampling import LogprobParams

ENGINES = ("paddle", "device")

TOLERANCE = 5e-5


def _told(stream: Any) -> tuple[list[int], list[float], list[int], list[list[tuple[int, float]]]]:
    """Return a stream's prompt tokens, logprobs, ranks and alternatives over all its rows."""
    tokens, values, ranks, tops = [], [], [], []
    for row in stream.prompt:
        k = row.width - 1
        tokens += row.tokens
        values += row.logprobs
        ranks += row.ranks
        pairs = list(zip(row.topk_tokens, row.topk_logprobs, strict=True))
        tops += [pairs[i * k : (i + 1) * k] for i in range(len(row.tokens))]
    return tokens, values, ranks, tops


def _check(model: Any, prompt: Any, stream: Any, k: int) -> None:
    tokens, values, ranks, tops = _told(stream)
    assert tokens == list(prompt[1:])
    if not tokens:
        return
    expected = model.logprobs(prompt)[:-1]
    want = expected[np.arange(len(tokens)), tokens]
    np.testing.assert_allclose(values, want, rtol=0, atol=TOLERANCE)
    for row, token, rank in zip(expected, tokens, ranks, strict=True):
        assert np.count_nonzero(row >= row[token] + TOLERANCE) <= rank
        assert rank <= np.count_nonzero(row >= row[token] - TOLERANCE)
    assert all(len(top) == k for top in tops)
    if k:
        best = -np.sort(-expected, axis=1)[:, :k]
        np.testing.assert_allclose(
            [[value for _, value in top] for top in tops], best, rtol=0, atol=TOLERANCE
        )


@pytest.fixture(scope="module")
def prompts(make_prompts: Any) -> Any:
    return [*make_prompts(9, seed=71, longest=70), (5,), (5, 6)]


def _options(number: int, k: int) -> dict[str, Any]:
    return {
        "temperature": 0.8 * (number % 2),
        "repetition_penalty": 1.2,
        "seed": number,
        "max_tokens": 10,
        "logprobs_k": number % 3 - 1,
        "logprobs": LogprobParams(prompt_k=k, temp_scaled=number % 3 > 0),
    }


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize(
    ("n_draft", "prefill_tokens", "k"), [(0, 512, 0), (3, 512, 5), (2, 16, 20), (5, 7, 1)]
)
def test_every_prompt_token_is_scored_as_the_full_forward_does(
    tiny: Any,
    make_bench: Any,
    prompts: Any,
    n_draft: int,
    prefill_tokens: int,
    k: int,
    overlap: bool,
) -> None:
    bench = make_bench(n_draft=n_draft, prefill_tokens=prefill_tokens, overlap=overlap)
    keys = [bench.submit(n, p, **_options(n, k)) for n, p in enumerate(prompts)]
    bench.drain()
    for key, prompt in zip(keys, prompts, strict=True):
        _check(tiny, prompt, bench.reader[key], k)


@pytest.mark.slow
def test_they_change_no_output(make_bench: Any, prompts: Any) -> None:
    outputs = []
    for k in (-1, 3):
        bench = make_bench(n_draft=2, prefill_tokens=16)
        keys = [bench.submit(n, p, **_options(n, k)) for n, p in enumerate(prompts)]
        bench.drain()
        outputs.append([bench.reader[key] for key in keys])
    for without, asked in zip(*outputs, strict=True):
        assert (without.tokens, without.ranks) == (asked.tokens, asked.ranks)
        assert without.logprobs == pytest.approx(asked.logprobs, abs=TOLERANCE)
        assert not without.prompt


@pytest.mark.slow
def test_prefill_tells_them_and_decode_never_again(
    tiny: Any, make_bench: Any, prompts: Any, hand_over: Any
) -> None:
    """Decode recomputes preempted prompts: it has too few blocks for all of them at once."""
    prefill = make_bench(n_draft=2, prefill_tokens=16)
    decode = make_bench(n_draft=2, reader=prefill.reader, block_size=16, n_blocks=17, max_running=6)
    keys = [
        prefill.submit(n, p, hand_over=True, **_options(n, 2) | {"max_tokens": 60})
        for n, p in enumerate(prompts)
    ]
    hand_over(prefill, decode, prefill.handoffs())
    results = decode.drain()
    assert sum(r.stats.preempted for r in results) > 0
    assert not any(r.columns.prompt_tokens.n_rows for r in results)
    for key, prompt in zip(keys, prompts, strict=True):
        _check(tiny, prompt, decode.reader[key], 2)


@pytest.mark.slow
def test_a_preempted_prompt_is_told_once(tiny: Any, make_bench: Any, prompts: Any) -> None:
    bench = make_bench(n_draft=2, block_size=8, n_blocks=32, max_running=10, prefill_tokens=20)
    keys = [
        bench.submit(n, p, **_options(n, 1) | {"max_tokens": 60}) for n, p in enumerate(prompts)
    ]
    assert sum(r.stats.preempted for r in bench.drain()) > 0
    for key, prompt in zip(keys, prompts, strict=True):
        _check(tiny, prompt, bench.reader[key], 1)


def test_cached_blocks_do_not_stand_for_rows_that_are_wanted(tiny: Any, make_bench: Any) -> None:
    bench = make_bench(n_draft=1, prefix_caching=True)
    prompt = tuple(range(5, 70))
    first = bench.submit(1, prompt, temperature=0.0, max_tokens=4)
    bench.drain()
    again = bench.submit(
        2, prompt, temperature=0.0, max_tokens=4, logprobs=LogprobParams(prompt_k=2)
    )
    bench.drain()
    _check(tiny, prompt, bench.reader[again], 2)
    assert bench.reader[again].tokens == bench.reader[first].tokens


def test_a_long_prompt_is_told_in_rows_that_fit_records(
    tiny: Any, make_bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are cut by bytes and logits by memory, whatever the chunk; pieces fit the frame."""
    monkeypatch.setattr(prompt_module, "ROW_BYTES", 2048)
    monkeypatch.setattr(prompt_module, "LOGITS_BYTES", 4 * tiny.shape.vocab_size * 24)
    bench = make_bench(n_draft=1, prefill_tokens=512)
    prompt = tuple(range(5, 205))
    key = bench.submit(
        1, prompt, temperature=0.0, max_tokens=3, logprobs=LogprobParams(prompt_k=20)
    )
    results = bench.drain()
    _check(tiny, prompt, bench.reader[key], 20)
    assert max(len(row.tokens) for row in bench.reader[key].prompt) == 2048 // (12 + 8 * 20)
    header = StepHeader(1, 1, 1, 3, 1, 1)  # type: ignore[arg-type]
    pieces = split_rows(results[0].columns, max_bytes=8192)
    assert len(pieces) > 3
    assert all(len(encode_step(piece, header)) <= 8192 for piece in pieces)


def test_ending_a_request_inside_its_prompt_tells_nothing_after(make_bench: Any) -> None:
    for overlap in (False, True):
        bench = make_bench(n_draft=1, prefill_tokens=8, overlap=overlap)
        key = bench.submit(1, range(5, 60), logprobs=LogprobParams(prompt_k=0))
        other = bench.submit(2, range(5, 60), max_tokens=3, logprobs=LogprobParams(prompt_k=0))
        bench.step()
        bench.step()
        assert bench.engine.abort(key)
        bench.drain()
        assert key in bench.reader.ended
        assert len(_told(bench.reader[other])[0]) == 54


@pytest.mark.parametrize("k", [-2, 21])
def test_more_alternatives_than_allowed_are_refused(make_bench: Any, k: int) -> None:
    with pytest.raises(EngineRefusedError, match=f"prompt_k is {k}"):
        make_bench().submit(1, (5, 6), logprobs=LogprobParams(prompt_k=k))
