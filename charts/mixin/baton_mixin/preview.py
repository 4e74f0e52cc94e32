"""A picture of a dashboard's data without Grafana: one HTML page of small line charts.

For tests and pull requests; Grafana draws the real thing. Pure: the caller brings the series.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

COLOURS = ("#7eb26d", "#eab839", "#6ed0e0", "#ef843c", "#e24d42", "#1f78c1", "#ba43a9", "#705da0")
SHOWN_LEGENDS = 6
_CELL_PIXELS, _LINE_PIXELS, _GAP_PIXELS = 50, 30, 8
_STYLE = """
body { margin: 0; background: #111217; color: #ccccdc; font: 12px/1.35 system-ui, sans-serif; }
h1 { font-size: 15px; margin: 10px 12px; } main { position: relative; }
section { position: absolute; background: #181b1f; border: 1px solid #2c3036; border-radius: 3px;
  padding: 6px 8px; box-sizing: border-box; overflow: hidden;
  display: flex; flex-direction: column; }
h2 { font-size: 12px; font-weight: 600; margin: 0 0 4px; } .row { background: none; border: 0; }
.row h2 { font-size: 13px; } svg { flex: 1; min-height: 0; width: 100%; background: #14161a; }
.scale { color: #8e9297; font-variant-numeric: tabular-nums; }
.big { font-size: 26px; color: #7eb26d; }
.legend span { margin-right: 10px; white-space: nowrap; } .none { color: #e24d42; }
"""


class Series(NamedTuple):
    """One line: its legend, and (seconds, value) points in order of time."""

    legend: str
    points: Sequence[tuple[float, float]]


def page(dashboard: Mapping[str, Any], series_of: Mapping[int, Sequence[Series]]) -> str:
    """Return the page; `series_of` holds the series of each panel by the panel's id."""
    panels = dashboard["panels"]
    sections = [_panel(panel, series_of.get(panel["id"], ())) for panel in panels]
    height = max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in panels) * _LINE_PIXELS
    return (
        f"<!doctype html><meta charset=utf-8><style>{_STYLE}</style>"
        f"<h1>{html.escape(dashboard['title'])}</h1>"
        f"<main style='height:{height}px'>{''.join(sections)}</main>"
    )


def _panel(panel: Mapping[str, Any], series: Sequence[Series]) -> str:
    at = panel["gridPos"]
    style = (
        f"left:{at['x'] * _CELL_PIXELS + _GAP_PIXELS}px;top:{at['y'] * _LINE_PIXELS}px;"
        f"width:{at['w'] * _CELL_PIXELS - _GAP_PIXELS}px;"
        f"height:{at['h'] * _LINE_PIXELS - _GAP_PIXELS}px"
    )
    title = f"<h2>{html.escape(panel['title'])}</h2>"
    if panel["type"] == "row":
        return f"<section class=row style='{style}'>{title}</section>"
    unit = panel["fieldConfig"]["defaults"]["unit"]
    finite = [Series(s.legend, [p for p in s.points if math.isfinite(p[1])]) for s in series]
    drawn = [s for s in finite if s.points]
    if not drawn:
        body = "<div class=none>no data</div>"
    elif panel["type"] == "stat":
        body = f"<div class=big>{shown(drawn[0].points[-1][1], unit)}</div>"
    else:
        body = _lines(drawn, unit)
    return f"<section style='{style}'>{title}{body}</section>"


def _lines(series: Sequence[Series], unit: str) -> str:
    times = [t for s in series for t, _ in s.points]
    first, span = min(times), max(times) - min(times) or 1.0
    top = max(v for s in series for _, v in s.points) or 1.0
    paths = []
    for colour, line in zip(_cycled(len(series)), series, strict=True):
        points = " ".join(
            f"{100 * (t - first) / span:.2f},{100 - 94 * v / top:.2f}" for t, v in line.points
        )
        paths.append(
            f"<polyline points='{points}' fill=none stroke='{colour}' stroke-width=1.5"
            " vector-effect=non-scaling-stroke />"
        )
    legends = " ".join(
        f"<span style='color:{colour}'>{html.escape(line.legend)}"
        f" {shown(line.points[-1][1], unit)}</span>"
        for colour, line in zip(_cycled(SHOWN_LEGENDS), series, strict=False)
    )
    return (
        f"<div class=scale>to {shown(top, unit)}, {span:.0f} s</div>"
        f"<svg viewBox='0 0 100 100' preserveAspectRatio=none>{''.join(paths)}</svg>"
        f"<div class=legend>{legends}</div>"
    )


def _cycled(count: int) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(count)]


def shown(value: float, unit: str) -> str:
    """Return a value as people read it in one of the units that the dashboards use."""
    if unit == "percentunit":
        return f"{100 * value:.3g} %"
    if unit == "s":
        return f"{1e3 * value:.3g} ms" if value < 1 else f"{value:.3g} s"
    suffix = {"bytes": " B", "Bps": " B/s", "reqps": " req/s", "cps": " /s"}.get(unit, "")
    return f"{value:,.0f}{suffix}" if value >= 1000 else f"{value:.3g}{suffix}"
