"""Requests of every kind over HTTP, and what their answers said, bit by bit.

Owns how the exactness suite's asks become bodies, and answers what it compares. Texts that must not
appear are left out: the suite has them as ids, HTTP as texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pair_sizes import AT_ONCE

from baton_testing.exactness.asks import Ask, mixture
from baton_testing.exactness.said import Said, bits, differences
from baton_testing.local_deployment import Deployment

MOST_LOGPROBS = 20
SHOWN = 3
COUNTED = ("requests", "greedy", "tokens", "differ", "accepted_drafts", "bytes", "by_decode")


def asks(count: int, vocab_size: int, longest: int, tokens: int) -> list[Ask]:
    """Return requests of every kind."""
    return mixture(count, vocab_size, longest, tokens, max_top_k=MOST_LOGPROBS)


def body(ask: Ask) -> dict[str, Any]:
    """Return a completion's body that asks for the same."""
    told = {name: value for name, value in ask.sampling.items() if name != "bad_words"}
    if "logit_bias" in told:
        told["logit_bias"] = {str(token): value for token, value in told["logit_bias"]}
    told |= {"prompt": list(ask.prompt), "max_tokens": ask.tokens, "ignore_eos": True}
    told |= {"return_token_ids": True, "include_step_details": True}
    if ask.logprobs_k >= 0:
        told["logprobs"] = ask.logprobs_k
    params = ask.logprobs
    if params.processed:
        told["logprobs_mode"] = "processed_logprobs"
    if params.temp_scaled:
        told["temp_scaled_logprobs"] = True
    if params.top_p_normalized:
        told["top_p_normalized_logprobs"] = True
    if params.prompt_k >= 0:
        told["prompt_logprobs"] = params.prompt_k
    return told


def said_of(choice: dict[str, Any]) -> Said:
    """Return what a choice says; alternatives are named by their texts, as the API does."""
    scored = choice["logprobs"] or {"token_logprobs": [], "top_logprobs": []}
    return Said(
        tuple(choice["token_ids"]),
        tuple(map(bits, scored["token_logprobs"])),
        tuple(rank for step in choice["step_details"] for rank in step["ranks"] or ()),
        tuple(_alternatives(of) for of in scored["top_logprobs"] or ()),
        choice["finish_reason"],
        tuple(_prompt_token(of) for of in choice.get("prompt_logprobs") or () if of),
    )


def _alternatives(told: dict[str, float] | None) -> tuple[Any, ...]:
    return tuple((text, bits(value)) for text, value in (told or {}).items())


def _prompt_token(told: dict[str, dict[str, Any]]) -> tuple[Any, ...]:
    return tuple((token, bits(of["logprob"]), of["rank"]) for token, of in told.items())


def answers(deployment: Deployment, some: Sequence[Ask], model: str) -> list[Said]:
    """Return what each request is told, many of them at once."""
    with ThreadPoolExecutor(AT_ONCE) as clients:
        replies = clients.map(lambda ask: deployment.complete(**body(ask), model=model), some)
        return [said_of(reply["choices"][0]) for reply in replies]


def compared(got: Sequence[Said], wanted: Sequence[Said], where: str) -> dict[str, Any]:
    """Return how many answers are the same bits, and where the first others differ."""
    found = differences(got, wanted, where)
    return {
        "requests": len(got),
        "tokens": sum(len(said.tokens) for said in got),
        "differ": len(found),
        "first": found[:SHOWN],
    }


def added(before: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return what two slices of requests say together: counts are summed, the first lines kept."""
    summed = {name: before[name] + more[name] for name in COUNTED}
    return {**more, **summed, "first": [*before["first"], *more["first"]][:SHOWN]}
