"""Which logprobs a request body asks for: mode, scaling, drafts; needs no tokenizer, no workers."""

from __future__ import annotations

from baton_worker.gateway.errors import bad_request
from baton_worker.gateway.intake.schema import CompletionBody, GenerationBody
from baton_worker.sampling import LogprobParams

_MODES = ("raw_logprobs", "processed_logprobs")


def logprob_params(body: GenerationBody, logprobs_k: int) -> LogprobParams:
    """Return what the body wants of its logprobs, of which each token has `logprobs_k`.

    Raises:
        ApiError: 400: an unknown mode, or one without logprobs to apply it to.
    """
    mode = _MODES[0] if body.logprobs_mode is None else body.logprobs_mode
    if mode not in _MODES:
        raise bad_request("logprobs_mode", f"logprobs_mode is {mode!r}: it must be one of {_MODES}")
    params = LogprobParams(
        processed=mode == _MODES[1],
        temp_scaled=bool(body.temp_scaled_logprobs),
        top_p_normalized=bool(body.top_p_normalized_logprobs),
        draft_ids=bool(body.include_step_details),
        draft_logprobs=bool(body.include_draft_logprobs),
        prompt_k=max(prompt_logprobs_k(body), logprobs_k if has_echo(body) else -1),
    )
    needing = {
        "logprobs_mode": params.processed,
        "temp_scaled_logprobs": params.temp_scaled,
        "top_p_normalized_logprobs": params.top_p_normalized,
        "include_draft_logprobs": params.draft_logprobs,
    }
    for name, is_set in needing.items():
        if is_set and logprobs_k < 0:
            raise bad_request(name, f"{name} needs logprobs")
    return params


def prompt_logprobs_k(body: GenerationBody) -> int:
    """Return how many alternatives each prompt token shall have, -1 for no logprobs of them.

    Raises:
        ApiError: 400.
    """
    k = body.prompt_logprobs
    if k is not None and k < 0:
        raise bad_request("prompt_logprobs", f"prompt_logprobs is {k}: the least is 0")
    return -1 if k is None else k


def has_echo(body: GenerationBody) -> bool:
    """Whether the prompt shall stand before the output."""
    return isinstance(body, CompletionBody) and bool(body.echo)
