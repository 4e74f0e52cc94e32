"""Request fields that would change the answer's meaning and that the gateway does not implement.

Ignoring them would answer 200 with something the client did not ask for, so each is refused by name
unless its value asks for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from baton_worker.gateway.errors import bad_request
from baton_worker.gateway.request import Endpoint

_EMPTY: Final[tuple[Any, ...]] = (None, False, "", [], {})

_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "allowed_token_ids": _EMPTY,
    "audio": _EMPTY,
    "chat_template": _EMPTY,
    "continue_final_message": _EMPTY,
    "function_call": (*_EMPTY, "none"),
    "functions": _EMPTY,
    "guided_choice": _EMPTY,
    "guided_grammar": _EMPTY,
    "guided_json": _EMPTY,
    "guided_regex": _EMPTY,
    "include_stop_str_in_output": _EMPTY,
    "length_penalty": (*_EMPTY, 1, 1.0),
    "logits_processors": _EMPTY,
    "modalities": (*_EMPTY, ["text"]),
    "prompt_embeds": _EMPTY,
    "response_format": (*_EMPTY, {"type": "text"}),
    "skip_special_tokens": (None, True),
    "structured_outputs": _EMPTY,
    "suffix": _EMPTY,
    "tool_choice": (*_EMPTY, "none", "auto"),
    "tools": _EMPTY,
    "truncate_prompt_tokens": (None,),
    "typical_p": (*_EMPTY, 1, 1.0),
    "use_beam_search": _EMPTY,
    "web_search_options": (None,),
}

_OF_THE_OTHER: Final[Mapping[Endpoint, Mapping[str, str]]] = {
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
    for name, message in _OF_THE_OTHER[endpoint].items():
        if not _is_neutral(body.get(name), (*_EMPTY, 0)):
            raise bad_request(name, message, "unsupported_parameter")
    for name, value in body.items():
        if name in _NEUTRAL and not _is_neutral(value, _NEUTRAL[name]):
            raise bad_request(name, f"{name} is not supported", "unsupported_parameter")
    best_of, n = body.get("best_of"), body.get("n")
    if best_of is not None and best_of != (1 if n is None else n):
        raise bad_request(
            "best_of", "best_of other than n is not supported", "unsupported_parameter"
        )


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    return any(type(value) is type(item) and value == item for item in neutral)
