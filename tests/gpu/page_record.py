"""What the GPU engine's page needs of the benchmarks' JSON, and what of it is missing or wrong.

Owns names and kinds of fields, so that a file that was cut, edited or put together wrongly is
refused by the name of the field and not half told. Knows nothing of how the page tells them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

Problems = Iterator[str]
Check = Callable[[str, Any], Problems]
Fields = Mapping[str, Check]
NONE: Fields = MappingProxyType({})


class Field(NamedTuple):
    """One value: what it should be, and whether it is."""

    what: str
    holds: Callable[[Any], bool]

    def __call__(self, name: str, value: Any) -> Problems:
        """Yield what is wrong."""
        if not self.holds(value):
            yield f"{name}: {value!r} is not {self.what}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


TEXT = Field("a text", lambda value: isinstance(value, str))
BOOL = Field("true or false", lambda value: isinstance(value, bool))
WHOLE = Field("a whole number", lambda value: isinstance(value, int) and _is_number(value))
ABOVE = Field("a number above 0", lambda value: _is_number(value) and value > 0)
LEAST = Field("a number of at least 0", lambda value: _is_number(value) and value >= 0)


def one_of(*known: object) -> Field:
    """Return a check of a value that the page has words for."""
    return Field(f"one of {', '.join(map(str, known))}", lambda value: value in known)


class Group(NamedTuple):
    """An object: fields that it must have, and those that it may have."""

    fields: Fields
    optional: Fields = NONE

    def __call__(self, name: str, value: Any) -> Problems:
        """Yield what is wrong."""
        if not isinstance(value, dict):
            yield f"{name}: {value!r} is no object"
            return
        place = f"{name}." if name else ""
        for key, check in self.fields.items():
            if key in value:
                yield from check(f"{place}{key}", value[key])
            else:
                yield f"{place}{key} is missing"
        for key, check in self.optional.items():
            if value.get(key) is not None:
                yield from check(f"{place}{key}", value[key])


class Several(NamedTuple):
    """A list of one kind; `least` of them."""

    check: Check
    least: int = 0

    def __call__(self, name: str, value: Any) -> Problems:
        """Yield what is wrong."""
        if not isinstance(value, list) or len(value) < self.least:
            yield f"{name}: {value!r} is no list of at least {self.least}"
            return
        for place, one in enumerate(value):
            yield from self.check(f"{name}[{place}]", one)


class Measured(NamedTuple):
    """What was measured, or an error in the place of what it measures."""

    named: Fields
    measured: Fields
    optional: Fields = NONE

    def __call__(self, name: str, value: Any) -> Problems:
        """Yield what is wrong."""
        if isinstance(value, dict) and "error" in value:
            yield from Group({**self.named, "error": TEXT})(name, value)
        else:
            yield from Group({**self.named, **self.measured}, self.optional)(name, value)


KERNEL = Group({"name": TEXT, "launches": ABOVE, "us": LEAST})
OVER = Group({"median": ABOVE}, {"low": ABOVE, "high": ABOVE})
STEP = {"kind": TEXT, "batch": WHOLE, "context": WHOLE}
TIMES: Fields = {"us": ABOVE, "roof_us": ABOVE, "drafts": WHOLE, "makes_drafts": BOOL,
                 "choice": one_of("GREEDY", "SAMPLED", "PROCESSED"), "prefill": WHOLE}  # fmt: skip
OF_KIND: Mapping[str, Fields] = {
    "goal": {"eager_us": ABOVE},
    "prefill": {"tflops": ABOVE},
    "logprobs": {"top": one_of(-1, 0, 20)},
}


def step(name: str, value: Any) -> Problems:
    """Yield what is wrong with a step, of which the page tells by its kind."""
    kind = value.get("kind") if isinstance(value, dict) else None
    more = OF_KIND.get(kind, {}) if isinstance(kind, str) else {}
    optional = {"kernels": Several(KERNEL), "over": OVER}
    yield from Measured(STEP, {**TIMES, "top": WHOLE, **more}, optional)(name, value)


ROWS = Field("a whole number or null", lambda value: value is None or isinstance(value, int))
"""Null: their process ended, whatever their rows."""
SPEED = {"tokens_per_s": ABOVE, "step_ms": ABOVE}
LOOP = Measured(
    {"rows": WHOLE, "k": WHOLE, "top": WHOLE, "overlap": BOOL}, {**SPEED, "idle_share": LEAST}
)
THEIRS = Measured({"rows": ROWS, "attention": TEXT}, {"rows": WHOLE, **SPEED, "cuda_graphs": BOOL})
RUN = Group({"parts": TEXT, "commit": TEXT})
HEAD: Fields = {
    "machine": Group(dict.fromkeys(("gpu", "driver", "cuda", "torch"), TEXT)),
    "roof": Group({"read": ABOVE, "copy": ABOVE}),
    "repeats": WHOLE,
    "steps": Several(step, 1),
}
PARTS: Fields = {
    "baselines": Several(
        Measured({"batch": WHOLE, "rows": WHOLE}, {"context": WHOLE, "us": ABOVE})
    ),
    "phases": Several(LOOP),
    "transformers": Group({"phases": Several(THEIRS)}, {"version": TEXT}),
    "unmeasured": Several(TEXT),
    "runs": Several(RUN),
    "commit": TEXT,
}
GATEWAY = Group(
    {
        "model": TEXT,
        "drafts": WHOLE,
        "load": Group({"streams": WHOLE}),
        "summary": Several(
            Group(
                {"logprobs": WHOLE, "rounds": WHOLE, "engine": ABOVE, "gateway": ABOVE,
                 "ratio": ABOVE, "ratios": Several(ABOVE, 1)}
            ), 1,
        ),
    }
)  # fmt: skip


def problems(record: Any) -> list[str]:
    """Return what is wrong with bench_engine's JSON, parts that the page does not know too."""
    found = list(Group(HEAD, PARTS)("", record))
    if isinstance(record, dict):
        known = {*HEAD, *PARTS}
        found += [f"{name} is no part of the page" for name in record if name not in known]
        if not record.get("runs") and "commit" not in record:
            found.append("commit is missing")
    return found


def gateway_problems(record: Any) -> list[str]:
    """Return what is wrong with bench_gateway's JSON."""
    return list(GATEWAY("", record))
