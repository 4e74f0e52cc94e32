"""Ranges and relations of request fields: from a typed body to a `GenerationRequest`.

Owns every numeric limit of the API. Pure: the tokenizer, the clock and the workers stay outside;
what the workers can take comes in as `ModelLimits`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from baton_worker.gateway.errors import bad_request, context_exceeded
from baton_worker.gateway.intake.conversation import check_messages
from baton_worker.gateway.intake.defaults import SamplingDefaults
from baton_worker.gateway.intake.logit_bias import check_bad_words, logit_bias
from baton_worker.gateway.intake.schema import (
    ChatBody,
    CompletionBody,
    GenerationBody,
    StreamOptions,
)
from baton_worker.gateway.request import (
    SEED_MASK,
    Endpoint,
    GenerationRequest,
    ModelLimits,
    PromptAsText,
    salt_digest,
)
from baton_worker.sampling import (
    MAX_INT32,
    MAX_PRIORITY,
    SAMPLING_BOUNDS,
    LogprobParams,
    RequestParams,
    SamplingParams,
)

MAX_N = 128
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKEN_IDS = 256
MAX_SALT_CHARACTERS = 1024
MAX_PROMPT_LOGPROBS = 1 << 22
"""Of all choices: some 64 bytes of JSON each, and a few bytes ask for as many as there are."""
COMPLETION_DEFAULT_MAX_TOKENS = 16
_LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")
_API_DEFAULTS = SamplingDefaults()


@dataclass(frozen=True, slots=True)
class Options:
    """Everything about a request that can be judged without tokenizer and workers.

    `request` still lacks its prompts, the length of its output and its bad words, which are text
    yet. `max_tokens` None means as many as the context leaves room for, of a completion
    `COMPLETION_DEFAULT_MAX_TOKENS` at most: who asked for none is refused for none.
    """

    request: GenerationRequest
    max_tokens: int | None
    max_tokens_field: str
    logprobs_field: str
    bad_words: tuple[str, ...]


def chat_options(
    body: ChatBody, random_seed: int, defaults: SamplingDefaults = _API_DEFAULTS
) -> Options:
    """Judge a chat request. `random_seed` is used when the client gave none, and `defaults` for
    sampling fields that it left out.

    Raises:
        ApiError: 400 naming the field.
    """
    check_messages(body.messages)
    k = -1
    if body.logprobs:
        k = _alternatives("top_logprobs", body.top_logprobs)
    elif body.top_logprobs:
        raise bad_request("top_logprobs", "top_logprobs needs logprobs to be true")
    if body.max_completion_tokens is not None:
        field, max_tokens = "max_completion_tokens", body.max_completion_tokens
    else:
        field, max_tokens = "max_tokens", body.max_tokens  # type: ignore[assignment]
    sampling = _sampling(body, random_seed, defaults)
    return _options(Endpoint.CHAT, body, sampling, (field, max_tokens), ("top_logprobs", k))


def completion_options(
    body: CompletionBody, random_seed: int, defaults: SamplingDefaults = _API_DEFAULTS
) -> Options:
    """Judge a completion request; see `chat_options`."""
    k = -1 if body.logprobs is None else _alternatives("logprobs", body.logprobs)
    sampling = _sampling(body, random_seed, defaults)
    return _options(
        Endpoint.COMPLETION, body, sampling, ("max_tokens", body.max_tokens), ("logprobs", k)
    )


def bind(
    options: Options,
    prompts: Sequence[tuple[int, ...]],
    limits: ModelLimits,
    bad_words: tuple[tuple[int, ...], ...] = (),
    given_texts: Sequence[PromptAsText | None] = (),
) -> GenerationRequest:
    """Join judged options, checked prompts (`check_ids`), the texts that they were given as where
    they are echoed, and tokenised bad words, within what the workers can take.

    Raises:
        ApiError: 400 naming the field: too long a prompt, too many output tokens, too large a k, a
            token id outside the vocabulary, more logprobs of prompts in all than an
            answer may have.
    """
    request, params = options.request, options.request.params
    sampling = params.sampling
    name = "messages" if request.endpoint is Endpoint.CHAT else "prompt"
    for field, k in (
        (options.logprobs_field, params.logprobs_k),
        ("prompt_logprobs", request.prompt_logprobs_k),
    ):
        if k > limits.max_top_k:
            raise bad_request(field, f"{field} is {k}: the most is {limits.max_top_k}")
    check_ids("stop_token_ids", sampling.stop_token_ids, limits.vocab_size, minimum=0)
    biased = tuple(token for token, _ in sampling.logit_bias)
    check_ids("logit_bias", biased, limits.vocab_size, minimum=0)
    context = limits.context_with(max(params.logprobs_k, request.prompt_logprobs_k))
    max_tokens = _output_tokens(options, prompts, name, context)
    if sampling.min_tokens > max_tokens:
        raise bad_request(
            "min_tokens",
            f"min_tokens is {sampling.min_tokens}, more than the {max_tokens} output tokens",
        )
    sampling = msgspec.structs.replace(sampling, max_tokens=max(max_tokens, 1), bad_words=bad_words)
    request = replace(
        request,
        prompts=tuple(prompts),
        given_texts=tuple(given_texts),
        params=msgspec.structs.replace(params, sampling=sampling),
        scores_only=max_tokens == 0,
    )
    _check_prompt_logprobs(request)
    return request


def _check_prompt_logprobs(request: GenerationRequest) -> None:
    """Refuse an answer whose every part is within bounds, and the whole beyond all memory."""
    n = request.n_prompt_logprobs
    if n > MAX_PROMPT_LOGPROBS:
        told = "prompt_logprobs" if request.prompt_logprobs_k >= 0 else "logprobs"
        raise bad_request(
            "n" if request.n > 1 else told,
            f"{request.n_choices} choices would have {n} logprobs of prompt tokens and their"
            f" alternatives together: the most is {MAX_PROMPT_LOGPROBS}",
        )


def _options(
    endpoint: Endpoint,
    body: GenerationBody,
    sampling: SamplingParams,
    max_tokens: tuple[str, int | None],
    logprobs: tuple[str, int],
) -> Options:
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options", "stream_options needs stream to be true")
    streaming = body.stream_options or StreamOptions()
    has_usage = bool(streaming.include_usage)
    _check_max_tokens(*max_tokens, _has_echo(body) or _prompt_logprobs_k(body) >= 0)
    params = RequestParams(
        sampling=sampling,
        logprobs_k=logprobs[1],
        logprobs=_logprob_params(body, logprobs[1]),
        priority=_integer("priority", body.priority, 0, -MAX_PRIORITY, MAX_PRIORITY),
        cache_salt=_salt(body.cache_salt),
    )
    request = GenerationRequest(
        endpoint=endpoint,
        prompts=(),
        n=_integer("n", body.n, 1, 1, MAX_N),
        params=params,
        stops=_stops(body.stop),
        stream=bool(body.stream),
        include_usage=has_usage,
        continuous_usage=has_usage and bool(streaming.continuous_usage_stats),
        return_token_ids=bool(body.return_token_ids),
        step_details=bool(body.include_step_details),
        prompt_logprobs_k=_prompt_logprobs_k(body),
        echo=_has_echo(body),
        skip_special_tokens=body.skip_special_tokens is not False,
    )
    return Options(
        request=request,
        max_tokens=max_tokens[1],
        max_tokens_field=max_tokens[0],
        logprobs_field=logprobs[0],
        bad_words=check_bad_words(body.bad_words),
    )


def _salt(cache_salt: str | None) -> bytes:
    if cache_salt == "":
        raise bad_request("cache_salt", "cache_salt is empty: leave it out, or name one")
    if cache_salt is not None and len(cache_salt) > MAX_SALT_CHARACTERS:
        message = f"cache_salt has {len(cache_salt)} characters: the most is {MAX_SALT_CHARACTERS}"
        raise bad_request("cache_salt", message)
    return salt_digest(cache_salt)


def _check_max_tokens(name: str, value: int | None, tells_prompt: bool) -> None:
    """Refuse a number of output tokens that is none; 0 is one where the prompt is asked about."""
    least = 0 if tells_prompt else 1
    if value is not None and value < least:
        hint = "" if tells_prompt else "; with echo or prompt_logprobs 0 scores the prompt alone"
        raise bad_request(name, f"{name} is {value}: the least is {least}{hint}")


def _sampling(body: GenerationBody, random_seed: int, defaults: SamplingDefaults) -> SamplingParams:
    stop_ids = tuple(dict.fromkeys(body.stop_token_ids or ()))
    if len(stop_ids) > MAX_STOP_TOKEN_IDS:
        raise bad_request("stop_token_ids", f"more than {MAX_STOP_TOKEN_IDS} stop_token_ids")
    return SamplingParams(
        temperature=_number("temperature", body.temperature, defaults.temperature),
        top_p=_number("top_p", body.top_p, defaults.top_p),
        top_k=max(0, _integer("top_k", body.top_k, defaults.top_k, -1)),
        seed=_seed(body.seed, random_seed),
        presence_penalty=_number("presence_penalty", body.presence_penalty, 0.0),
        frequency_penalty=_number("frequency_penalty", body.frequency_penalty, 0.0),
        repetition_penalty=_number(
            "repetition_penalty", body.repetition_penalty, defaults.repetition_penalty
        ),
        min_tokens=_integer("min_tokens", body.min_tokens, 0, 0),
        ignore_eos=bool(body.ignore_eos),
        stop_token_ids=stop_ids,
        min_p=_number("min_p", body.min_p, defaults.min_p),
        logit_bias=logit_bias(body.logit_bias),
    )


def _logprob_params(body: GenerationBody, logprobs_k: int) -> LogprobParams:
    """Return what the body wants of its logprobs, of which each token has `logprobs_k`.

    Raises:
        ApiError: 400: an unknown mode, or one without logprobs to apply it to.
    """
    mode = _LOGPROBS_MODES[0] if body.logprobs_mode is None else body.logprobs_mode
    if mode not in _LOGPROBS_MODES:
        raise bad_request(
            "logprobs_mode", f"logprobs_mode is {mode!r}: it must be one of {_LOGPROBS_MODES}"
        )
    params = LogprobParams(
        processed=mode == _LOGPROBS_MODES[1],
        temp_scaled=bool(body.temp_scaled_logprobs),
        top_p_normalized=bool(body.top_p_normalized_logprobs),
        draft_ids=bool(body.include_step_details),
        draft_logprobs=bool(body.include_draft_logprobs),
        prompt_k=max(_prompt_logprobs_k(body), logprobs_k if _has_echo(body) else -1),
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


def _prompt_logprobs_k(body: GenerationBody) -> int:
    """Return how many alternatives each prompt token shall have, -1 for no logprobs of them.

    Raises:
        ApiError: 400.
    """
    k = body.prompt_logprobs
    if k is not None and k < 0:
        raise bad_request("prompt_logprobs", f"prompt_logprobs is {k}: the least is 0")
    return -1 if k is None else k


def _has_echo(body: GenerationBody) -> bool:
    """Whether the prompt shall stand before the output."""
    return isinstance(body, CompletionBody) and bool(body.echo)


def _seed(seed: int | None, random_seed: int) -> int:
    """Any signed or unsigned 64-bit number is a seed; a negative one keeps its bit pattern."""
    if seed is None:
        return random_seed
    if not -(1 << 63) <= seed <= SEED_MASK:
        raise bad_request("seed", f"seed is {seed}: it must fit in 64 bits")
    return seed & SEED_MASK


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(dict.fromkeys(stop or ()))
    if len(stops) > MAX_STOP_STRINGS:
        raise bad_request("stop", f"{len(stops)} stop strings: the most is {MAX_STOP_STRINGS}")
    for text in stops:
        if not 0 < len(text) <= MAX_STOP_CHARACTERS:
            raise bad_request(
                "stop", f"a stop string has 1 to {MAX_STOP_CHARACTERS} characters, not {len(text)}"
            )
    return stops


def _integer(name: str, value: int | None, default: int, low: int, high: int = MAX_INT32) -> int:
    if value is None:
        return default
    if not low <= value <= high:
        raise bad_request(name, f"{name} is {value}: it must be {low} to {high}")
    return value


def _alternatives(name: str, value: int | None) -> int:
    """Return k; how many there may be at most is the workers' to say (`bind`)."""
    if value is not None and value < 0:
        raise bad_request(name, f"{name} is {value}: the least is 0")
    return value or 0


def _number(name: str, value: float | None, default: float) -> float:
    if value is None:
        return default
    bounds = SAMPLING_BOUNDS[name]
    if not bounds.hold(value):
        raise bad_request(name, f"{name} is {value}: it must be {bounds}")
    return float(value)


def check_ids(name: str, ids: Sequence[int], vocab_size: int, minimum: int = 1) -> None:
    """Refuse ids outside the vocabulary, and fewer than `minimum`.

    Raises:
        ApiError: 400 naming the field.
    """
    if len(ids) < minimum:
        raise bad_request(name, f"{name} has no tokens")
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        wrong = next(i for i in ids if not 0 <= i < vocab_size)
        raise bad_request(name, f"{name}: token id {wrong} is not in 0..{vocab_size - 1}")


def _output_tokens(
    options: Options, prompts: Sequence[tuple[int, ...]], name: str, context_tokens: int
) -> int:
    """Return how many each choice may have. One number is for all prompts, so that of several none
    is cut short because another is long.
    """
    prompt_tokens = max(map(len, prompts))
    room = context_tokens - prompt_tokens
    if room < 1:
        told = f"the prompt has {prompt_tokens}, so no token could be generated"
        raise context_exceeded(name, context_tokens, told)
    max_tokens = options.max_tokens
    if max_tokens is None:
        most = COMPLETION_DEFAULT_MAX_TOKENS
        if options.request.endpoint is Endpoint.CHAT:
            return room
        if len(prompts) == 1:
            return min(room, most)
        max_tokens = most
    if max_tokens > room:
        told = f"{prompt_tokens} of the prompt and {max_tokens} of output are more"
        if options.max_tokens is None:
            told += f"; name max_tokens, for several prompts have {most} each without it"
        raise context_exceeded(options.max_tokens_field, context_tokens, told)
    return max_tokens
