"""How much a format makes of little, told before it is run: its fields, and how wide they are.

Only what is a field counts: the digits and braces around them are text. Pure.
"""

from __future__ import annotations

import re
from string import Formatter
from typing import Final, NamedTuple

_CONVERSION: Final = re.compile(
    r"%(?:\([^()]*+\))?+[-#0 +]*+(\*|[0-9]*+)(?:\.(\*|[0-9]*+))?+[hlL]?([a-zA-Z%])"
)
"""Width, precision and kind of a conversion by `%`."""
_NUMBER: Final = re.compile(r"\d+")


class FormatSizeError(ValueError):
    """A format has a width that stands elsewhere, or cannot be read."""


class FormatSize(NamedTuple):
    """What a format comes to, besides what it is given.

    Attributes:
        fields: those that show a value.
        characters: its own, and the widths and precisions of its fields.
    """

    fields: int
    characters: int


def percent_format(text: str) -> FormatSize:
    """Return the size of `text % ...`.

    Raises:
        FormatSizeError: see there.
    """
    fields, characters = 0, len(text)
    for width, precision, kind in _CONVERSION.findall(text):
        _refuse_if("*" in (width, precision))
        fields += kind != "%"
        characters += int(width or 0) + int(precision or 0)
    _refuse_if("%" in _CONVERSION.sub("", text))
    return FormatSize(fields, characters)


def brace_format(text: str) -> FormatSize:
    """Return the size of `text.format(...)`.

    Raises:
        FormatSizeError: see there.
        ValueError: it is no format.
    """
    fields, characters = 0, len(text)
    for _, name, form, _ in Formatter().parse(text):
        if name is not None:
            _refuse_if("{" in (form or ""))
            fields += 1
            characters += sum(map(int, _NUMBER.findall(form or "")))
    return FormatSize(fields, characters)


def _refuse_if(is_unread: bool) -> None:
    if is_unread:
        raise FormatSizeError(
            "a format must have its widths as numbers in it, and nothing unfinished"
        )
