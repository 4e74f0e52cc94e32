"""What a person is told about a configuration that cannot be read: field, value, and what fits.

Pure. Turns msgspec's path and type into the words of the file (`engine.max_running is 0: ...`), and
a socket's refusal into what to do about it.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
import types
import typing
from typing import Any

import msgspec

_ERROR = re.compile(r"^(?P<what>.*?)(?: - at `\$(?P<path>[^`]*)`)?$", re.DOTALL)
_STEP = re.compile(r"\.(?P<name>\w+)|\[(?P<index>\d+)\]")
_UNKNOWN = re.compile(r"unknown field `(?P<name>[^`]*)`")
_MISSING = re.compile(r"missing required field `(?P<name>[^`]*)`")
_MOST_SHOWN = 80
_UNKNOWN_NAME = "no address is known by that name; give one of this machine's, or * for all"
_LISTEN_HINTS = {
    errno.EADDRINUSE: "end the process that has it (`ss -ltnp` names it), or choose another port",
    errno.EADDRNOTAVAIL: "this machine has no such address; * is every one that it has",
    errno.EACCES: "ports below 1024 need a privilege; choose a higher one",
}


def explain(error: msgspec.ValidationError, document: Any, kind: type) -> str:
    """Return a sentence that names the field, its value, and what it may be.

    Args:
        error: why `document` is no `kind`.
        document: the file, decoded without types.
        kind: the struct that it should be.
    """
    match = _ERROR.match(str(error))
    assert match is not None, "the pattern takes any text"
    what, path = match["what"], match["path"] or ""
    steps = [step["name"] or int(step["index"]) for step in _STEP.finditer(path)]
    names = _field_names(_kind_at(kind, steps))
    place = path.removeprefix(".")
    if unknown := _UNKNOWN.search(what):
        field = _joined(place, unknown["name"])
        close = difflib.get_close_matches(unknown["name"], names, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"it is one of {', '.join(names)}"
        return f"{field} is no field: {hint}"
    if missing := _MISSING.search(what):
        return f"{_joined(place, missing['name'])} is missing: it has no default"
    if not place:
        is_mapping = isinstance(document, dict)
        return (
            what if is_mapping else f"it must hold {', '.join(names)}, not {_shown(document, [])}"
        )
    choices = typing.get_args(_kind_at(kind, steps))
    if what.startswith("Invalid enum value"):
        what = f"it must be one of {', '.join(map(repr, choices))}"
    return f"{place} is {_shown(document, steps)}: {what[0].lower()}{what[1:]}"


def cannot_listen(field: str, address: str, number: int | None) -> str:
    """Return a sentence for an address that cannot be listened on, for the reason `number`
    (an errno, or what getaddrinfo failed with), with what to do.
    """
    number = number or errno.EINVAL
    if number < 0:  # of getaddrinfo, which Python has no words for
        return f"{field}: cannot listen on {address}: {_UNKNOWN_NAME}"
    hint = _LISTEN_HINTS.get(number, "")
    return f"{field}: cannot listen on {address}: {os.strerror(number)}{hint and f'; {hint}'}"


def bad_bind(field: str, bind: str) -> str:
    """Return a sentence for what is no endpoint that a ZeroMQ socket listens on."""
    return f"{field} is {bind!r}: it must be tcp://host:port, an IPv6 address in brackets"


def _joined(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


def _kind_at(kind: Any, steps: list[str | int]) -> Any:
    """Return the type of the field that `steps` lead to, None where that has no one answer."""
    for step in steps:
        fields = {field.name: field.type for field in _fields(kind)}
        kind = fields.get(str(step))
    return kind


def _fields(kind: Any) -> tuple[msgspec.structs.FieldInfo, ...]:
    """Return the fields of a section, also of one that may be left out."""
    if typing.get_origin(kind) is types.UnionType:
        kind = next((part for part in typing.get_args(kind) if part is not types.NoneType), None)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return msgspec.structs.fields(kind)
    return ()


def _field_names(kind: Any) -> list[str]:
    return [field.encode_name for field in _fields(kind)]


def _shown(document: Any, steps: list[str | int]) -> str:
    try:
        for step in steps:
            document = document[step]
    except (LookupError, TypeError):
        return "wrong"
    text = repr(document)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
