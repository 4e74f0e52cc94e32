"""Every number that a msgspec structure can hold, at the edges of float32 and of integers.

Fields come from the type itself, so a field that is added to it is covered by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec

TINY, HUGE = 2.0**-126, (2 - 2**-23) * 2.0**127
"""Float32's smallest normal and its largest number."""
_FRACTIONS = (
    5e-324, 1e-50, 2.0**-150, 2.0**-149, 1e-40, math.nextafter(TINY, 0), TINY, 2e-38, 1e-30, 1e-5,
    1e-3, 0.5, math.nextafter(1.0, 0), 1.0, math.nextafter(1.0, 2), 2.0, math.nextafter(2.0, 3),
    10.0, 100.0, 1e30, HUGE, math.nextafter(HUGE, math.inf), 1e39, 1.7e308,
)  # fmt: skip
FLOATS = (0.0, *_FRACTIONS, -0.0, *(-value for value in _FRACTIONS))
NOT_FINITE = (math.nan, math.inf, -math.inf)
_SIZES = (1, 2, 5, 6, 64, 65, 127, 128, 255, 256, 1 << 15, 1 << 16, 1 << 24)
_LIMITS = tuple((1 << bits) + by for bits in (31, 32, 53, 63) for by in (-1, 0, 1))
INTEGERS = (0, *_SIZES, *_LIMITS, (1 << 64) - 1, *(-n for n in (1, 2, 1 << 31, (1 << 63) - 1)))
BEYOND_64_BITS = (1 << 64, -(1 << 63) - 1, 10**30)


class NumericField(NamedTuple):
    """One place for a number.

    Attributes:
        path: names from the structure to the field, inner ones behind dots.
        is_integer: whether its type takes integers only.
        place: the field of the structure and what it becomes for a number.
    """

    path: str
    is_integer: bool
    place: Callable[[Any], tuple[str, Any]]


def numeric_fields(kind: Any, item_key: str = "7") -> list[NumericField]:
    """Return every place of `kind` for a number; `item_key` is the key of those in maps."""
    found = []
    for field in msgspec.inspect.type_info(kind).fields:
        for path, is_integer, make in _numbers(field.type, item_key):
            name = field.name
            found.append(NumericField(f"{name}{path}", is_integer, _placing(name, make)))
    return found


def _placing(name: str, make: Callable[[Any], Any]) -> Callable[[Any], tuple[str, Any]]:
    return lambda value: (name, make(value))


_Place = tuple[str, bool, Callable[[Any], Any]]


def _numbers(kind: Any, item_key: str) -> Iterator[_Place]:
    inspect = msgspec.inspect
    match kind:
        case inspect.IntType():
            yield "", True, lambda value: value
        case inspect.FloatType():
            yield "", False, lambda value: value
        case inspect.UnionType():
            for each in kind.types:
                yield from _numbers(each, item_key)
        case inspect.ListType() | inspect.VarTupleType():
            yield from _inside(kind.item_type, "[]", lambda value: [value], item_key)
        case inspect.DictType():
            yield from _inside(kind.value_type, "[]", lambda value: {item_key: value}, item_key)
        case inspect.TupleType():
            size = len(kind.item_types)
            for at, item in enumerate(kind.item_types):
                yield from _inside(item, f"[{at}]", _in_tuple(at, size), item_key)
        case inspect.StructType():
            for field in kind.fields:
                yield from _inside(field.type, f".{field.name}", _in_field(field.name), item_key)


def _inside(kind: Any, step: str, wrap: Callable[[Any], Any], item_key: str) -> Iterator[_Place]:
    for path, is_integer, make in _numbers(kind, item_key):
        yield f"{step}{path}", is_integer, lambda value, make=make: wrap(make(value))


def _in_field(name: str) -> Callable[[Any], Any]:
    return lambda value: {name: value}


def _in_tuple(at: int, size: int) -> Callable[[Any], Any]:
    return lambda value: [value if index == at else 1 for index in range(size)]
