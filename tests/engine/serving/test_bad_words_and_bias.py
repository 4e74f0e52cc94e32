"""Bad words never appear and biased tokens do, the same with any drafts, chunks or roles."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from baton_worker.engine.api import EngineRefusedError
from baton_worker.records.columns import ErrorCode

ENGINES = ("paddle", "device")

OPTIONS: dict[str, Any] = {"max_tokens": 24, "logprobs_k": 1}


def _pairs(tokens: list[int]) -> list[tuple[int, int]]:
    return list(itertools.pairwise(tokens))


@pytest.fixture(scope="module", params=[0.0, 0.9], ids=["greedy", "sampled"])
def banned(request: Any, make_bench: Any, make_prompts: Any) -> Any:
    """Prompts, and for each the bad words made of what it says when nothing is forbidden."""
    prompts = make_prompts(10, seed=31, longest=60)
    bench = make_bench()
    keys = [
        bench.submit(n, p, temperature=request.param, seed=n, **OPTIONS)
        for n, p in enumerate(prompts)
    ]
    bench.drain()
    words = []
    for key in keys:
        tokens = bench.reader[key].tokens
        words.append((tuple(tokens[:2]), tuple(tokens[5:8]), (tokens[12],)))
    return request.param, prompts, words


def _submit_all(bench: Any, banned: Any, **more: Any) -> list[Any]:
    temperature, prompts, words = banned
    return [
        bench.submit(n, p, temperature=temperature, seed=n, bad_words=w, **OPTIONS, **more)
        for n, (p, w) in enumerate(zip(prompts, words, strict=True))
    ]


@pytest.fixture(scope="module")
def plain(banned: Any, make_bench: Any) -> list[list[int]]:
    bench = make_bench()
    keys = _submit_all(bench, banned)
    bench.drain()
    return [bench.reader[key].tokens for key in keys]


@pytest.mark.slow
def test_no_bad_word_is_said(banned: Any, plain: list[list[int]]) -> None:
    for tokens, (pair, triple, (single,)) in zip(plain, banned[2], strict=True):
        assert len(tokens) == OPTIONS["max_tokens"]
        assert single not in tokens
        assert pair not in _pairs(tokens)
        assert all(tuple(tokens[i : i + 3]) != triple for i in range(len(tokens)))


@pytest.mark.slow
@pytest.mark.parametrize(("n_draft", "prefill_tokens"), [(1, 512), (3, 16), (5, 7)])
def test_drafts_and_chunks_change_nothing(
    make_bench: Any, banned: Any, plain: list[list[int]], n_draft: int, prefill_tokens: int
) -> None:
    bench = make_bench(n_draft=n_draft, prefill_tokens=prefill_tokens)
    keys = _submit_all(bench, banned)
    bench.drain()
    assert [bench.reader[key].tokens for key in keys] == plain


@pytest.mark.slow
def test_a_word_that_begins_with_prefills_token_is_forbidden_at_decode(
    make_bench: Any, banned: Any, plain: list[list[int]], hand_over: Any
) -> None:
    prefill = make_bench(n_draft=3)
    decode = make_bench(n_draft=2, reader=prefill.reader)
    keys = _submit_all(prefill, banned, hand_over=True)
    hand_over(prefill, decode, prefill.handoffs())
    decode.drain()
    assert [decode.reader[key].tokens for key in keys] == plain
    starts = [tokens[0] == word[0][0] for tokens, word in zip(plain, banned[2], strict=True)]
    assert any(starts), "some first token is the one that begins its bad word"


@pytest.mark.slow
def test_preemption_forgets_no_bad_word(
    make_bench: Any, banned: Any, plain: list[list[int]]
) -> None:
    bench = make_bench(n_draft=2, block_size=8, n_blocks=32, max_running=10)
    keys = _submit_all(bench, banned)
    results = bench.drain()
    assert sum(r.stats.preempted for r in results) > 0
    assert [bench.reader[key].tokens for key in keys] == plain


def test_bias_and_raw_logprobs_do_not_meet(tiny: Any, make_bench: Any) -> None:
    """The bias forces the token; its logprob is still what the model gives it (R34)."""
    prompt = tuple(range(5, 30))
    bench = make_bench(n_draft=2)
    key = bench.submit(1, prompt, temperature=0.0, logit_bias=((77, 100.0),), **OPTIONS)
    bench.drain()
    stream = bench.reader[key]
    assert stream.tokens == [77] * OPTIONS["max_tokens"]
    raw = tiny.logprobs([*prompt, *stream.tokens])[len(prompt) - 1 : -1, 77]
    assert stream.logprobs == pytest.approx(raw.tolist(), abs=5e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"min_p": float("nan")}, "min_p is nan"),
        ({"logit_bias": ((512, 1.0),)}, "logit_bias holds 512"),
        ({"logit_bias": ((5, 1.0), (5, 2.0))}, "names a token twice"),
        ({"logit_bias": ((5, float("nan")),)}, "logit_bias is nan"),
        ({"logit_bias": ((5, -101.0),)}, "logit_bias is -101"),
        ({"bad_words": ((5,), ())}, "bad_words is empty"),
        ({"bad_words": ((5, -1),)}, "bad_words holds -1"),
        ({"bad_words": tuple((t,) for t in range(512))}, "may forbid every token"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    make_bench: Any, options: dict[str, Any], message: str
) -> None:
    bench = make_bench()
    with pytest.raises(EngineRefusedError, match=message) as refusal:
        bench.submit(1, range(5, 9), **options)
    assert refusal.value.code is ErrorCode.INVALID_REQUEST
