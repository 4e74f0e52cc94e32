"""The line serves lower priorities first, equal ones by arrival, and overtaking is bounded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from baton_worker.engine.scheduling.requests import RequestLimits, RequestState, new_state
from baton_worker.engine.scheduling.waiting_queue import WaitingQueue
from baton_worker.identity import RequestKey, incarnation_of, make_handle
from baton_worker.messages import Submit
from baton_worker.sampling import SamplingParams

LIMITS = RequestLimits(vocab_size=8, max_model_len=8, max_top_k=0, table_width=1)


def request(number: int, priority: int) -> RequestState:
    source = Submit(number, 0, prompt_token_ids=(1,), sampling=SamplingParams(), priority=priority)
    state = new_state(source, LIMITS, 0.0)
    state.arrival = (number, 0)
    return state


def admit(
    line: WaitingQueue, minds: Callable[[RequestState], bool] = lambda _: True
) -> RequestState:
    first = next(iter(line))
    line.remove(first)
    line.let_pass(first, minds)
    return first


def served(line: WaitingQueue) -> int:
    return admit(line).key.handle


def test_lower_priority_numbers_come_first_and_equal_ones_by_arrival() -> None:
    line = WaitingQueue()
    for number, priority in enumerate((0, 5, -1, 0, 5, -1)):
        line.add(request(number, priority))
    assert [served(line) for _ in range(6)] == [2, 5, 0, 3, 1, 4]


def test_a_request_that_returns_is_where_it_was() -> None:
    line = WaitingQueue()
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
    line = WaitingQueue(max_overtaken=most)
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
    line = WaitingQueue(max_overtaken=1)
    paused = request(0, 9)
    line.add(paused)
    for number in range(1, 5):
        line.add(request(number, 0))
        admit(line, lambda r: r is not paused)
    assert not paused.is_promoted


def test_only_the_more_urgent_overtake() -> None:
    """Who is served first anyway loses nothing when a less urgent request begins beside it."""
    running = WaitingQueue(max_overtaken=1)
    urgent, patient = request(0, -1), request(1, 5)
    running.add(urgent)
    running.add(patient)
    running.let_pass(request(2, 0), lambda _: True)
    assert (urgent.n_overtaken, patient.n_overtaken) == (0, 1)


def test_the_promoted_are_served_by_arrival_alone() -> None:
    line = WaitingQueue(max_overtaken=1)
    for number, priority in enumerate((1, 0, -1)):
        line.add(request(number, priority))
    assert [served(line) for _ in range(3)] == [2, 0, 1]


def newcomer(gateway: int, turn: int, priority: int = 0) -> RequestState:
    key = RequestKey(make_handle(gateway, turn), 0)
    source = Submit(
        *key, prompt_token_ids=(1,), sampling=SamplingParams(), priority=priority, turn=turn
    )
    return new_state(source, LIMITS, 0.0)


def order(line: WaitingQueue) -> list[tuple[int, int]]:
    return [(incarnation_of(r.key.handle), r.turn) for r in line]


def test_one_that_was_held_up_stands_before_those_its_gateway_gave_out_later() -> None:
    line = WaitingQueue()
    for gateway, turn in ((1, 1), (2, 7), (1, 3), (2, 8), (1, 4), (1, 2)):
        line.join(newcomer(gateway, turn))
    assert order(line) == [(1, 1), (2, 7), (1, 2), (1, 3), (2, 8), (1, 4)]


def test_turns_say_nothing_across_gateways_and_priorities() -> None:
    line = WaitingQueue()
    for gateway, turn, priority in ((1, 9, 0), (2, 1, 0), (3, 5, 1), (3, 4, 0)):
        line.join(newcomer(gateway, turn, priority))
    assert order(line) == [(1, 9), (2, 1), (3, 4), (3, 5)]


def test_without_turns_the_order_is_that_of_coming() -> None:
    """As of an older gateway's requests."""
    line, came = WaitingQueue(), [newcomer(1, 0) for _ in range(3)]
    line.join(newcomer(1, 5))
    for one in came:
        line.join(one)
    assert list(line)[1:] == came


def test_one_that_was_held_up_passes_what_left_the_line_and_is_not_served_yet() -> None:
    line, running = WaitingQueue(), WaitingQueue()
    later, other = newcomer(1, 2), newcomer(2, 1)
    for one in (other, later):
        line.join(one)
        line.remove(one)
        running.add(one)
    held_up = newcomer(1, 1)
    line.join(held_up, beside=running)
    line.remove(held_up)
    running.add(held_up)
    assert order(running) == [(2, 1), (1, 1), (1, 2)]


@given(
    st.lists(
        st.one_of(st.just("serve"), st.tuples(st.integers(1, 3), st.integers(0, 9))), max_size=60
    )
)
def test_whoever_waits_is_served_in_the_order_of_its_gateway(moves: list[Any]) -> None:
    """The gateways' words come in any order, with holes between them, and while others leave."""
    line, free = WaitingQueue(), {gateway: list(range(1, 70)) for gateway in (1, 2, 3)}
    for move in moves:
        if move == "serve":
            if len(line):
                first = admit(line)
                gateway = incarnation_of(first.key.handle)
                waiting = [r.turn for r in line if incarnation_of(r.key.handle) == gateway]
                assert first.turn < min(waiting, default=100)
        else:
            gateway, place = move
            turns = free[gateway]
            line.join(newcomer(gateway, turns.pop(place)))
        for gateway in (1, 2, 3):
            turns = [turn for source, turn in order(line) if source == gateway]
            assert turns == sorted(turns)
