"""What the GPU engine's page is made of: a run's records by kind, goals, tables, numbers as words.

Owns how a number is told and when a goal is met. Knows no file and no section of the page.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Record = Mapping[str, Any]


def ms(us: float) -> str:
    """Return microseconds as milliseconds."""
    return f"{us / 1e3:.2f}"


def share(value: float) -> str:
    """Return a share in percent."""
    return f"{100 * value:.1f} %"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)])


class Goal(NamedTuple):
    """Something that was to be reached.

    `subject` is whose words say what bounds it; `unit`: "share" of one, "ratio" or a unit's name;
    `least`: more is better.
    """

    name: str
    subject: str
    value: float
    goal: float
    unit: str
    least: bool

    @property
    def met(self) -> bool:
        """Whether it is reached."""
        return self.value >= self.goal if self.least else self.value <= self.goal

    @property
    def verdict(self) -> str:
        """The goal itself and whether it is met, for a cell."""
        return f"{self.told(self.goal)}: {'met' if self.met else 'missed'}"

    @property
    def by(self) -> str:
        """How far from the goal the value is, on whichever side."""
        apart = abs(self.value - self.goal)
        if self.unit == "share":
            return f"{100 * apart:.2f} points"
        return f"{self.told(apart)}, {share(apart / self.goal)}"

    def told(self, value: float) -> str:
        """Return a value in the goal's unit."""
        if self.unit == "share":
            return share(value)
        if self.unit == "ms":
            return f"{value:.2f} ms"
        return f"{value:.2f}" if self.unit == "ratio" else f"{value:.0f} {self.unit}"


@dataclass
class Run:
    """A run's records, the gateway's beside them, and the goals that its sections came upon."""

    record: Record
    gateways: Sequence[Record] = ()
    goals: list[Goal] = field(default_factory=list)

    def steps(self, kind: str) -> list[Record]:
        """Return the steps of a kind that were measured."""
        return [s for s in self.record["steps"] if s["kind"] == kind and "error" not in s]

    def theirs(self, batch: int, rows: int, context: int) -> float | None:
        """Return PyTorch's microseconds at a shape."""
        for one in self.record.get("baselines") or ():
            if (one["batch"], one["rows"], one["context"]) == (batch, rows, context):
                return one.get("us")
        return None

    def held(self, goal: Goal) -> str:
        """Note a goal, and return its verdict."""
        self.goals.append(goal)
        return goal.verdict

    def failed(self) -> list[str]:
        """Return a line for everything that was not measured."""
        steps, baselines, phases = (
            self.record.get(n) or () for n in ("steps", "baselines", "phases")
        )
        others = (self.record.get("transformers") or {}).get("phases", ())

        def told(what: str, s: Record) -> str:
            overlap = f", overlap {'on' if s['overlap'] else 'off'}" if "overlap" in s else ""
            return f"{what.format(**s)}{overlap}: {s['error']}"

        kinds = (
            ("{kind}, batch {batch}, {context} tokens of context", steps),
            ("PyTorch's step, batch {batch}, {rows} rows each", baselines),
            ("the loop, {rows} requests, K = {k}, logprobs {top}", phases),
            ("transformers, {attention}, requests: {rows}", others),
        )
        found = [told(what, s) for what, some in kinds for s in some if "error" in s]
        return [*found, *self.record.get("unmeasured", ())]
