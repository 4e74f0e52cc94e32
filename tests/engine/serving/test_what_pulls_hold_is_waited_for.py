"""Blocks that pulls under way hold are waited for: never without end, and never one by one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from baton_testing.pool_pair import LONG, OPTIONS, Pair, alone, fill, said
from baton_worker.engine.kv.sharing import PeerPool

ENGINES = ("device",)
N_SLOW = 4


class SlowPull:
    """A pull that comes when it is let, or after so many waits; they are counted."""

    def __init__(self, copy: Callable[[], Any], waited: list[float], most: int) -> None:
        self._copy = copy
        self._waited = waited
        self._most = most
        self.is_done = False

    def has_come(self) -> bool:
        return self.is_done

    def seconds(self) -> float:
        return 1.0

    def wait(self, most_seconds: float = math.inf) -> None:
        if self.is_done:
            return
        assert most_seconds < 1, "the engine would stand still"
        self._waited.append(most_seconds)
        self._most -= 1
        if not self._most:
            self.let()

    def let(self) -> None:
        self._copy()
        self.is_done = True


class SlowSharing:
    """A pool whose pulls go on beside the steps."""

    goes_beside = True

    def __init__(self, sharing: Any, most_waits: int) -> None:
        self._sharing = sharing
        self._most_waits = most_waits
        self.pulls: list[SlowPull] = []
        self.waited: list[float] = []

    def begin_pull(
        self, blocks: Sequence[int], peer: PeerPool, theirs: Sequence[int], spans: Any
    ) -> SlowPull:
        own = tuple(blocks), peer, tuple(theirs), spans
        copy = lambda: self._sharing.begin_pull(*own).wait()  # noqa: E731
        self.pulls.append(SlowPull(copy, self.waited, self._most_waits))
        return self.pulls[-1]


def slow_pair(make_bench: Callable[..., Any], most_waits: int = 10**6, **limits: Any) -> Pair:
    pair = Pair(make_bench, prefix_caching=False, **limits)
    pool = pair.decode.engine.kv
    pool.sharing = SlowSharing(pool.sharing, most_waits)
    return pair


@pytest.mark.parametrize("stage", ["told", "aborted"])
def test_who_waits_for_blocks_that_are_being_pulled_is_work(
    make_bench: Callable[..., Any], stage: str
) -> None:
    """Blocks of a bet, and those of an offer that was aborted, come back without an event."""
    limits = {"n_blocks": 12, "max_model_len": 192, "max_running": 2}
    pair = slow_pair(make_bench, 3, **limits)
    key = pair.submit(1, LONG)
    if stage == "told":
        pair.tell(fill(pair)[-1])
    else:
        (handoff,) = pair.compute()
        pair.offer(handoff)
        pair.decode.engine.abort(key)
    engine = pair.decode.engine
    assert engine.load().kv_blocks_used == 8
    other = pair.decode.submit(7, LONG[:90], **OPTIONS, temperature=0.9, seed=7)
    steps = 0
    while engine.has_work():
        pair.decode.step()
        engine.check_integrity()
        steps += 1
        assert steps < 100, "it waits between its looks, it does not spin"
    assert said(pair.decode, other) == alone(make_bench, 7, LONG[:90])


def test_a_step_waits_once_however_many_pulls_there_are(make_bench: Callable[..., Any]) -> None:
    pair = slow_pair(make_bench)
    for number in range(N_SLOW):
        pair.submit(number, LONG[:20])
    handoffs = [h for result in pair.prefill.drain() for h in result.handoffs]
    for handoff in handoffs:
        pair.offer(handoff)
    pair.decode.step()
    sharing = pair.decode.engine.kv.sharing
    assert len(sharing.pulls) == N_SLOW
    sharing.waited.clear()
    pair.decode.step()
    assert len(sharing.waited) == 1
    for pull in sharing.pulls:
        pull.let()
    pair.finish()
    assert all(said(pair.decode, handoff.state.key) for handoff in handoffs)


def test_room_that_is_needed_is_waited_for_once_a_plan(make_bench: Callable[..., Any]) -> None:
    """Rows that decode stand still meanwhile."""
    limits = {"n_blocks": 12, "max_model_len": 160, "max_running": N_SLOW}
    pair = slow_pair(make_bench, **limits)
    first = pair.decode.submit(9, LONG[:63], **(OPTIONS | {"max_tokens": 90}))
    pair.decode.step()
    for number in range(2):
        pair.submit(number, LONG[:30])
    for handoff in [h for result in pair.prefill.drain() for h in result.handoffs]:
        pair.offer(handoff)
    sharing = pair.decode.engine.kv.sharing
    most = 0
    while len(pair.decode.reader[first].tokens) < 90:
        sharing.waited.clear()
        pair.decode.step()
        pair.decode.engine.check_integrity()
        most = max(most, sum(seconds > 0 for seconds in sharing.waited))
        if most and not pair.decode.engine._requests[first].n_computed:
            break  # it was preempted too: what leaves is not free yet
    assert most == 1
    for pull in sharing.pulls:
        pull.let()
    while pair.decode.engine.has_work():
        for pull in sharing.pulls:
            if not pull.is_done:
                pull.let()
        pair.decode.step()
    assert len(pair.decode.reader[first].tokens) == 90


def test_bets_leave_room_for_who_stands_first(make_bench: Callable[..., Any]) -> None:
    """Each comes, but others are begun meanwhile: whoever needs most of the pool would wait on."""
    limits = {"n_blocks": 12, "max_model_len": 192, "max_running": 4}
    pair = slow_pair(make_bench, **limits)
    engine, sharing = pair.decode.engine, pair.decode.engine.kv.sharing
    big = None
    for number in range(10):
        under_way = [pull for pull in sharing.pulls if not pull.is_done]
        key = pair.submit(number, LONG[:90])
        told = [filled for _ in range(2) for filled in pair.prefill.step().filled]
        pair.tell(told[-1], 90)
        big = big or pair.decode.submit(77, LONG, **OPTIONS)
        pair.prefill.engine.abort(key)
        pair.prefill.drain()
        for pull in under_way:
            pull.let()
        if engine.has_work():
            pair.decode.step()
        engine.check_integrity()
    assert pair.decode.reader[big].tokens, "while there were bets"
