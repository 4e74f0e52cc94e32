"""Draw the growth of step times as SVG, from the benchmark's JSON; needs nothing but Python.

    python tests/gpu/plots.py docs/benchmarks/results/gpu-engine-h200.json docs/images

Owns axes, lines and their names. Knows which of the benchmark's cases a picture shows.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 720, 420
LEFT, RIGHT, TOP, BOTTOM = 64, 168, 44, 52
COLOURS = ("#1f5fa8", "#c2571a", "#2c8a57", "#8a3fa0", "#7a6a00", "#555555")


@dataclass(frozen=True)
class Line:
    """Points of one name; `dashed` for roofs."""

    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False


@dataclass(frozen=True)
class Axis:
    """A logarithmic axis, or one from 0 on."""

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


def axis(title: str, values: Sequence[float], ticks: Sequence[float], log: bool) -> Axis:
    """Return an axis that holds these values; of `ticks` those that lie on it are drawn."""
    low, high = (min(values) * 0.9, max(values) * 1.1) if log else (0.0, max(values) * 1.05)
    return Axis(title, [t for t in ticks if low <= t <= high], low, high, log)


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
        f'<text x="{LEFT}" y="22" font-size="15">{escape(title)}</text>',
    ]
    for tick in x.ticks:
        across = at((tick, y.low))[0]
        parts.append(f'<path d="M{across:.1f} {TOP}V{bottom}" stroke="#e4e4e4"/>')
        parts.append(
            f'<text x="{across:.1f}" y="{bottom + 18}" text-anchor="middle">{named(tick)}</text>'
        )
    for tick in y.ticks:
        down = at((x.low, tick))[1]
        parts.append(f'<path d="M{LEFT} {down:.1f}H{right}" stroke="#e4e4e4"/>')
        parts.append(
            f'<text x="{LEFT - 8}" y="{down + 4:.1f}" text-anchor="end">{named(tick)}</text>'
        )
    parts.append(f'<path d="M{LEFT} {TOP}V{bottom}H{right}" fill="none" stroke="#333"/>')
    middle = (LEFT + right) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 12}" text-anchor="middle">{x.title}</text>')
    parts.append(f'<text x="{LEFT}" y="38" fill="#333">{escape(y.title)}</text>')
    for number, line in enumerate(lines):
        parts += drawn(line, [at(point) for point in line.points], number)
    return "\n".join([*parts, "</svg>"]) + "\n"


def drawn(line: Line, points: Sequence[tuple[float, float]], number: int) -> list[str]:
    """Return a line, its points, and its name in the legend."""
    colour = COLOURS[number % len(COLOURS)]
    dash = ' stroke-dasharray="6 4"' if line.dashed else ""
    path = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in points)
    parts = [f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>']
    if not line.dashed:
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"/>' for a, b in points]
    down = TOP + 14 + 20 * number
    start = WIDTH - RIGHT + 14
    parts.append(f'<path d="M{start} {down - 4}h22" stroke="{colour}" stroke-width="2"{dash}/>')
    parts.append(f'<text x="{start + 28}" y="{down}">{escape(line.name)}</text>')
    return parts


MS_TICKS = (1, 2, 4, 8, 16, 32, 64, 128)


def by_batch(cases: Sequence[Mapping[str, Any]]) -> str:
    """Step time against the number of sequences, one token each."""
    plain = [c for c in cases if c["kind"] == "batch"]
    most = max((c["context"] for c in plain), key=lambda n: sum(c["context"] == n for c in plain))
    plain = [c for c in plain if c["context"] == most]
    lines = [
        Line("exact, one graph", [(c["batch"], c["us"] / 1e3) for c in plain]),
        Line("roof", [(c["batch"], c["roof_us"] / 1e3) for c in plain], dashed=True),
    ]
    theirs = [(c["batch"], c["cublas_us"] / 1e3) for c in plain if c.get("cublas_us")]
    lines += [Line("PyTorch, cuBLAS", theirs)] if theirs else []
    values = [v for line in lines for _, v in line.points]
    x = axis("sequences", [c["batch"] for c in plain], [2**n for n in range(10)], log=True)
    title = f"A decode step by batch, {most} tokens of context each"
    return picture(title, x, axis("milliseconds", values, MS_TICKS, log=True), lines)


def by_context(cases: Sequence[Mapping[str, Any]]) -> str:
    """Step time against the length of the context."""
    plain = [c for c in cases if c["kind"] == "context"]
    lines = []
    for batch in sorted({c["batch"] for c in plain}):
        some = [c for c in plain if c["batch"] == batch]
        lines.append(Line(f"batch {batch}", [(c["context"], c["us"] / 1e3) for c in some]))
        roof = [(c["context"], c["roof_us"] / 1e3) for c in some]
        lines.append(Line(f"roof, batch {batch}", roof, dashed=True))
    values = [v for line in lines for _, v in line.points]
    x = axis(
        "tokens of context", [c["context"] for c in plain], [1024 << n for n in range(8)], True
    )
    y = axis("milliseconds", values, MS_TICKS, log=True)
    return picture("A decode step by context", x, y, lines)


def by_drafts(cases: Sequence[Mapping[str, Any]]) -> str:
    """Step time against K, with and without making the drafts."""
    plain = [c for c in cases if c["kind"] == "drafts"]
    lines = []
    for batch in sorted({c["batch"] for c in plain}):
        for makes, name in ((False, "verified"), (True, "and made")):
            some = [c for c in plain if c["batch"] == batch and c["makes_drafts"] is makes]
            points = [(c["drafts"], c["us"] / 1e3) for c in some]
            lines += [Line(f"batch {batch}: {name}", points, dashed=makes)] if points else []
    values = [v for line in lines for _, v in line.points]
    x = axis("drafts a sequence (K)", [0, 5], range(6), log=False)
    y = axis("milliseconds", values, [*range(0, 20, 2), *range(20, 100, 10)], log=False)
    return picture("A decode step by drafts", x, y, lines)


PICTURES = {"gpu-batch": by_batch, "gpu-context": by_context, "gpu-drafts": by_drafts}


def main() -> None:
    """Draw every picture."""
    source, folder = Path(sys.argv[1]), Path(sys.argv[2])
    cases = json.loads(source.read_text())["steps"]
    for name, draw in PICTURES.items():
        (folder / f"{name}.svg").write_text(draw(cases))


if __name__ == "__main__":
    main()
