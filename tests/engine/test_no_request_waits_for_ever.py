"""The line serves lower priorities first, equal ones by arrival, and overtaking is bounded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from baton_worker.engine.api import EngineRequest
from baton_worker.engine.line import Line
from baton_worker.engine.requests import RequestLimits, RequestState, new_state
from baton_worker.identity import RequestKey
from baton_worker.sampling import SamplingParams

LIMITS = RequestLimits(vocab_size=8, max_model_len=8, max_top_k=0, table_width=1)


def request(number: int, priority: int) -> RequestState:
    source = EngineRequest(RequestKey(number, 0), (1,), SamplingParams(), priority=priority)
    state = new_state(source, LIMITS, 0.0)
    state.arrival = number
    return state


def admit(line: Line, minds: Callable[[RequestState], bool] = lambda _: True) -> RequestState:
    first = next(iter(line))
    line.remove(first)
    line.let_pass(first, minds)
    return first


def served(line: Line) -> int:
    return admit(line).key.handle


def test_lower_priority_numbers_come_first_and_equal_ones_by_arrival() -> None:
    line = Line()
    for number, priority in enumerate((0, 5, -1, 0, 5, -1)):
        line.add(request(number, priority))
    assert [served(line) for _ in range(6)] == [2, 5, 0, 3, 1, 4]


def test_a_request_that_returns_is_where_it_was() -> None:
    line = Line()
    first, second = request(0, 0), request(1, 0)
    line.add(first)
    admit(line)
    line.add(second)
    line.add(first)
    assert [served(line) for _ in range(2)] == [0, 1]


@given(
    moves=st.lists(st.one_of(st.integers(-2, 2), st.just("serve"), st.just("return")), max_size=80),
    most=st.integers(1, 4),
)
def test_nobody_is_overtaken_more_often_than_allowed(moves: list[Any], most: int) -> None:
    line = Line(max_overtaken=most)
    waiting: list[int] = []
    running: list[RequestState] = []
    overtaken: Counter[int] = Counter()
    n_arrived = 0
    for move in moves:
        if move == "serve":
            if not len(line):
                continue
            first = admit(line)
            number = first.key.handle
            overtaken.update(other for other in waiting if other < number)
            waiting.remove(number)
            running.append(first)
        elif move == "return":
            if running:
                waiting.append(running[0].key.handle)
                line.add(running.pop(0))
        else:
            line.add(request(n_arrived, move))
            waiting.append(n_arrived)
            n_arrived += 1
        assert sorted(r.key.handle for r in line) == sorted(waiting)
    assert max(overtaken.values(), default=0) <= most


def test_whoever_is_held_back_gains_nothing_by_waiting() -> None:
    """A gateway that takes no records must not come to the front for it."""
    line = Line(max_overtaken=1)
    paused = request(0, 9)
    line.add(paused)
    for number in range(1, 5):
        line.add(request(number, 0))
        admit(line, lambda r: r is not paused)
    assert not paused.is_promoted


def test_only_the_more_urgent_overtake() -> None:
    """Who is served first anyway loses nothing when a less urgent request begins beside it."""
    running = Line(max_overtaken=1)
    urgent, patient = request(0, -1), request(1, 5)
    running.add(urgent)
    running.add(patient)
    running.let_pass(request(2, 0), lambda _: True)
    assert (urgent.n_overtaken, patient.n_overtaken) == (0, 1)


def test_the_promoted_are_served_by_arrival_alone() -> None:
    line = Line(max_overtaken=1)
    for number, priority in enumerate((1, 0, -1)):
        line.add(request(number, priority))
    assert [served(line) for _ in range(3)] == [2, 0, 1]
