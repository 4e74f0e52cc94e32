"""What strangers can cause as often as they like is logged once in a while, each kind by itself."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton_worker.logs import LOG_SECONDS, Seldom

EVENTS = st.lists(st.tuples(st.floats(0, 2 * LOG_SECONDS), st.sampled_from("abc")), max_size=60)


@given(EVENTS)
def test_each_kind_has_its_first_line_and_then_one_in_a_while(
    events: list[tuple[float, str]],
) -> None:
    now, logged = 0.0, dict[str, list[float]]()
    seldom = Seldom(lambda: now)
    for after, kind in events:
        now += after
        silent = now - logged[kind][-1] if kind in logged else LOG_SECONDS
        assert seldom.is_due(kind) == (silent >= LOG_SECONDS)
        if silent >= LOG_SECONDS:
            logged.setdefault(kind, []).append(now)
