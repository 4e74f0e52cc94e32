"""The engine's edge lets in the last value that it allows, and refuses the next by name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from baton_worker.engine.api import EngineRefusedError, Handoff
from baton_worker.engine.kv.payload import KvShape
from baton_worker.engine.scheduling.admission import (
    LOWEST_LOGPROB,
    KvIdentity,
    check_handoff,
    check_request,
)
from baton_worker.engine.scheduling.requests import RequestLimits
from baton_worker.messages import DraftScores, HandoffState, Submit
from baton_worker.records.table import MAX_LOGPROB
from baton_worker.sampling import LogprobParams, SamplingParams

EOS = 1
LIMITS = RequestLimits(
    vocab_size=8, max_model_len=16, max_top_k=4, table_width=4, eos_token_ids=frozenset({EOS})
)
SHAPE = KvShape(n_layers=2, kv_heads=1, block_size=4, head_dim=2, n_blocks=8)
IDENTITY = KvIdentity("model", SHAPE)
PROMPT = (0, 7, 2)


def request(*, sampling: dict[str, Any] | None = None, prompt_k: int = -1, **fields: Any) -> Submit:
    params = SamplingParams(**({"max_tokens": 5} | (sampling or {})))
    defaults: dict[str, Any] = {"prompt_token_ids": PROMPT}
    return Submit(
        1, 0, sampling=params, logprobs=LogprobParams(prompt_k=prompt_k), **(defaults | fields)
    )


def handoff(*, n_prompt: int = 3, kv: Sequence[Any] | None = None, **fields: Any) -> Handoff:
    """Return a handoff that is let in, but for `fields`."""
    n_cached = n_prompt + len(fields.get("output_token_ids", ()))
    defaults: dict[str, Any] = {
        "handle": 1,
        "attempt": 0,
        "model_fingerprint": "model",
        "dtype": "float32",
        "n_layers": SHAPE.n_layers,
        "kv_heads": SHAPE.kv_heads,
        "block_size": SHAPE.block_size,
        "head_dim": SHAPE.head_dim,
        "n_cached": n_cached,
        "prompt_token_ids": (PROMPT * 6)[:n_prompt],
        "sampling": SamplingParams(max_tokens=5),
        "logprobs_k": -1,
        "first_token": 3,
    }
    shape = (-(-n_cached // SHAPE.block_size), SHAPE.kv_heads, SHAPE.block_size, SHAPE.head_dim)
    arrays = [np.zeros(shape, np.float32)] * 4 if kv is None else kv
    return Handoff(HandoffState(**(defaults | fields)), tuple(arrays))


def refusal(item: Submit | Handoff, limits: RequestLimits = LIMITS) -> str:
    """Return why the item is refused, or an empty string."""
    try:
        if isinstance(item, Submit):
            check_request(item, limits)
        else:
            check_handoff(item, IDENTITY, limits)
    except EngineRefusedError as error:
        return f"{error.code.name}: {error}"
    return ""


ALL = tuple(range(8))
ALLOWED = {
    "an id at either end": request(prompt_token_ids=(0, 7)),
    "only the lowest id": request(prompt_token_ids=(0,)),
    "a prompt with room for one token": request(prompt_token_ids=(2,) * 15),
    "an output with room for one token": request(output_token_ids=(2,) * 4),
    "an end of text that is ignored": request(
        output_token_ids=(EOS,), sampling={"ignore_eos": True}
    ),
    "no logprobs": request(logprobs_k=-1, prompt_k=-1),
    "the most logprobs": request(logprobs_k=4, prompt_k=4),
    "the lowest priority": request(priority=-1000),
    "the highest priority": request(priority=1000),
    "the largest biases": request(sampling={"logit_bias": ((0, 100.0), (7, -100.0))}),
    "all but one token forbidden": request(
        sampling={"bad_words": tuple((token,) for token in ALL[:-1])}
    ),
    "all but one token forbidden, the end of text among them": request(
        sampling={"bad_words": tuple((token,) for token in ALL[2:]), "min_tokens": 0}
    ),
    "all but one token a stop token": request(
        sampling={"stop_token_ids": ALL[:-1], "min_tokens": 1}
    ),
    "every token a stop token, none masked": request(sampling={"stop_token_ids": ALL}),
}


@pytest.mark.parametrize("item", ALLOWED.values(), ids=ALLOWED.keys())
def test_a_request_at_a_bound_is_let_in(item: Submit) -> None:
    assert not refusal(item)


REFUSED = {
    "prompt_token_ids is empty": request(prompt_token_ids=()),
    "prompt_token_ids holds 8, ids are 0..7": request(prompt_token_ids=(0, 7, 8, 9)),
    "prompt_token_ids holds -1, ids are 0..7": request(prompt_token_ids=(0, -1)),
    "prompt_token_ids holds 4294967296, ids": request(prompt_token_ids=(0, 1 << 32)),
    "prompt of 16 tokens leaves no room": request(
        prompt_token_ids=(2,) * 15, output_token_ids=(2,)
    ),
    "max_tokens is 5, 5 tokens have used it up": request(output_token_ids=(2,) * 5),
    "output_token_ids holds 8,": request(output_token_ids=(8,)),
    r"the output holds \[1\], which ends": request(output_token_ids=(2, EOS)),
    r"the output holds \[2\], which ends": request(
        output_token_ids=(2,), sampling={"ignore_eos": True, "stop_token_ids": (2,)}
    ),
    r"logprobs_k is -2, allowed are -1\.\.4": request(logprobs_k=-2),
    r"logprobs_k is 5, allowed are -1\.\.4": request(logprobs_k=5),
    r"logprobs.prompt_k is -2, allowed are -1\.\.4": request(prompt_k=-2),
    r"logprobs.prompt_k is 5, allowed are -1\.\.4": request(prompt_k=5),
    "priority is -1001,": request(priority=-1001),
    "priority is 1001,": request(priority=1001),
    "max_tokens is 0, allowed are 1": request(sampling={"max_tokens": 0}),
    "stop_token_ids holds 8,": request(sampling={"stop_token_ids": (8,)}),
    "min_tokens is 1 but every token is a stop token": request(
        sampling={"stop_token_ids": ALL, "min_tokens": 1}
    ),
    "bad_words and min_tokens 0 may forbid every token": request(
        sampling={"bad_words": tuple((0, token) for token in ALL)}
    ),
    "bad_words and min_tokens 1 may forbid every token": request(
        sampling={"bad_words": tuple((token, 0) for token in ALL) + ((2, 3),) * 2
                  + tuple((token,) for token in ALL if token != EOS), "min_tokens": 1}
    ),
    "bad_words holds 8,": request(sampling={"bad_words": ((1, 8),)}),
    "logit_bias holds 8,": request(sampling={"logit_bias": ((8, 1.0),)}),
    "logit_bias names a token twice": request(sampling={"logit_bias": ((2, 1.0), (2, 1.0))}),
    "logit_bias is 100.5, allowed are -100..100": request(
        sampling={"logit_bias": ((0, 1.0), (2, 100.5), (3, -101.0), (4, 102.0))}
    ),
}  # fmt: skip


@pytest.mark.parametrize("bad", [-1, 8, 1 << 32])
@pytest.mark.parametrize("n_tokens", [1, 32, 33, 150])
def test_a_token_that_is_none_is_found_among_few_and_many(n_tokens: int, bad: int) -> None:
    limits = replace(LIMITS, max_model_len=200)
    tokens = (PROMPT * 50)[:n_tokens]
    check_request(request(prompt_token_ids=tokens), limits)
    with pytest.raises(EngineRefusedError, match=f"prompt_token_ids holds {bad}, ids are 0..7"):
        check_request(request(prompt_token_ids=(*tokens[:-1], bad)), limits)


@pytest.mark.parametrize(("words", "item"), REFUSED.items(), ids=REFUSED.keys())
def test_a_request_beyond_a_bound_is_refused_by_name(words: str, item: Submit) -> None:
    with pytest.raises(EngineRefusedError, match=words):
        check_request(item, LIMITS)
    assert refusal(item).startswith("INVALID_REQUEST: ")


def test_no_more_alternatives_are_let_in_than_there_are_tokens() -> None:
    wide = replace(LIMITS, max_top_k=100)
    assert not refusal(request(logprobs_k=8), wide)
    assert "allowed are -1..8" in refusal(request(logprobs_k=9), wide)


COLUMNS = {"width": 3, "first_rank": 1, "topk_tokens": (0, 7), "topk_logprobs": (0.0, -1.0)}
LOGPROBS = {"logprobs_k": 2} | COLUMNS
BARE = {"logprobs_k": 0, "width": 1, "first_rank": 8}


def scores(n: int, k: int, **fields: Any) -> DraftScores:
    defaults: dict[str, Any] = {
        "logprobs": (0.0,) * n,
        "ranks": (1,) * n,
        "topk_tokens": (0,) * n * k,
        "topk_logprobs": (-1.0,) * n * k,
    }
    return DraftScores(**(defaults | fields))


LET_IN = {
    "one without logprobs": handoff(),
    "one with the sampled token's logprob": handoff(**BARE),
    "one with alternatives": handoff(**LOGPROBS),
    "a prompt with room for two tokens": handoff(n_prompt=14),
    "a prompt that fills its blocks": handoff(n_prompt=8),
    "one that goes on after an output": handoff(output_token_ids=(2, 3)),
    "as many drafts as fit": handoff(drafts=(0, 7, 0, 7, 0)),
    "none of the prompt reused": handoff(n_reused=0),
    "all of the prompt reused": handoff(n_reused=3),
    "the lowest logprob": handoff(**(BARE | {"first_logprob": LOWEST_LOGPROB})),
    "the highest logprob": handoff(**(BARE | {"first_logprob": MAX_LOGPROB / 2})),
    "as many scores as drafts": handoff(drafts=(5, 6), draft_scores=scores(2, 2), **LOGPROBS),
    "fewer scores than drafts": handoff(drafts=(5, 6), draft_scores=scores(1, 2), **LOGPROBS),
    "scores without alternatives": handoff(drafts=(5,), draft_scores=scores(1, 0), **BARE),
    "scores where no logprobs are wanted": handoff(drafts=(5,), draft_scores=scores(1, 0)),
}


@pytest.mark.parametrize("item", LET_IN.values(), ids=LET_IN.keys())
def test_a_handoff_at_a_bound_is_let_in(item: Handoff) -> None:
    assert not refusal(item)


def columns(**fields: Any) -> Handoff:
    return handoff(**(LOGPROBS | fields))


def scored(n: int = 1, **fields: Any) -> Handoff:
    return columns(drafts=(5, 6), draft_scores=scores(n, 2, **fields))


TURNED_AWAY = {
    "prompt_token_ids holds 8,": handoff(prompt_token_ids=(0, 1, 8)),
    "first_token holds 8,": handoff(first_token=8),
    "drafts holds 8,": handoff(drafts=(8,)),
    "drafts has 6 tokens, at most 5 fit": handoff(drafts=(5,) * 6),
    r"n_reused is -1, not in 0\.\.3": handoff(n_reused=-1),
    r"n_reused is 4, not in 0\.\.3": handoff(n_reused=4),
    "prompt of 15 tokens leaves nothing to decode": handoff(n_prompt=15),
    "temperature is 9.0": handoff(sampling=SamplingParams(temperature=9.0)),
    "max_tokens is 1, 1 tokens have used it up": handoff(sampling=SamplingParams(max_tokens=1)),
    "logprobs_k is -2,": handoff(logprobs_k=-2),
    "priority is 1001,": handoff(priority=1001),
    "width is 2, logprobs_k -1 means 0": handoff(width=2),
    "width is 1, logprobs_k 2 means 3": columns(width=1),
    "topk_tokens and topk_logprobs have 1 and 2 entries, 2 are": columns(topk_tokens=(1,)),
    "topk_tokens and topk_logprobs have 2 and 1 entries, 2 are": columns(topk_logprobs=(-1.0,)),
    "topk_tokens holds 8,": columns(topk_tokens=(0, 8)),
    r"topk_logprobs holds the logprob 1\.0,": columns(topk_logprobs=(-1.0, 1.0)),
    "first_logprob holds the logprob nan,": columns(first_logprob=float("nan")),
    "first_logprob holds the logprob -inf,": columns(first_logprob=-float("inf")),
    r"first_rank holds the rank 0, allowed are 1\.\.8": columns(first_rank=0),
    r"first_rank holds the rank 9, allowed are 1\.\.8": columns(first_rank=9),
    "draft_scores has 3 logprobs and 3 ranks": scored(3),
    "draft_scores has 1 logprobs and 2 ranks": scored(ranks=(1, 1)),
    "draft_scores has 1 alternatives, 2 are": scored(topk_tokens=(0,)),
    "draft_scores has 2 alternatives, 2 are": scored(topk_logprobs=(0.0,)),
    "draft_scores holds the logprob 2": scored(2, logprobs=(0.0, 2.0), topk_logprobs=(3.0,) * 4),
    "draft_scores holds the logprob 4": scored(2, logprobs=(4.0, 5.0), topk_logprobs=(6.0,) * 4),
    "draft_scores holds the rank 9": scored(2, ranks=(9, 10)),
    "draft_scores holds 8,": scored(topk_tokens=(0, 8)),
}


@pytest.mark.parametrize(("words", "item"), TURNED_AWAY.items(), ids=TURNED_AWAY.keys())
def test_a_handoff_beyond_a_bound_is_refused_by_name(words: str, item: Handoff) -> None:
    with pytest.raises(EngineRefusedError, match=words):
        check_handoff(item, IDENTITY, LIMITS)
    assert refusal(item).startswith("INVALID_REQUEST: ")


LAYOUT: dict[str, Any] = {
    "model_fingerprint": "other",
    "dtype": "float16",
    "n_layers": 3,
    "kv_heads": 2,
    "block_size": 5,
    "head_dim": 3,
    "n_cached": 2,
}


@pytest.mark.parametrize("name", LAYOUT)
def test_kv_of_another_layout_is_incompatible(name: str) -> None:
    item = handoff()
    other = Handoff(msgspec.structs.replace(item.state, **{name: LAYOUT[name]}), item.kv)
    words = f"INCOMPATIBLE: handoff {name} is {LAYOUT[name]!r}, this worker has "
    assert refusal(other).startswith(words)


GOOD = np.zeros((1, 1, 4, 2), np.float32)
ARRAYS = {
    "too few": [GOOD] * 3,
    "as many as there are layers": [GOOD] * 2,
    "too many": [GOOD] * 6,
    "one of another shape": [GOOD, GOOD, GOOD, np.zeros((2, 1, 4, 2), np.float32)],
    "one of another type": [GOOD, GOOD, GOOD, GOOD.astype(np.float64)],
}


@pytest.mark.parametrize("kv", ARRAYS.values(), ids=ARRAYS.keys())
def test_kv_arrays_that_do_not_fit_are_incompatible(kv: list[Any]) -> None:
    assert re.match("INCOMPATIBLE: .*KV array", refusal(handoff(kv=kv)))
