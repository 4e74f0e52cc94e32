"""Request bodies as OpenAI clients send them: fields and JSON types, nothing about ranges.

Owns the field names. Every field may be null, as OpenAI's clients send it. Fields that would change
the answer's meaning and are not implemented are refused by `unsupported`; all other unknown fields
are accepted and ignored, as OpenAI-compatible servers do.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Final, TypeVar

import msgspec

from baton_worker.gateway.errors import bad_request

T = TypeVar("T")
_PATH = re.compile(r"^(?P<text>.*) - at `\$\.?(?P<path>[^`]*)`$", re.DOTALL)

_FIRST_HALF = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])")
_PAIR_BYTES = 12
_EXACT_BELOW = 1 << 53
"""A double below is the integer that it was made of."""

_MAX_KEY_CHARACTERS = 40

Prompt = str | list[str | int | list[int]]


class StreamOptions(msgspec.Struct, frozen=True):
    """`include_usage`: a last chunk without choices carries the usage; with
    `continuous_usage_stats` each chunk carries that of its choice so far.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(msgspec.Struct, frozen=True, kw_only=True):
    """What both generation endpoints understand."""

    model: str | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_p: float | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    logprobs_mode: str | None = None
    temp_scaled_logprobs: bool | None = None
    top_p_normalized_logprobs: bool | None = None
    prompt_logprobs: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    skip_special_tokens: bool | None = None
    include_draft_logprobs: bool | None = None
    include_step_details: bool | None = None
    user: str | None = None


class ContentPart(msgspec.Struct, frozen=True):
    """One part of a message; only `text` parts are understood."""

    type: str
    text: str | None = None


class ToolFunction(msgspec.Struct, frozen=True):
    """What a model called: `arguments` is JSON text, or the object itself."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct, frozen=True):
    """A call that an earlier answer made."""

    function: ToolFunction
    id: str | None = None
    type: str | None = None


class ChatMessage(msgspec.Struct, frozen=True):
    """One turn of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class ChatBody(GenerationBody, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionBody(GenerationBody, frozen=True, kw_only=True):
    """`POST /v1/completions`."""

    prompt: Prompt
    logprobs: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /tokenize`: a prompt, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /detokenize`."""

    tokens: list[int]
    model: str | None = None


_INTEGERS: Final[Mapping[type, frozenset[str]]] = {
    kind: frozenset(
        field.name for field in msgspec.structs.fields(kind) if field.type == (int | None)
    )
    for kind in (ChatBody, CompletionBody, TokenizeBody, DetokenizeBody)
}
"""By body, its fields that are integers."""


def _finite(number: str) -> float:
    value = float(number)
    if math.isinf(value):
        raise ValueError("number out of range")
    return value


_ANY = msgspec.json.Decoder(float_hook=_finite)
"""msgspec's own numbers are the same, but at the edges of a double it takes microseconds for each:
a small body of nothing else would hold the event loop for 65 ms.
"""


def decode_object(body: bytes, kind: Any = Any) -> dict[str, Any]:
    """Return the JSON object in `body`; `kind`: a map with other values.

    Raises:
        ApiError: 400 when it is not JSON, or not an object.
    """
    try:
        try:
            value = _decode(body, kind)
        except msgspec.ValidationError:
            value = _by_fields(body) if kind is Any else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        why = _why_not_json(body, error)
        raise bad_request(None, f"the body is not valid JSON: {why}", "invalid_json") from error
    if not isinstance(value, dict):
        raise bad_request(None, "the body must be a JSON object", "invalid_json")
    return value


def decode_as(body: bytes, kind: Any, name: str) -> Any:
    """Return the JSON of the field `name` as `kind`; of what `kind` does not name nothing is made.

    Raises:
        ApiError: 400 that names the field with a wrong type, or the one that is missing. What was
            skipped well as a part of a body may be no Unicode, or a number that is none.
    """
    try:
        return _decode(body, kind)
    except msgspec.ValidationError as error:
        raise _type_error(str(error), {}, name) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request(name, f"{name} is not valid JSON: {error}", "invalid_json") from error


def integer_of(value: Any) -> Any:
    """Return the integer that a double was made of, and all else as it is."""
    is_whole = type(value) is float and value.is_integer() and abs(value) < _EXACT_BELOW
    return int(value) if is_whole else value


def convert(value: dict[str, Any], kind: type[T]) -> T:
    """Return `value` as `kind`. `16.0` is an integer, as JSON Schema and vLLM have it: what went
    through a double on its way is written so (Gson's maps, a quotient in Python).

    Raises:
        ApiError: 400 that names the field with a wrong type, or the one that is missing.
    """
    whole = {
        name: integer_of(number)
        for name, number in value.items()
        if type(number) is float and name in _INTEGERS[kind]
    }
    try:
        return msgspec.convert({**value, **whole} if whole else value, kind)
    except msgspec.ValidationError as error:
        raise _type_error(str(error), value) from error


def _why_not_json(body: bytes, error: Exception) -> str:
    """Return what is wrong, where msgspec says of a whole body that it was truncated: it looks for
    the second half of a character that was cut in UTF-16, and comes upon the end.
    """
    if not body.strip():
        return "it is empty"
    half = _first_half(body)
    if not half or str(error) != "Input data was truncated":
        return str(error)
    return f"{half} is the first half of a surrogate pair, and its second is missing"


def _first_half(body: bytes) -> str:
    """Return the half of a character that a body ends with, or nothing. Behind an odd number of
    backslashes its own is what they escape, and the rest is text.
    """
    for half in _FIRST_HALF.finditer(body, max(0, len(body) - _PAIR_BYTES)):
        before = body[: half.start()]
        if (len(before) - len(before.rstrip(b"\\"))) % 2 == 0:
            return half[0].decode()
    return ""


def _decode(body: bytes, kind: Any) -> Any:
    return _ANY.decode(body) if kind is Any else msgspec.json.decode(body, type=kind)


def _by_fields(body: bytes) -> dict[str, Any] | None:
    """Decode field by field, so that a number which is none is told with its field's name."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError:
        return None
    return {
        name: decode_as(memoryview(field).tobytes(), Any, name[:_MAX_KEY_CHARACTERS])
        for name, field in fields.items()
    }


def _type_error(message: str, value: dict[str, Any], name: str = "") -> Exception:
    match = _PATH.match(message)
    text, path = (match["text"], match["path"]) if match else (message, "")
    missing = re.search(r"missing required field `([^`]*)`", text)
    if missing:
        path = f"{path}.{missing[1]}" if path else missing[1]
    path = f"{name}{_joint(name, path)}{_with_key(path, value)}"
    told = f"{path} is missing" if missing else f"{path or 'body'}: {text}"
    return bad_request(path or None, told, "invalid_type")


def _joint(name: str, path: str) -> str:
    return "." if name and path and path[0] not in ".[" else ""


def _with_key(path: str, value: dict[str, Any]) -> str:
    """Return the path of a value in a map of numbers with its key, which msgspec leaves out."""
    field = path.removesuffix("[...]")
    items = value.get(field)
    if field == path or not isinstance(items, dict):
        return path
    wrong = (key for key, item in items.items() if type(item) not in (int, float))
    return f"{field}[{next(wrong, '...')[:_MAX_KEY_CHARACTERS]}]"
