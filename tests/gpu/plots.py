"""Draw the growth of step times as SVG, from the benchmark's JSON; needs nothing but Python.

    python tests/gpu/plots.py docs/benchmarks/results/gpu-engine-h200.json docs/images

Owns axes, lines and their names. Knows which of the benchmark's cases a picture shows.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 720, 420
LEFT, RIGHT, TOP, BOTTOM = 52, 184, 56, 52
COLOURS = ("#1f5fa8", "#c2571a", "#2c8a57", "#8a3fa0", "#7a6a00", "#555555")
GRID, INK = "#e4e4e4", "#333333"
LEGEND_ROW, LEGEND_LINE = 20, 22
FEW_TICKS = 5
"""Fewer than these on a logarithmic axis, and it gets those between too."""
POWERS = [2.0**n for n in range(-3, 12)]
BETWEEN = [1.5 * tick for tick in POWERS]

Style = Literal["solid", "hollow", "dashed"]
Case = Mapping[str, Any]


@dataclass(frozen=True)
class Line:
    """Points of one name and colour; hollow ones tell two lines of a colour apart, roofs are
    dashed. One without a name is not in the legend.
    """

    name: str
    points: Sequence[tuple[float, float]]
    colour: int
    style: Style = "solid"


@dataclass(frozen=True)
class Axis:
    """A logarithmic axis, or one from `low` on."""

    title: str
    ticks: Sequence[float]
    low: float
    high: float
    log: bool

    def share(self, value: float) -> float:
        """Return where a value lies, 0 to 1."""
        if not self.log:
            return (value - self.low) / (self.high - self.low)
        return math.log(value / self.low) / math.log(self.high / self.low)


def log_axis(title: str, values: Iterable[float], ticks: Sequence[float] = ()) -> Axis:
    """Return an axis that holds these values, with ticks at powers of two unless told."""
    found = list(values)
    low, high = min(found) * 0.9, max(found) * 1.1
    inside = [tick for tick in ticks or POWERS if low <= tick <= high]
    if not ticks and len(inside) < FEW_TICKS:
        inside = [tick for tick in sorted(POWERS + BETWEEN) if low <= tick <= high]
    return Axis(title, inside, low, high, log=True)


def plain_axis(title: str, most: float, step: float, beside: float = 0.0) -> Axis:
    """Return an axis from 0 to `most`, ticks `step` apart; `beside` is room at its ends."""
    ticks = [n * step for n in range(int(most / step) + 1)]
    return Axis(title, ticks, -beside, most + beside, log=False)


def named(value: float) -> str:
    """Return a number as a tick says it."""
    if value >= 1024 and value % 1024 == 0:
        return f"{value / 1024:g}k"
    return f"{value:g}"


def picture(title: str, x: Axis, y: Axis, lines: Sequence[Line]) -> str:
    """Return an SVG of lines over two axes."""
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def at(point: tuple[float, float]) -> tuple[float, float]:
        across = LEFT + x.share(point[0]) * (right - LEFT)
        return across, bottom - y.share(point[1]) * (bottom - TOP)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="12" y="22" font-size="15" fill="{INK}">{escape(title)}</text>',
        f'<text x="12" y="42" fill="{INK}">{escape(y.title)}</text>',
    ]
    for tick in x.ticks:
        across = at((tick, y.low))[0]
        parts.append(f'<path d="M{across:.1f} {TOP}V{bottom}" stroke="{GRID}"/>')
        parts.append(_text(across, bottom + 18, named(tick), "middle"))
    for tick in y.ticks:
        down = at((x.low, tick))[1]
        parts.append(f'<path d="M{LEFT} {down:.1f}H{right}" stroke="{GRID}"/>')
        parts.append(_text(LEFT - 8, down + 4, named(tick), "end"))
    parts.append(f'<path d="M{LEFT} {TOP}V{bottom}H{right}" fill="none" stroke="{INK}"/>')
    parts.append(_text((LEFT + right) / 2, HEIGHT - 12, x.title, "middle"))
    ordered = sorted(lines, key=lambda line: line.style != "dashed")  # roofs lie below
    for line in ordered:
        parts += _drawn(line, [at(point) for point in line.points])
    for row, line in enumerate(line for line in lines if line.name):
        parts += _in_legend(line, right + 18, TOP + 10 + LEGEND_ROW * row)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _text(across: float, down: float, text: str, anchor: str) -> str:
    return (
        f'<text x="{across:.1f}" y="{down:.1f}" text-anchor="{anchor}" fill="{INK}">'
        f"{escape(text)}</text>"
    )


def _stroke(line: Line) -> str:
    dash = ' stroke-dasharray="6 4" stroke-opacity="0.75"' if line.style == "dashed" else ""
    return f'stroke="{COLOURS[line.colour % len(COLOURS)]}" stroke-width="2"{dash}'


def _marks(line: Line, points: Iterable[tuple[float, float]]) -> list[str]:
    if line.style == "dashed":
        return []
    colour = COLOURS[line.colour % len(COLOURS)]
    fill = "white" if line.style == "hollow" else colour
    return [
        f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{fill}" stroke="{colour}"/>'
        for a, b in points
    ]


def _drawn(line: Line, points: Sequence[tuple[float, float]]) -> list[str]:
    """Return a line and its points."""
    path = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in points)
    return [f'<path d="{path}" fill="none" {_stroke(line)}/>', *_marks(line, points)]


def _in_legend(line: Line, across: float, down: float) -> list[str]:
    """Return a line's name beside a piece of it."""
    middle = across + LEGEND_LINE / 2
    return [
        f'<path d="M{across} {down - 4}h{LEGEND_LINE}" {_stroke(line)}/>',
        *_marks(line, [(middle, down - 4)]),
        _text(across + LEGEND_LINE + 6, down, line.name, "start"),
    ]


def _line(name: str, cases: Iterable[Case], along: str, colour: int, style: Style) -> Line:
    """Return a line through the cases' times; a dashed one through their roofs."""
    key = "roof_us" if style == "dashed" else "us"
    points = sorted((float(case[along]), case[key] / 1e3) for case in cases)
    return Line(name, points, colour, style)


def _times(lines: Iterable[Line]) -> list[float]:
    return [time for line in lines for _, time in line.points]


def by_batch(cases: Sequence[Case]) -> str | None:
    """Step time against the number of sequences, one token each; None where it was not measured."""
    found = [c for c in cases if c["kind"] == "batch"]
    if not found:
        return None
    contexts = [c["context"] for c in found]
    most = max(set(contexts), key=contexts.count)
    found = [c for c in found if c["context"] == most]
    lines = [
        _line("a step", found, "batch", 0, "solid"),
        _line("roof", found, "batch", 0, "dashed"),
    ]
    x = log_axis("sequences", (c["batch"] for c in found), POWERS)
    title = f"A decode step by batch, {most:,} tokens of context each"
    return picture(title, x, log_axis("milliseconds", _times(lines)), lines)


def by_context(cases: Sequence[Case]) -> str | None:
    """Step time against the length of the context; None where it was not measured."""
    found = [c for c in cases if c["kind"] == "context"]
    if not found:
        return None
    lines = []
    for colour, batch in enumerate(sorted({c["batch"] for c in found}, reverse=True)):
        some = [c for c in found if c["batch"] == batch]
        lines.append(_line(f"batch {batch}", some, "context", colour, "solid"))
        lines.append(_line(f"batch {batch}: roof", some, "context", colour, "dashed"))
    ticks = [1024 * tick for tick in POWERS if tick >= 1]
    x = log_axis("tokens of context", (c["context"] for c in found), ticks)
    return picture("A decode step by context", x, log_axis("milliseconds", _times(lines)), lines)


def by_drafts(cases: Sequence[Case]) -> str | None:
    """Step time against K, with and without making the drafts; None where it was not measured."""
    found = [c for c in cases if c["kind"] == "drafts"]
    if not found:
        return None
    lines = []
    for colour, batch in enumerate(sorted({c["batch"] for c in found}, reverse=True)):
        some = [c for c in found if c["batch"] == batch]
        made = [c for c in some if c["makes_drafts"]]
        plain = [c for c in some if not c["makes_drafts"]]
        if made:
            lines.append(_line(f"batch {batch}: and made", made, "drafts", colour, "hollow"))
        if plain:
            lines.append(_line(f"batch {batch}: verified", plain, "drafts", colour, "solid"))
        begin = [c for c in plain if not c["drafts"]]
        roof = _line(f"batch {batch}: roof", begin + made, "drafts", colour, "dashed")
        lines += [roof] if roof.points else []
    most = max(_times(lines)) * 1.05
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100) if most / step <= 12)
    title = "A decode step by drafts; the roof is that of a step that makes them"
    x = plain_axis("drafts a sequence (K)", 5, 1, beside=0.15)
    y = plain_axis("milliseconds", most, step)
    return picture(title, x, y, lines)


PICTURES = {"gpu-batch": by_batch, "gpu-context": by_context, "gpu-drafts": by_drafts}


def draw(cases: Sequence[Case], folder: Path) -> list[str]:
    """Write every picture that there are cases for; return their names."""
    folder.mkdir(parents=True, exist_ok=True)
    made = {name: drawn(cases) for name, drawn in PICTURES.items()}  # all, or none is written
    for name, drawn in made.items():
        if drawn is not None:
            (folder / f"{name}.svg").write_text(drawn)
    return [name for name, drawn in made.items() if drawn is not None]


def main() -> None:
    """Draw every picture."""
    cases = [c for c in json.loads(Path(sys.argv[1]).read_text())["steps"] if "error" not in c]
    draw(cases, Path(sys.argv[2]))


if __name__ == "__main__":
    main()
