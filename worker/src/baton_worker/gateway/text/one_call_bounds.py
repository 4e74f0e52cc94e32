"""What one call of a template may ask for: nothing whose result would be huge.

A budget that is charged for results comes too late for a text of a terabyte. So what makes much
of little is looked at before it runs. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

MAX_CHARACTERS: Final = 1 << 24
"""Of a text, or items of a list, that one call makes."""
_MAX_NUMBER: Final = 1 << 16
"""Of a width, a count or a precision."""
_MAX_INDENT: Final = 16
_MAX_INTEGER_BITS: Final = 4096
_REFUSED: Final = frozenset({"encode", "expandtabs", "maketrans", "to_bytes", "translate"})
"""Methods of texts and numbers that no template needs."""
_MAKING_MUCH: Final = frozenset({
    "batch", "center", "ljust", "rjust", "round", "slice", "zfill",
})  # fmt: skip
"""What makes as much as a number says."""


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
    if isinstance(owner, str | int | float):
        _refuse_if(name in _REFUSED, f"the method {name}")
        _check_call(name, owner, args, kwargs)
        if name == "join" and args:
            _check_join(owner, args[0])


def check_filter(name: str, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a filter whose result would be huge.

    Raises:
        HugeResultError: it would be.
    """
    _check_call(name, value, args, kwargs)
    if name == "join":
        _check_join(args[0] if args else kwargs.get("d", ""), value)
    if name == "sum":
        start = args[1] if len(args) > 1 else kwargs.get("start", 0)
        _refuse_if(not isinstance(start, int | float), "the filter sum of other than numbers")
    if name in ("indent", "tojson"):
        widths = [*args, *kwargs.values()]
        deep = [width for width in widths if isinstance(width, int) and width > _MAX_INDENT]
        _refuse_if(bool(deep), f"the filter {name} with an indent above {_MAX_INDENT}")


def _check_call(name: str, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    given = [*args, *kwargs.values()]
    if name in _MAKING_MUCH:
        wide = any(isinstance(item, int) and abs(item) > _MAX_NUMBER for item in given)
        _refuse_if(wide, f"{name} with a number above {_MAX_NUMBER}")
    if name == "indent" and isinstance(value, str):
        width = max((len(item) for item in given if isinstance(item, str)), default=0)
        _check_size(name, value.count("\n") * width)
    if name == "replace" and isinstance(value, str) and len(args) > 1:
        old, new = str(args[0]), str(args[1])
        _check_size(name, len(value) + value.count(old) * len(new))


def _check_join(separator: Any, items: Any) -> None:
    if isinstance(items, list | tuple | dict | str):
        texts = sum(len(item) for item in items if isinstance(item, str))
        _check_size("join", texts + len(items) * len(str(separator)))


def _check_size(what: str, size: int) -> None:
    _refuse_if(size > MAX_CHARACTERS, f"{what} that makes {size} characters or items")


def _refuse_if(is_huge: bool, what: str) -> None:
    if is_huge:
        raise HugeResultError(f"{what} is too much for a chat template")
