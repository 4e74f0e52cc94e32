"""What one call of a template may ask for: nothing whose result would be huge.

A budget that is charged for results comes too late for a text of a terabyte. So what makes much
of little is looked at before it runs. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

MAX_CHARACTERS: Final = 1 << 24
"""Of a text, or items of a list, that one call makes."""
_MAX_NUMBER: Final = 1 << 16
"""Of a width, a count or a precision."""
_MAX_INDENT: Final = 16
"""Of an indent as a number or as a text, and of a separator of JSON."""
_MAX_DIGITS: Final = 4096
_MAX_INTEGER_BITS: Final = 4096
_REFUSED: Final = frozenset({
    "encode", "expandtabs", "from_bytes", "maketrans", "to_bytes", "translate",
})  # fmt: skip
"""Methods of texts and numbers that no template needs."""
_MAKING_MUCH: Final = frozenset({
    "batch", "center", "ljust", "rjust", "round", "slice", "zfill",
})  # fmt: skip
"""What makes as much as a number says."""
_TRYING_EACH_PLACE: Final = frozenset({
    "lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip", "trim",
})  # fmt: skip
"""What looks at all of an argument for each character of a text."""
_SHORT_ARGUMENT_BITS: Final = 4
"""That takes no longer for 16 characters than for one."""


class HugeResultError(ValueError):
    """A call would make too much in one go."""


def check_operation(operator: str, left: Any, right: Any) -> None:
    """Refuse `left operator right` when its result would be huge.

    Raises:
        HugeResultError: it would be.
    """
    if operator == "*":
        for sized, times in ((left, right), (right, left)):
            if isinstance(sized, str | list | tuple) and isinstance(times, int):
                _check_size("*", len(sized) * times)
    if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length()
        bits = bits + right.bit_length() if operator == "*" else bits * max(right, 1)
        _refuse_if(bits > _MAX_INTEGER_BITS, f"{operator} of numbers that large")


def check_method(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a method of a text or number whose result would be huge.

    Raises:
        HugeResultError: it would be, or it is one that no template needs.
    """
    owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    if isinstance(owner, str | int | float | type):
        _refuse_if(name in _REFUSED, f"the method {name}")
        _check_call(name, owner, args, kwargs)
        if name == "join" and args:
            _check_join(owner, args[0])


def times_looked_at(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Return how often a method or filter goes through a text."""
    if name not in _TRYING_EACH_PLACE:
        return 1
    texts = (item for item in (*args, *kwargs.values()) if isinstance(item, str))
    return 1 + (max(map(len, texts), default=0) >> _SHORT_ARGUMENT_BITS)


def check_filter(name: str, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a filter whose result would be huge.

    Raises:
        HugeResultError: it would be.
    """
    _check_call(name, value, args, kwargs)
    if name == "join":
        _check_join(_given(0, "d", "", args, kwargs), value)
    if name == "int" and isinstance(value, str):
        _refuse_if(len(value) > _MAX_DIGITS, f"a number of more than {_MAX_DIGITS} digits")
    if name == "sum":
        start = _given(1, "start", 0, args, kwargs)
        _refuse_if(not isinstance(start, int | float), "the filter sum of other than numbers")
    if name in ("indent", "tojson"):
        widths = [*args, *kwargs.values()]
        separators = [text for item in widths if isinstance(item, tuple | list) for text in item]
        wide = any(_width(item) > _MAX_INDENT for item in (*widths, *separators))
        _refuse_if(wide, f"the filter {name} with an indent or separator above {_MAX_INDENT}")


def deepest_indent(value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Return the most characters that `tojson` puts before what a value holds, 0 where it is not
    told to.
    """
    width = _width(_given(1, "indent", 0, args, kwargs))
    return width * _depth(value) if width > 0 else 0


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level:
        depth += 1
        level = [item for outer in level for item in _inner(outer)]
    return depth


def _inner(value: Any) -> Collection[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple) else ()


def _check_call(name: str, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    given = [*args, *kwargs.values()]
    if name in _MAKING_MUCH:
        wide = any(isinstance(item, int) and abs(item) > _MAX_NUMBER for item in given)
        _refuse_if(wide, f"{name} with a number above {_MAX_NUMBER}")
    if name == "replace":
        text, old, new = (
            str(item)
            for item in (
                value,
                _given(0, "old", "", args, kwargs),
                _given(1, "new", "", args, kwargs),
            )
        )
        _check_size(name, len(text) + text.count(old) * len(new))


def _check_join(separator: Any, items: Any) -> None:
    if isinstance(items, Collection):
        texts = sum(len(item) for item in items if isinstance(item, str))
        _check_size("join", texts + len(items) * len(str(separator)))


def _given(
    place: int, name: str, default: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Return an argument, given by its place or by its name."""
    return args[place] if len(args) > place else kwargs.get(name, default)


def _width(indent: Any) -> int:
    if isinstance(indent, str):
        return len(indent)
    return indent if isinstance(indent, int) else 0


def _check_size(what: str, size: int) -> None:
    _refuse_if(size > MAX_CHARACTERS, f"{what} that makes {size} characters or items")


def _refuse_if(is_huge: bool, what: str) -> None:
    if is_huge:
        raise HugeResultError(f"{what} is too much for a chat template")
