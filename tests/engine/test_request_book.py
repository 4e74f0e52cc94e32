"""Whoever enters the engine's book leaves it once, with one end to tell, whenever that comes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_worker.engine.api import EngineRefusedError, FailedRequest
from baton_worker.engine.kv.pool import BlockAllocator
from baton_worker.engine.scheduling.request_book import RequestBook
from baton_worker.engine.scheduling.requests import (
    Ending,
    RequestLimits,
    RequestState,
    Terminal,
    new_state,
)
from baton_worker.engine.scheduling.scheduler import Scheduler, SchedulerLimits
from baton_worker.identity import RequestKey, make_handle
from baton_worker.messages import Submit
from baton_worker.records.columns import ErrorCode, Finish
from baton_worker.sampling import SamplingParams

LIMITS = RequestLimits(vocab_size=100, max_model_len=64, max_top_k=4, table_width=16)
ABORT = Ending(Finish.ABORT, None, "")
NUMBERS = st.integers(0, 5)


def key(number: int) -> RequestKey:
    return RequestKey(make_handle(1, number), 0)


def request(number: int) -> RequestState:
    source = Submit(*key(number), prompt_token_ids=(5, 6, 7), sampling=SamplingParams(max_tokens=9))
    return new_state(source, LIMITS, 0.0)


def new_book(max_running: int = 4, max_waiting: int = 4) -> RequestBook:
    limits = SchedulerLimits(4, max_running, max_waiting, 64)
    return RequestBook(Scheduler(limits, BlockAllocator(8)))


@dataclass
class Bench:
    """A book, a step that carries some of its requests, and what was told so far."""

    book: RequestBook = field(default_factory=new_book)
    carried: dict[RequestKey, int] = field(default_factory=dict)
    ended: list[RequestKey] = field(default_factory=list)
    told: list[Terminal] = field(default_factory=list)

    def is_carried(self, request: RequestState) -> bool:
        return request.key in self.carried

    def enter(self, number: int) -> bool:
        try:
            self.book.check_new(key(number))
        except EngineRefusedError:
            return False
        self.book.enter(request(number))
        return True

    def end(self, number: int, ending: Ending = ABORT) -> bool:
        has_ended = self.book.end(key(number), ending, self.is_carried)
        self.ended += [key(number)] * has_ended
        return has_ended

    def launch(self, numbers: list[int]) -> None:
        here = [self.book[key(n)] for n in numbers if key(n) in self.book]
        self.carried = {r.key: r.n_output for r in here if self.book.is_staying(r)}

    def land(self, failing: Sequence[int] = ()) -> set[RequestKey]:
        failed = [
            FailedRequest(key(n), ErrorCode.ARITHMETIC, "NaN")
            for n in failing
            if key(n) in self.carried and key(n) not in self.book.endings
        ]
        endings = self.book.take_endings(failed, self.carried)
        self.ended += [f.key for f in failed]
        self.carried = {}
        return set(endings)

    def tell(self) -> None:
        self.told += self.book.take_terminals()


ORDERS = st.lists(
    st.one_of(
        st.tuples(st.just("enter"), NUMBERS),
        st.tuples(st.just("end"), NUMBERS),
        st.tuples(st.just("launch"), st.lists(NUMBERS, unique=True)),
        st.tuples(st.just("land"), st.lists(NUMBERS, unique=True)),
        st.tuples(st.just("tell"), st.none()),
    ),
    max_size=40,
)


@given(orders=ORDERS)
def test_each_end_is_told_once_and_frees_its_key_only_then(
    orders: list[tuple[str, object]],
) -> None:
    bench = Bench()
    for name, given_with in orders:
        if name == "launch" and bench.carried:
            bench.land()
        getattr(bench, name)(*([] if given_with is None else [given_with]))
        bench.book.check_integrity([])
        untold = [one for one in bench.ended if bench.ended.count(one) > told_of(bench, one)]
        for one in untold:
            with pytest.raises(EngineRefusedError, match="already held"):
                bench.book.check_new(one)
    bench.land()
    bench.tell()
    assert sorted(terminal.key for terminal in bench.told) == sorted(bench.ended)
    assert not bench.book.has_terminals
    assert not bench.book.endings


def told_of(bench: Bench, one: RequestKey) -> int:
    return sum(terminal.key == one for terminal in bench.told)


def test_who_is_carried_stays_until_the_step_has_landed() -> None:
    bench = Bench()
    bench.enter(1)
    one = bench.book[key(1)]
    bench.launch([1])
    assert bench.end(1)
    assert bench.book.holds(one), "the step reads its blocks"
    assert not bench.book.is_staying(one)
    assert not bench.end(1), "it ends already"
    one.tokens += [8, 9]  # what the step yielded, which nobody is told
    assert bench.land() == {key(1)}
    bench.tell()
    assert not bench.book.holds(one)
    assert bench.told == [Terminal(key(1), 0, *ABORT)]


def test_an_end_from_outside_goes_before_the_failure_of_the_step() -> None:
    bench = Bench()
    bench.enter(1)
    bench.enter(2)
    bench.launch([1, 2])
    bench.end(1)
    bench.land([1, 2])
    bench.tell()
    assert {t.key: (t.finish, t.message) for t in bench.told} == {
        key(1): (Finish.ABORT, ""),
        key(2): (Finish.ERROR, "NaN"),
    }


def test_another_request_of_the_same_key_is_another_one() -> None:
    bench = Bench()
    bench.enter(1)
    before = bench.book[key(1)]
    bench.end(1)
    assert not bench.enter(1), "its end is not told yet"
    bench.tell()
    assert bench.enter(1)
    assert not bench.book.holds(before)


def test_a_full_queue_is_named_with_its_bound() -> None:
    bench = Bench(new_book(max_running=1, max_waiting=2))
    assert [bench.enter(number) for number in range(4)] == [True, True, True, False]
    with pytest.raises(EngineRefusedError, match="2 requests are waiting") as refused:
        bench.book.check_new(key(3))
    assert refused.value.code is ErrorCode.QUEUE_FULL
