"""Large request bodies, judged by their bytes before they are made into objects.

JSON is decoded in one go, which nothing else can interrupt, and a byte of it can become a hundred
of objects. So a large body is taken apart by its fields first; each is decoded as what it may be,
so that nothing is made of anything else, with a turn of the event loop after each piece, and what
could not be served anyhow is refused unread. What remains in one go is one pass over the fields'
bounds, and one over a text: a thread is no way out of it, for the decoder keeps the interpreter. It
is `max_body_bytes` that bounds both, at 1 to 3 ms a MiB.
"""

from __future__ import annotations

import asyncio
import codecs
import re
from typing import Any, Final

import msgspec

from baton_worker.gateway.errors import ApiError, bad_request, context_exceeded
from baton_worker.gateway.intake.schema import ChatMessage, ContentPart, decode_as, decode_object

SMALL_BODY_BYTES = 1 << 16
"""Bodies up to here are decoded at once: 5 ms for the worst of them."""

MAX_FIELD_BYTES = 1 << 17
"""Of any field but an endpoint's prompt, messages, or tokens; all of these have four times as much.
"""

MAX_STRINGS = 1 << 16
"""Keys and texts of a body."""

MAX_PROMPTS = 2048
MAX_MESSAGES = 8192
MAX_FIELDS = 1024

_WINDOW_BYTES = 1 << 18
_SLICE_BYTES = 1 << 16
_SLICE_FIELDS = 256
_LISTS = re.compile(rb"\[\s*\[")
_IDS = re.compile(rb"\[\s*[-\d]")
_TEXTS: Final[Any] = str | list[str] | None
_TOKENS: Final[Any] = list[int] | None
_SHAPE: Final[Any] = list[ChatMessage] | None
_CONTENT: Final[Any] = str | list[ContentPart] | None


class TokenIds(list[int]):
    """Token ids whose types are known to be right: converting millions takes long."""


class TokenLists(list[TokenIds]):
    """Several of them."""


class _Turns:
    """Gives the event loop its turn after every slice of work."""

    def __init__(self) -> None:
        self._bytes = self._fields = 0

    async def did(self, n_bytes: int) -> None:
        self._bytes += n_bytes
        self._fields += 1
        if self._bytes >= _SLICE_BYTES or self._fields >= _SLICE_FIELDS:
            self._bytes = self._fields = 0
            await asyncio.sleep(0)


async def read_object(
    raw: bytes, context_tokens: int, kind: type[msgspec.Struct]
) -> dict[str, Any]:
    """Return the JSON object in `raw`, as `schema.decode_object` does.

    Args:
        raw: the body.
        context_tokens: the most ids of a prompt.
        kind: what the endpoint makes of it; to others its prompt, messages or tokens are a field
            like any that nobody knows.

    Raises:
        ApiError: 400 when it is not JSON, or no object; when a field is too large, or of a type
            that it cannot have; when a prompt has more than `context_tokens` ids.
    """
    if raw.startswith(codecs.BOM_UTF8):  # which Windows' tools write before a file's text
        raw = raw[len(codecs.BOM_UTF8) :]
    if len(raw) <= SMALL_BODY_BYTES:
        return decode_object(raw)
    if await _is_more(raw, b'"', 2 * MAX_STRINGS, but_not=b'\\"'):
        raise bad_request(None, f"the body has more than {MAX_STRINGS} strings", "body_too_large")
    await asyncio.sleep(0)
    fields = decode_object(raw, dict[str, msgspec.Raw])
    await asyncio.sleep(0)
    if len(fields) > MAX_FIELDS:
        raise bad_request(None, f"the body has more than {MAX_FIELDS} fields", "body_too_large")
    value: dict[str, Any] = {}
    turns, n_other_bytes = _Turns(), 0
    for name, field in fields.items():
        data = memoryview(field).tobytes()
        large = name if name in kind.__struct_fields__ else ""
        if large == "prompt":
            value[name] = await _prompt(data, context_tokens)
        elif large == "messages":
            value[name] = await _messages(data)
        elif large == "tokens":
            value[name] = await _ids(name, data, context_tokens)
        else:
            n_other_bytes += len(data)
            _check_size(name[:40], len(data), n_other_bytes)
            value[name] = decode_as(data, Any, name[:40])
        await turns.did(len(data))
    return value


def too_many_tokens(name: str, context_tokens: int) -> ApiError:
    """Return the answer to a prompt that is longer than any context."""
    return context_exceeded(name, context_tokens, f"{name} has more")


def _check_size(name: str, n_bytes: int, n_other_bytes: int) -> None:
    if n_bytes > MAX_FIELD_BYTES:
        message = f"{name} has {n_bytes} bytes: the most is {MAX_FIELD_BYTES}"
        raise bad_request(name, message, "field_too_large")
    if n_other_bytes > 4 * MAX_FIELD_BYTES:
        message = f"{name} and the fields before it have more than {4 * MAX_FIELD_BYTES} bytes"
        raise bad_request(name, message, "field_too_large")


async def _prompt(data: bytes, context_tokens: int) -> Any:
    if _IDS.match(data):
        return await _ids("prompt", data, context_tokens)
    if _LISTS.match(data):
        return await _lists(data, context_tokens)
    return decode_as(data, _TEXTS, "prompt")


async def _ids(name: str, data: bytes, context_tokens: int) -> Any:
    if await _is_more(data, b",", context_tokens):
        raise too_many_tokens(name, context_tokens)
    if len(data) <= _SLICE_BYTES or not data.startswith(b"["):
        found = decode_as(data, _TOKENS, name)
        return None if found is None else TokenIds(found)
    return await _sliced_ids(name, data)


async def _sliced_ids(name: str, data: bytes) -> TokenIds:
    """Decode a list, which is known to be JSON, by parts that end at a comma: between ids, unless
    there is something else, which is an error anyhow.
    """
    found = TokenIds()
    start, end = 1, data.rindex(b"]")
    while start < end:
        comma = data.find(b",", start + _SLICE_BYTES, end)
        stop = end if comma < 0 else comma
        part = f"{name}[{len(found)}:]" if found else name
        found += decode_as(b"[%b]" % data[start:stop], list[int], part)
        start = stop + 1
        await asyncio.sleep(0)
    return found


async def _lists(data: bytes, context_tokens: int) -> TokenLists:
    if await _is_more(data, b"[", MAX_PROMPTS + 1):
        raise bad_request("prompt", f"prompt has more than {MAX_PROMPTS} lists")
    found = TokenLists()
    for i, item in enumerate(decode_as(data, list[msgspec.Raw], "prompt")):
        ids = memoryview(item).tobytes()
        if await _is_more(ids, b",", context_tokens):
            raise too_many_tokens("prompt", context_tokens)
        name = f"prompt[{i}]"
        if len(ids) > _SLICE_BYTES and ids.startswith(b"["):
            found.append(await _sliced_ids(name, ids))
        else:
            found.append(TokenIds(decode_as(ids, list[int], name)))
        await asyncio.sleep(0)
    return found


async def _messages(data: bytes) -> Any:
    """Decode what messages may have; those of a wrong shape end it at the first that is."""
    shaped = decode_as(data, _SHAPE, "messages")
    if shaped is None:
        return None
    if len(shaped) > MAX_MESSAGES:
        raise bad_request("messages", f"messages: there are more than {MAX_MESSAGES}")
    await asyncio.sleep(0)
    found, turns, n_other_bytes = [], _Turns(), 0
    for i, message in enumerate(decode_as(data, list[dict[str, msgspec.Raw]], "messages")):
        turn: dict[str, Any] = {}
        for name, field in message.items():
            path, raw = f"messages[{i}].{name[:40]}", memoryview(field).tobytes()
            if name == "content":
                turn[name] = msgspec.to_builtins(decode_as(raw, _CONTENT, path))
            else:
                n_other_bytes += len(raw)
                _check_size(path, len(raw), n_other_bytes)
                turn[name] = decode_as(raw, Any, path)
            await turns.did(len(raw))
        found.append(turn)
    return found


async def _is_more(data: bytes, mark: bytes, most: int, but_not: bytes = b"") -> bool:
    """Whether `mark` occurs more than `most` times; looks no further than that, and gives the event
    loop its turn after each window.
    """
    found = 0
    for start in range(0, len(data), _WINDOW_BYTES):
        if start:
            await asyncio.sleep(0)
        end = start + _WINDOW_BYTES
        found += data.count(mark, start, end)
        if but_not:
            found -= data.count(but_not, start, end)
        if found > most:
            return True
    return False
