"""Large request bodies, judged by their bytes before they are made into objects.

JSON is decoded in one go, which nothing else can interrupt, and a byte of it can become a hundred
of objects. So a large body is taken apart by its fields first; token ids are decoded list by list,
with a turn of the event loop after each, and what could not be served anyhow is refused unread.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

import msgspec

from baton_worker.gateway.errors import ApiError, bad_request
from baton_worker.gateway.schema import ChatMessage, decode_as, decode_object

SMALL_BODY_BYTES = 1 << 16
"""Bodies up to here are decoded at once: 5 ms for the worst of them."""

MAX_FIELD_BYTES = 1 << 17
"""Of any field but the prompt, the messages, and tokens."""

MAX_STRINGS = 1 << 16
"""Keys and texts of a body."""

MAX_PROMPTS = 2048

_WINDOW_BYTES = 1 << 18
_LISTS = re.compile(rb"\[\s*\[")
_IDS = re.compile(rb"\[\s*[-\d]")
_LONG_FIELDS = ("prompt", "messages", "tokens")


class _Messages(msgspec.Struct):
    messages: list[ChatMessage]


async def read_object(raw: bytes, context_tokens: int) -> dict[str, Any]:
    """Return the JSON object in `raw`, as `schema.decode_object` does.

    Raises:
        ApiError: 400 when it is not JSON, or no object; when a field is too large; when a prompt
            has more than `context_tokens` ids.
    """
    if len(raw) <= SMALL_BODY_BYTES:
        return decode_object(raw)
    if _is_more(raw, b'"', 2 * MAX_STRINGS, but_not=b'\\"'):
        raise bad_request(None, f"the body has more than {MAX_STRINGS} strings", "body_too_large")
    fields = decode_object(raw, dict[str, msgspec.Raw])
    value: dict[str, Any] = {}
    for name, field in fields.items():
        data = memoryview(field).tobytes()
        if name in ("prompt", "tokens") and _IDS.match(data):
            value[name] = _ids(name, data, context_tokens)
        elif name == "prompt" and _LISTS.match(data):
            value[name] = await _lists(name, data, context_tokens)
        elif name in _LONG_FIELDS:
            value[name] = _long(name, data)
        elif len(data) > MAX_FIELD_BYTES:
            message = f"{name[:40]} has {len(data)} bytes: the most is {MAX_FIELD_BYTES}"
            raise bad_request(name[:40], message, "field_too_large")
        else:
            value[name] = msgspec.json.decode(data)
    await asyncio.sleep(0)
    return value


def too_many_tokens(name: str, context_tokens: int) -> ApiError:
    """Return the answer to a prompt that is longer than any context."""
    return bad_request(
        name,
        f"{name} has more than {context_tokens} tokens, which is the whole context",
        "context_length_exceeded",
    )


def _ids(name: str, data: bytes, context_tokens: int) -> Any:
    if _is_more(data, b",", context_tokens):
        raise too_many_tokens(name, context_tokens)
    return msgspec.json.decode(data)


async def _lists(name: str, data: bytes, context_tokens: int) -> list[Any]:
    if _is_more(data, b"[", MAX_PROMPTS + 1):
        raise bad_request(name, f"{name} has more than {MAX_PROMPTS} lists")
    found = []
    for item in msgspec.json.decode(data, type=list[msgspec.Raw]):
        found.append(_ids(name, memoryview(item).tobytes(), context_tokens))
        await asyncio.sleep(0)
    return found


def _long(name: str, data: bytes) -> Any:
    """Decode texts; messages of a wrong shape end it at the first that is."""
    if name == "messages":
        decode_as(b'{"messages":%b}' % data, _Messages)
    return msgspec.json.decode(data)


def _is_more(data: bytes, mark: bytes, most: int, but_not: bytes = b"") -> bool:
    """Whether `mark` occurs more than `most` times; looks no further than that."""
    found = 0
    for start in range(0, len(data), _WINDOW_BYTES):
        end = start + _WINDOW_BYTES
        found += data.count(mark, start, end)
        if but_not:
            found -= data.count(but_not, start, end)
        if found > most:
            return True
    return False
