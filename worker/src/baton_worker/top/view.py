"""How activities look: one table, one line per process.

Owns columns and number formats. Pure: it makes a renderable and prints nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from rich import box
from rich.table import Table
from rich.text import Text

from baton_worker.logs import one_line
from baton_worker.top.snapshot import Activity

Outcome = Activity | str
"""What an endpoint did, or why it could not be read."""

_ROLES = {"gateway": 0, "prefill": 1, "decode": 2, "mixed": 3}
_PRESSURE_IS_HIGH = 2
_KV_IS_HIGH = 0.95


class _Column(NamedTuple):
    """`drop_order`: which go first where the screen is too narrow, 0 never."""

    title: str
    text: Callable[[Activity], str]
    drop_order: int = 0


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{1e3 * value:.0f} ms"


def _warned(text: str, is_high: bool) -> str:
    return f"[red]{text}[/]" if is_high else text


def _columns() -> tuple[_Column, ...]:
    return (
        _Column("tokens/s", lambda a: _number(a.tokens)),
        _Column("prompt/s", lambda a: _number(a.prompt_tokens), 3),
        _Column("accepted", lambda a: _percent(a.acceptance)),
        _Column("per row", lambda a: _number(a.tokens_per_row), 4),
        _Column("logprobs/s", lambda a: _number(a.logprob_rows), 5),
        _Column("of step", lambda a: _percent(a.logprob_share), 1),
        _Column("running", lambda a: _number(a.running)),
        _Column("waiting", lambda a: _number(a.waiting)),
        _Column("KV", lambda a: _warned(_percent(a.kv_used), (a.kv_used or 0) > _KV_IS_HIGH)),
        _Column("peers", lambda a: _warned(_number(a.peers), a.peers == 0)),
        _Column(
            "pressure",
            lambda a: _warned(_number(a.pressure), (a.pressure or 0) >= _PRESSURE_IS_HIGH),
            6,
        ),
        _Column("oldest", lambda a: _milliseconds(a.lag_seconds), 2),
    )


def table(
    outcomes: Mapping[str, Outcome],
    interval_seconds: float,
    fits: Callable[[Table], bool] = lambda made: True,
) -> Table:
    """Return the table of all endpoints, by role and then by address.

    Where it does not fit, first the frame goes, then columns, one by one; the caption names them.
    """
    columns, hidden = list(_columns()), list[str]()
    made = _table(outcomes, interval_seconds, columns)
    while not fits(made):
        made = _table(outcomes, interval_seconds, columns)
        made.box, made.pad_edge, made.padding = box.SIMPLE_HEAD, False, (0, 1, 0, 0)
        if hidden:
            made.caption = f"for a wider screen: {', '.join(hidden)}"
        droppable = [column for column in columns if column.drop_order]
        if not droppable or fits(made):
            break
        first = min(droppable, key=lambda column: column.drop_order)
        columns.remove(first)
        hidden.append(first.title)
    return made


def _table(
    outcomes: Mapping[str, Outcome], interval_seconds: float, columns: Sequence[_Column]
) -> Table:
    made = Table(title=f"Baton, over {interval_seconds:g} s", title_justify="left", expand=False)
    made.caption_justify = "left"
    for title in ("role", "process"):
        made.add_column(title, no_wrap=True)
    for column in columns:
        made.add_column(column.title, justify="right", no_wrap=True)
    for address, outcome in sorted(outcomes.items(), key=_order):
        if isinstance(outcome, str):
            made.add_row("[red]?[/]", _plain(address), _plain(outcome, "red"))
        else:
            shown = (c.text(outcome) for c in columns)
            made.add_row(_plain(outcome.role or "?"), _plain(address), *shown)
    return made


def _plain(text: str, style: str = "") -> Text:
    """Return what a process or a person chose as it stands: an IPv6 address in brackets is no
    markup, and no process commands the terminal.
    """
    return Text(one_line(text), style)


def _order(item: tuple[str, Outcome]) -> tuple[int, str]:
    address, outcome = item
    rank = len(_ROLES) if isinstance(outcome, str) else _ROLES.get(outcome.role, len(_ROLES))
    return rank, address
