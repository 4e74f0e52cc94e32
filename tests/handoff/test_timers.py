"""A key is due once, at the last time that was set for it, however often that was changed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton_worker.handoff.timers import Timers

_KEYS = st.integers(0, 5)
_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("set"), _KEYS, st.floats(0, 100)),
        st.tuples(st.just("drop"), _KEYS, st.just(0.0)),
        st.tuples(st.just("take"), st.just(0), st.floats(0, 100)),
    ),
    max_size=60,
)


@given(_STEPS)
def test_timers_agree_with_a_plain_map(steps):
    timers, times = Timers[int](), dict[int, float]()
    for what, key, at in steps:
        if what == "set":
            timers.set(key, at)
            times[key] = at
        elif what == "drop":
            timers.drop(key)
            times.pop(key, None)
        else:
            due = timers.take_due(at)
            assert sorted(due) == sorted(k for k, t in times.items() if t <= at)
            when = [times.pop(k) for k in due]
            assert when == sorted(when)
        assert len(timers) == len(times)
        assert timers.next_at() == min(times.values(), default=None)


def test_changing_one_time_for_ever_keeps_no_memory_of_it():
    timers = Timers[str]()
    kept = []
    for n in range(10_000):
        timers.set("a", float(n))
        kept.append(len(timers._heap))
    assert max(kept) == 2 * 1 + 64
    assert kept[66] == 1, "one more, and only what counts is left"
    assert timers.take_due(1e6) == ["a"]
