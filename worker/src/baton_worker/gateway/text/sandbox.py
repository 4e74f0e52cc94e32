"""Where a template of a model's folder runs: it reaches nothing, changes nothing, and ends.

Jinja's immutable sandbox keeps a template from what it was not given. It does not keep one from
loops without end, nor from texts that double until memory is full. So everything that costs more
than a moment is charged to one budget of a rendering: turns of loops, calls, and what filters,
slices, comparisons and outputs look at. No clock is read: what is refused once is refused always.
Knows nothing of messages and tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, Final

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from baton_worker.gateway.text.counted_nodes import Counted
from baton_worker.gateway.text.format_size import FormatSize, brace_format, percent_format
from baton_worker.gateway.text.one_call_bounds import (
    check_filter,
    check_method,
    check_operation,
    deepest_indent,
    times_looked_at,
)

STEPS: Final = 1 << 17
"""Of one rendering, some tenths of a second's."""
STEPS_OF_INPUT: Final = 16
"""As many more for each step that it takes to look once at all that a template is given."""
_STEPS_OF_MACRO: Final = 4
_UNBOUNDED: Final = 1 << 62
_CHARACTERS_BITS: Final = 6
"""64 characters, or items of a list, are looked at in one step."""
_NUMBER_BITS: Final = 8
"""As 64 digits have them."""
_CHEAP: Final = frozenset({"attr", "count", "d", "default", "first", "last", "length"})
"""Filters that take as long for a long list as for a short one."""
_QUADRATIC: Final = ("urlize", "wordwrap")
"""Filters that take the square of a text's length, and that no chat needs."""
_OF_JINJA: Final = frozenset({"_loop_vars", "_block_vars"})
"""What it tells with each call of the block that the call stands in."""
_SHALLOW: Final = frozenset({
    "batch", "items", "list", "map", "reject", "rejectattr", "reverse", "select", "selectattr",
    "slice",
})  # fmt: skip
"""Those that look at a list's items, and not into them."""
_COMPARING: Final = frozenset({
    "<", "<=", ">", ">=", "ge", "greaterthan", "gt", "in", "le", "lessthan", "lower", "lt", "upper",
})  # fmt: skip
"""Tests that look at whole values."""
_EQUALITY: Final = frozenset({"!=", "==", "eq", "equalto", "ne"})


class TooMuchWorkError(ValueError):
    """A rendering has used its budget, or asked for something huge in one go."""


class _Budget:
    __slots__ = ("given", "left")

    def __init__(self) -> None:
        self.given = self.left = _UNBOUNDED


class GenerationTag(Extension):
    """`{% generation %}`, which marks for training what the model says: its text, and no more."""

    tags = {"generation"}  # noqa: RUF012 - the base class's type

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return what stands between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """The environment of chat templates, with whitespace as transformers has it."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", GenerationTag],
        )
        self._budget: ContextVar[_Budget | None] = ContextVar("budget", default=None)
        self.globals.pop("lipsum")
        for name in _QUADRATIC:
            self.filters.pop(name)
        for name, function in list(self.filters.items()):
            self.add_filter(name, function)
        self.add_filter("counted", _same)
        tests: dict[str, Any] = self.tests
        for name in _COMPARING:
            tests[name] = _after(self.weigh_all, tests[name])
        for name in _EQUALITY:
            tests[name] = _after(self.weigh_equality, tests[name])
        self.finalize = self.count_shown

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        """Let templates use a filter, at a charge."""
        self.filters[name] = self._charged(name, function)

    @contextmanager
    def bounded(self, values: Mapping[str, Any]) -> Iterator[None]:
        """Give what is rendered within a budget of its own, by the size of what it is given."""
        budget = _Budget()
        token = self._budget.set(budget)
        try:
            self.weigh(values)
            budget.given = STEPS + STEPS_OF_INPUT * (_UNBOUNDED - budget.left)
            budget.left = budget.given
            yield
        finally:
            self._budget.reset(token)

    def charge(self, steps: int) -> None:
        """Take steps from the budget.

        Raises:
            TooMuchWorkError: it is used up.
        """
        budget = self._budget.get()
        if budget is None:
            return
        budget.left -= steps
        if budget.left < 0:
            raise TooMuchWorkError(f"it takes more than {budget.given} steps for these messages")

    def weigh(self, value: Any, times: int = 1) -> None:
        """Charge for all that a value holds, as often as it holds it: what shows or compares it
        looks at that much, and some do so several times.
        """
        if isinstance(value, str):
            self.charge(times * (len(value) >> _CHARACTERS_BITS))
        elif isinstance(value, int):
            self.charge(times * (value.bit_length() >> _NUMBER_BITS))
        elif isinstance(value, Namespace):
            self.weigh(value._Namespace__attrs, times)
        elif isinstance(value, Mapping):
            self.charge(times * (1 + len(value)))
            for name, item in value.items():
                self.weigh(name, times)
                self.weigh(item, times)
        elif isinstance(value, Collection):
            self.charge(times * (1 + len(value)))
            for item in value if not isinstance(value, range) else ():
                self.weigh(item, times)

    def weigh_all(self, *values: Any) -> None:
        """Charge for several values."""
        self.weigh(values)

    def weigh_equality(self, left: Any, right: Any) -> None:
        """Charge for a comparison of two values: what identity, kind or length decides is free, and
        what one of them has alone is not looked at.
        """
        if isinstance(left, str):
            if isinstance(right, str) and len(left) == len(right):
                self.weigh(left)
        elif isinstance(left, Mapping):
            if isinstance(right, Mapping) and len(left) == len(right):
                names = left.keys() & right.keys()
                self._weigh_pairs(len(left), ((left[name], right[name]) for name in names))
        elif isinstance(left, list | tuple):
            if isinstance(right, list | tuple):
                self._weigh_pairs(len(left), zip(left, right, strict=False))
        else:
            self.weigh(left)

    def count_turn(self, constant_characters: int) -> bool:
        """Charge for one turn of a loop whose body has that much constant text."""
        self.charge(1 + (constant_characters >> _CHARACTERS_BITS))
        return True

    def count_shown(self, value: Any) -> Any:
        """Charge for an output."""
        self.weigh(value)
        return value

    def equal(self, left: Any, right: Any) -> bool:
        """Return `left == right`."""
        self.weigh_equality(left, right)
        return bool(left == right)

    def joined(self, *values: Any) -> str:
        """Return what `~` makes of values."""
        for value in values:
            self.weigh(value)
        return "".join(map(str, values))

    def part(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        """Return a slice."""
        found = value[start:stop:step]
        self._charge_size(found)
        return found

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call for a template."""
        if getattr(__obj, "__self__", None) is __self:
            return __obj(*args)  # what else Jinja tells is of the loop that the call stands in
        if isinstance(__obj, Macro):  # what it does is counted where it does it
            __self.charge(_STEPS_OF_MACRO)
        else:
            if getattr(__obj, "__name__", "") == "join":
                args = tuple(map(_held, args))
            __self._count_call(__obj, args, kwargs)
        found = super().call(__context, __obj, *args, **kwargs)
        __self._charge_size(found)
        return found

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return what stands for a text's method `format`, None for other values."""
        made = super().wrap_str_format(value)
        if made is None:
            return None

        @wraps(made)
        def counted(*args: Any, **kwargs: Any) -> str:
            self._charge_format(brace_format(value.__self__), (args, kwargs))
            return made(*args, **kwargs)

        return counted

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute for a template."""
        check_operation(operator, left, right)
        if operator == "%" and isinstance(left, str):
            self._charge_format(percent_format(left), right)
        found = super().call_binop(context, operator, left, right)
        self._charge_size(found)
        return found

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = Counted(self).visit(super()._parse(source, name, filename))
        return tree

    def _count_call(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        given = {name: value for name, value in kwargs.items() if name not in _OF_JINJA}
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str | list | tuple):
            self.weigh(owner, times_looked_at(function.__name__, args, given))
        self.weigh(args)
        self.weigh(given)  # and one step at least for each
        check_method(function, args, given)

    def _charge_size(self, value: Any) -> None:
        if isinstance(value, str | list | tuple | dict):
            self.charge(len(value) >> _CHARACTERS_BITS)

    def _weigh_pairs(self, most: int, pairs: Iterable[tuple[Any, Any]]) -> None:
        self.charge(1 + most)
        for left, right in pairs:
            if left is not right:
                self.weigh_equality(left, right)

    def _charge_format(self, size: FormatSize, given: Any) -> None:
        """Charge as if each field showed all that the format is given."""
        self.charge(size.characters >> _CHARACTERS_BITS)
        self._weigh_again(given, size.fields)

    def _weigh_again(self, value: Any, times: int) -> None:
        if times:
            self.weigh(value, times)

    def _charged(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a filter that charges for what it is given and what it returns."""
        first = 1 if hasattr(function, "jinja_pass_arg") else 0

        @wraps(function)
        def charged(*args: Any, **kwargs: Any) -> Any:
            given, others = list(args), args[first + 1 :]
            if name not in _CHEAP:
                self.weigh([*others, *kwargs.values()])
                times = times_looked_at(name, others, kwargs)
                given[first] = self._counted(given[first], times, is_shallow=name in _SHALLOW)
            if name == "tojson":
                indent = deepest_indent(given[first], others, kwargs)
                self._weigh_again(given[first], indent >> _CHARACTERS_BITS)
            if name == "join":
                given[first] = _held(given[first])
            check_filter(name, given[first], others, kwargs)
            if name == "format":
                self._charge_format(percent_format(str(given[first])), kwargs or others)
            found = function(*given, **kwargs)
            self._charge_size(found)
            return self._items(found) if hasattr(found, "__next__") else found

        return charged

    def _counted(self, value: Any, times: int, *, is_shallow: bool) -> Any:
        """Return a filter's input, charged for; an iterator is charged for when it runs."""
        self.charge(1)
        if isinstance(value, LoopContext):  # the one that no filter made
            return self._items(value)
        if is_shallow and isinstance(value, list | tuple | dict):
            self.charge(len(value))
        else:
            self.weigh(value, times)
        return value

    def _items(self, items: Iterator[Any]) -> Iterator[Any]:
        for item in items:
            self.charge(1)
            self.weigh(item)
            yield item


def _same(value: Any) -> Any:
    return value


def _held(value: Any) -> Any:
    """Return a value whose length is known."""
    return list(value) if hasattr(value, "__next__") else value


def _after(count: Callable[..., None], test: Callable[..., Any]) -> Callable[..., bool]:
    """Return a test that is counted before it is made."""

    @wraps(test)
    def counted(*values: Any) -> bool:
        count(*values)
        return bool(test(*values))

    return counted
