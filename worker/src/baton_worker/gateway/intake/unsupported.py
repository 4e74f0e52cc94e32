"""Request fields of other servers that the gateway does not implement: refused, or harmless.

Ignoring one that would change the answer's meaning would answer 200 with something the client did
not ask for, so each is refused by name unless its value asks for nothing. What changes nothing of
the answer is named too, so that every field of OpenAI's, vLLM's, SGLang's and FastDeploy's is known
to be the one or the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from baton_worker.gateway.errors import bad_request
from baton_worker.gateway.intake.schema import integer_of
from baton_worker.gateway.request import Endpoint

_EMPTY: Final[tuple[Any, ...]] = (None, False, "", [], {})
_NO_OBJECT: Final[tuple[Any, ...]] = (None, False, "", [])
"""Of fields that are objects: an empty one asks for something, or is none that OpenAI would take
(the empty JSON schema is any JSON)."""

NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "allowed_token_ids": _EMPTY,
    "audio": _NO_OBJECT,
    "bad_words_token_ids": _EMPTY,
    "chat_template": _EMPTY,
    "completion_token_ids": _EMPTY,
    "continue_final_message": _EMPTY,
    "custom_logit_processor": _EMPTY,
    "custom_params": _EMPTY,
    "disable_chat_template": _EMPTY,
    "disaggregate_info": _EMPTY,
    "documents": _EMPTY,
    "ebnf": _EMPTY,
    "ec_transfer_params": _EMPTY,
    "enable_thinking": (None,),
    "extra_key": _EMPTY,
    "function_call": (*_EMPTY, "none"),
    "functions": _EMPTY,
    "guided_choice": _EMPTY,
    "guided_decoding_backend": _EMPTY,
    "guided_grammar": _EMPTY,
    "guided_json": _NO_OBJECT,
    "guided_regex": _EMPTY,
    "guided_whitespace_pattern": _EMPTY,
    "include_logprobs_decode_token": (None, True),
    "include_reasoning": (None, True),
    "include_stop_str_in_output": _EMPTY,
    "input_ids": _EMPTY,
    "json_schema": _NO_OBJECT,
    "kv_transfer_params": _EMPTY,
    "length_penalty": (*_EMPTY, 1),
    "logits_processors": _EMPTY,
    "logits_processors_args": _EMPTY,
    "logprob_token_ids": _EMPTY,
    "lora_path": _EMPTY,
    "media_io_kwargs": _EMPTY,
    "mm_hashes": _EMPTY,
    "mm_processor_kwargs": _EMPTY,
    "modalities": (*_EMPTY, ["text"]),
    "moderation": _NO_OBJECT,
    "no_stop_trim": _EMPTY,
    "prediction": _NO_OBJECT,
    "prompt_embeds": _EMPTY,
    "prompt_token_ids": _EMPTY,
    "reasoning": _NO_OBJECT,
    "reasoning_effort": (None,),
    "reasoning_max_tokens": (None,),
    "regex": _EMPTY,
    "repetition_detection": _EMPTY,
    "response_format": (*_NO_OBJECT, {"type": "text"}),
    "response_max_tokens": (None,),
    "return_cached_tokens_details": _EMPTY,
    "return_hidden_states": _EMPTY,
    "return_meta_info": _EMPTY,
    "return_prompt_text": _EMPTY,
    "return_prompt_token_ids": _EMPTY,
    "return_routed_experts": _EMPTY,
    "return_token_offsets": _EMPTY,
    "return_tokens_as_token_ids": _EMPTY,
    "routed_experts_prompt_start": (None, 0),
    "routed_experts_start_len": (None, 0),
    "session_params": _EMPTY,
    "spaces_between_special_tokens": (None, True),
    "stop_regex": _EMPTY,
    "structural_tag": _NO_OBJECT,
    "structured_outputs": _NO_OBJECT,
    "suffix": _EMPTY,
    "task": _EMPTY,
    "thinking": (None,),
    "thinking_budget": (None,),
    "thinking_token_budget": (None, -1),
    "truncate_prompt_tokens": (None,),
    "typical_p": (*_EMPTY, 1),
    "use_beam_search": _EMPTY,
    "verbosity": (None, "medium"),
    "vllm_xargs": _EMPTY,
    "watermarking": _NO_OBJECT,
    "web_search_options": (None,),
}
"""By field, the values that ask for nothing; any other is refused."""

NEUTRAL_AT: Final[Mapping[Endpoint, Mapping[str, tuple[Any, ...]]]] = {
    Endpoint.CHAT: {"add_special_tokens": (None, False)},
    Endpoint.COMPLETION: {"tool_choice": (*_EMPTY, "none", "auto"), "tools": _EMPTY},
}
"""The same for fields that only the other endpoint implements: a chat's template has all special
tokens, and shows the tools."""

HARMLESS: Final = frozenset({
    "bootstrap_host",  # where what is computed, and what may be copied, is the gateway's to choose
    "bootstrap_port",
    "bootstrap_room",
    "collect_metrics",
    "custom_labels",
    "data_parallel_rank",
    "disagg_prefill_dp_rank",
    "images_config",  # there are no images
    "max_dynamic_patch",
    "max_streaming_response_tokens",
    "metadata",
    "min_dynamic_patch",
    "ngram_corpus_id",  # drafts change no token
    "parallel_tool_calls",  # what a model writes of calls is text of the answer
    "prompt_cache_key",  # where to look for known prompts; they are looked for everywhere
    "prompt_cache_options",
    "prompt_cache_retention",
    "request_id",
    "return_mm_kwargs",
    "rid",
    "routed_dp_rank",
    "safety_identifier",
    "separate_reasoning",  # what a model writes of its reasoning is text of the answer, too
    "service_tier",
    "session_id",
    "store",
    "stream_interval",
    "stream_reasoning",
    "trace_context",
    "truncation_side",  # nothing is truncated
    "use_audio_in_video",
})  # fmt: skip
"""Fields that may be ignored: whatever they say, tokens and logprobs are those asked for."""

_OF_TOKENIZE: Final[Mapping[str, tuple[Any, ...]]] = {
    **{
        name: NEUTRAL[name]
        for name in (
            "chat_template",
            "continue_final_message",
            "disable_chat_template",
            "documents",
            "enable_thinking",
            "functions",
            "input_ids",
            "media_io_kwargs",
            "mm_processor_kwargs",
            "prompt_token_ids",
            "reasoning",
            "reasoning_effort",
            "task",
            "thinking",
            "truncate_prompt_tokens",
        )
    },
    "return_token_strs": _EMPTY,
}
"""What would make other tokens of a text or conversation, or tell more of them."""

_OF_MESSAGE: Final[Mapping[str, tuple[Any, ...]]] = {
    "audio": _EMPTY,
    "function_call": _EMPTY,
    "partial": _EMPTY,
    "prefix": _EMPTY,
    "refusal": _EMPTY,
    "tools": _EMPTY,
}
"""Parts of a conversation that templates are not given: without them it would be another one. What
marks a last message as the answer's begin (`prefix`, `partial`) is one: it would be answered."""

_CONTINUED: Final = (
    "give /v1/completions the tokens that /tokenize makes of the messages before it, and those of"
    " its text"
)
_INSTEAD: Final[Mapping[str, str]] = {
    "continue_final_message": _CONTINUED,
    "enable_thinking": "write it into chat_template_kwargs, for the model's template",
    "extra_key": "cache_salt keeps the prefixes of several apart",
    "input_ids": "prompt of /v1/completions takes token ids",
    "partial": _CONTINUED,
    "prefix": _CONTINUED,
    "prompt_token_ids": "prompt of /v1/completions takes token ids",
    "return_prompt_token_ids": "return_token_ids tells those of the prompt, too",
    "thinking": "chat_template_kwargs takes what the model's template knows of it",
}
"""By field, what to write in its place."""

OF_THE_OTHER: Final[Mapping[Endpoint, Mapping[str, str]]] = {
    Endpoint.CHAT: {
        "echo": "echo belongs to /v1/completions",
        "prompt": "prompt belongs to /v1/completions; here it is messages",
    },
    Endpoint.COMPLETION: {
        "max_completion_tokens": "max_completion_tokens belongs to /v1/chat/completions; here it"
        " is max_tokens",
        "messages": "messages belongs to /v1/chat/completions; here it is prompt",
        "top_logprobs": "top_logprobs belongs to /v1/chat/completions; here it is logprobs, the"
        " number of alternatives",
    },
}
"""Fields that mean nothing here and something at the other endpoint, with what to write instead."""


def refuse_unsupported(endpoint: Endpoint, body: Mapping[str, Any]) -> None:
    """Check a decoded request body.

    Raises:
        ApiError: 400 that names the first field whose value would have to change the answer.
    """
    for name, message in OF_THE_OTHER[endpoint].items():
        if not _is_neutral(body.get(name), (*_EMPTY, 0)):
            raise bad_request(name, message, "unsupported_parameter")
    _check("", body, NEUTRAL)
    _check("", body, NEUTRAL_AT[endpoint])
    _check_messages(body.get("messages"))
    best_of, n = body.get("best_of"), integer_of(body.get("n"))
    if not _is_neutral(best_of, (None, 1 if n is None else n)):  # True equals 1, and is not
        raise bad_request(
            "best_of", "best_of other than n is not supported", "unsupported_parameter"
        )


def refuse_other_tokens(body: Mapping[str, Any]) -> None:
    """Check a decoded body of `/tokenize`, which tells what a request becomes: what this would be
    refused for.

    Raises:
        ApiError: 400 that names the first field whose value would have to change the answer.
    """
    _check("", body, _OF_TOKENIZE)
    _check_messages(body.get("messages"))


def _check_messages(messages: Any) -> None:
    if isinstance(messages, list):
        for index, message in enumerate(messages):
            if isinstance(message, dict):
                _check(f"messages[{index}].", message, _OF_MESSAGE)


def _check(place: str, fields: Mapping[str, Any], table: Mapping[str, tuple[Any, ...]]) -> None:
    for name, value in fields.items():
        if name in table and not _is_neutral(value, table[name]):
            path = f"{place}{name}"
            hint = f": {_INSTEAD[name]}" if name in _INSTEAD else ""
            raise bad_request(path, f"{path} is not supported{hint}", "unsupported_parameter")


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    value = integer_of(value)
    if isinstance(value, dict):  # null is left out within an object, too
        value = {name: part for name, part in value.items() if part is not None} or value
    return any(type(value) is type(item) and value == item for item in neutral)
