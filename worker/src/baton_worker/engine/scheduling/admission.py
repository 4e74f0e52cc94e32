"""What the engine accepts: checks at its edge, before anything is queued or allocated.

Owns the refusals and their codes. A request or handoff that passes can be stepped without harming
any other one. Pure: no queue, no clock.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np

from baton_worker.engine.api import EngineRefusedError, Handoff, KvInPool
from baton_worker.engine.kv.payload import KvShape
from baton_worker.engine.kv.pool import FIRST_BLOCK, strangers
from baton_worker.engine.scheduling.requests import RequestLimits
from baton_worker.messages import HandoffState, Submit
from baton_worker.records.columns import ErrorCode
from baton_worker.records.table import MAX_LOGPROB
from baton_worker.sampling import (
    MAX_LOGIT_BIAS,
    MAX_PRIORITY,
    SAMPLING_BOUNDS,
    RequestParams,
    SamplingParams,
)

MAX_HANDOFF_DRAFTS = 5
_FEW_TOKENS = 32

LOWEST_LOGPROB = -float(np.finfo(np.float32).max)
"""What the logprob op gives for a probability of 0."""


@dataclass(frozen=True, slots=True)
class KvIdentity:
    """What a handoff must match for its KV to mean the same here."""

    fingerprint: str
    shape: KvShape


def check_request(request: Submit, limits: RequestLimits) -> None:
    """Refuse a prompt that cannot be served.

    Raises:
        EngineRefusedError: INVALID_REQUEST, naming the field and its value.
    """
    n_known = len(request.prompt_token_ids) + len(request.output_token_ids)
    if n_known >= limits.max_model_len:
        _invalid(
            f"prompt of {n_known} tokens leaves no room to generate within "
            f"max_model_len {limits.max_model_len}"
        )
    _check_params(request, request.output_token_ids, limits)


def check_handoff(handoff: Handoff, identity: KvIdentity, limits: RequestLimits) -> None:
    """Refuse a handoff that another model made, or that is inconsistent in itself.

    The values of its KV are looked at when they are imported (`kv_transfers`): they are many.

    Raises:
        EngineRefusedError: INCOMPATIBLE for model, layout or KV arrays; INVALID_REQUEST for the
            rest.
    """
    state = handoff.state
    _check_layout(state, identity)
    _check_arrays(handoff, identity.shape)
    _check_tokens("first_token", (state.first_token,), limits)
    if state.drafts:
        _check_tokens("drafts", state.drafts, limits)
    if len(state.drafts) > MAX_HANDOFF_DRAFTS:
        _invalid(f"drafts has {len(state.drafts)} tokens, at most {MAX_HANDOFF_DRAFTS} fit")
    if not 0 <= state.n_reused <= len(state.prompt_token_ids):
        n_prompt = len(state.prompt_token_ids)
        _invalid(f"n_reused is {state.n_reused}, not in 0..{n_prompt}, the prompt's tokens")
    if state.n_cached + 1 >= limits.max_model_len:
        _invalid(
            f"prompt of {state.n_cached} tokens leaves nothing to decode within "
            f"max_model_len {limits.max_model_len}"
        )
    _check_params(state, (*state.output_token_ids, state.first_token), limits)
    _check_first_columns(state, limits)
    _check_draft_scores(state, limits)


def _check_params(params: RequestParams, output: tuple[int, ...], limits: RequestLimits) -> None:
    """Check what was asked, whoever brings it; `output`: the tokens that were given out."""
    _check_tokens("prompt_token_ids", params.prompt_token_ids, limits)
    _check_sampling(params.sampling, limits)
    _check_output(output, params.sampling, limits)
    most = min(limits.max_top_k, limits.vocab_size)
    for name, k in (
        ("logprobs_k", params.logprobs_k),
        ("logprobs.prompt_k", params.logprobs.prompt_k),
    ):
        if not -1 <= k <= most:
            _invalid(f"{name} is {k}, allowed are -1..{most}")
    if not -MAX_PRIORITY <= params.priority <= MAX_PRIORITY:
        _invalid(f"priority is {params.priority}, allowed are -{MAX_PRIORITY}..{MAX_PRIORITY}")


def _check_layout(state: HandoffState, identity: KvIdentity) -> None:
    shape = identity.shape
    expected = {
        "model_fingerprint": identity.fingerprint,
        "dtype": shape.form,
        "n_layers": shape.n_layers,
        "kv_heads": shape.kv_heads,
        "block_size": shape.block_size,
        "head_dim": shape.head_dim,
        "n_cached": len(state.prompt_token_ids) + len(state.output_token_ids),
    }
    for name, value in expected.items():
        if getattr(state, name) != value:
            _incompatible(f"handoff {name} is {getattr(state, name)!r}, this worker has {value!r}")


def _check_arrays(handoff: Handoff, shape: KvShape) -> None:
    n_blocks = shape.blocks_for(handoff.state.n_cached)
    if isinstance(handoff.kv, KvInPool):
        _check_blocks(handoff.kv, n_blocks)
        return
    expected = shape.arrays(n_blocks)
    if len(handoff.kv) != len(expected):
        _incompatible(f"handoff has {len(handoff.kv)} KV arrays, {len(expected)} are needed")
    for index, (got, form) in enumerate(zip(handoff.kv, expected, strict=True)):
        if got.shape != form.shape or got.dtype != form.dtype:
            _incompatible(
                f"KV array {index} is {got.dtype}{list(got.shape)}, "
                f"{form.dtype}{list(form.shape)} is needed"
            )


def _check_blocks(kv: KvInPool, n_blocks: int) -> None:
    assert kv.pool is not None, "what comes from elsewhere"
    if len(kv.blocks) != n_blocks:
        _incompatible(f"handoff names {len(kv.blocks)} blocks, {n_blocks} are needed")
    bad = strangers(kv.pool.shape, kv.blocks)
    if bad:
        last = kv.pool.shape.n_blocks + FIRST_BLOCK - 1
        _incompatible(f"handoff names block {bad[0]}, its pool has {FIRST_BLOCK}..{last}")


def _check_output(tokens: tuple[int, ...], sampling: SamplingParams, limits: RequestLimits) -> None:
    """Refuse an output that leaves nothing to generate."""
    if not tokens:
        return
    _check_tokens("output_token_ids", tokens, limits)
    if len(tokens) >= sampling.max_tokens:
        _invalid(f"max_tokens is {sampling.max_tokens}, {len(tokens)} tokens have used it up")
    eos = frozenset[int]() if sampling.ignore_eos else limits.eos_token_ids
    ended = (eos | frozenset(sampling.stop_token_ids)).intersection(tokens)
    if ended:
        _invalid(f"the output holds {sorted(ended)}, which ends the request: nothing is left")


def _check_first_columns(state: HandoffState, limits: RequestLimits) -> None:
    """Check what the echo row will repeat; without logprobs it repeats none of these."""
    width = 1 + state.logprobs_k
    n_topk = max(width - 1, 0)
    if state.width != width:
        _invalid(f"width is {state.width}, logprobs_k {state.logprobs_k} means {width}")
    if len(state.topk_tokens) != n_topk or len(state.topk_logprobs) != n_topk:
        _invalid(
            f"topk_tokens and topk_logprobs have {len(state.topk_tokens)} and "
            f"{len(state.topk_logprobs)} entries, {n_topk} are needed"
        )
    if state.topk_tokens:
        _check_tokens("topk_tokens", state.topk_tokens, limits)
    _check_logprob_values("topk_logprobs", state.topk_logprobs)
    if width:
        _check_logprob_values("first_logprob", (state.first_logprob,))
        _check_ranks("first_rank", (state.first_rank,), limits)


def _check_draft_scores(state: HandoffState, limits: RequestLimits) -> None:
    """Check what a decode row will repeat: one bad value would spoil the whole record."""
    scores, k = state.draft_scores, max(state.logprobs_k, 0)
    n = len(scores.logprobs)
    if not n == len(scores.ranks) <= len(state.drafts):
        _invalid(f"draft_scores has {n} logprobs and {len(scores.ranks)} ranks for its drafts")
    if len(scores.topk_tokens) != n * k or len(scores.topk_logprobs) != n * k:
        _invalid(f"draft_scores has {len(scores.topk_tokens)} alternatives, {n * k} are needed")
    _check_logprob_values("draft_scores", (*scores.logprobs, *scores.topk_logprobs))
    _check_ranks("draft_scores", scores.ranks, limits)
    if scores.topk_tokens:
        _check_tokens("draft_scores", scores.topk_tokens, limits)


def _check_logprob_values(name: str, values: tuple[float, ...]) -> None:
    """Check values as the float32 that a record makes of them."""
    stored = array("f", values)
    bad = [value for value in stored if not LOWEST_LOGPROB <= value <= MAX_LOGPROB]
    if bad:
        _invalid(f"{name} holds the logprob {bad[0]}, allowed are {LOWEST_LOGPROB:g}..0")


def _check_ranks(name: str, ranks: tuple[int, ...], limits: RequestLimits) -> None:
    bad = [rank for rank in ranks if not 1 <= rank <= limits.vocab_size]
    if bad:
        _invalid(f"{name} holds the rank {bad[0]}, allowed are 1..{limits.vocab_size}")


def _check_tokens(name: str, tokens: tuple[int, ...], limits: RequestLimits) -> None:
    if not tokens:
        _invalid(f"{name} is empty")
    if not _are_ids(tokens, limits.vocab_size):
        bad = next(t for t in tokens if not 0 <= t < limits.vocab_size)
        _invalid(f"{name} holds {bad}, ids are 0..{limits.vocab_size - 1}")


def _are_ids(tokens: tuple[int, ...], vocab_size: int) -> bool:
    """Whether all are; a long prompt is looked at in one piece, between its arrival and a step."""
    if len(tokens) <= _FEW_TOKENS:
        return all(0 <= token < vocab_size for token in tokens)
    try:
        return int(np.frombuffer(array("I", tokens), np.uint32).max()) < vocab_size
    except OverflowError:  # negative, or no number of 32 bits
        return False


def _check_sampling(sampling: SamplingParams, limits: RequestLimits) -> None:
    for name, bounds in SAMPLING_BOUNDS.items():
        value = getattr(sampling, name)
        if not bounds.hold(value):
            _invalid(f"{name} is {value}, allowed are {bounds}")
    if sampling.stop_token_ids:
        _check_tokens("stop_token_ids", sampling.stop_token_ids, limits)
    _check_steering(sampling, limits)
    endings = set(sampling.stop_token_ids) | limits.eos_token_ids
    if sampling.min_tokens and len(endings) >= limits.vocab_size:
        _invalid(f"min_tokens is {sampling.min_tokens} but every token is a stop token")
    masked = {word[-1] for word in sampling.bad_words} | (endings if sampling.min_tokens else set())
    if len(masked) >= limits.vocab_size:
        _invalid(f"bad_words and min_tokens {sampling.min_tokens} may forbid every token")


def _check_steering(sampling: SamplingParams, limits: RequestLimits) -> None:
    if sampling.logit_bias:
        tokens = tuple(token for token, _ in sampling.logit_bias)
        _check_tokens("logit_bias", tokens, limits)
        if len(set(tokens)) < len(tokens):
            _invalid("logit_bias names a token twice")
        bad = [value for _, value in sampling.logit_bias if not abs(value) <= MAX_LOGIT_BIAS]
        if bad:
            _invalid(f"logit_bias is {bad[0]}, allowed are -{MAX_LOGIT_BIAS:g}..{MAX_LOGIT_BIAS:g}")
    for word in sampling.bad_words:
        _check_tokens("bad_words", word, limits)


def _invalid(message: str) -> None:
    raise EngineRefusedError(ErrorCode.INVALID_REQUEST, message)


def _incompatible(message: str) -> None:
    raise EngineRefusedError(ErrorCode.INCOMPATIBLE, message)
