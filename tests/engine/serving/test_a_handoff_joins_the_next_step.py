"""A handed-over request decodes in the step behind the one in which its KV came, beside those who
decode already: it looks on in none that it could be in, and they are held up by none of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from baton_testing.late_pulls import LatePeer
from baton_testing.pool_pair import Pair, alone, said
from baton_worker.engine.api import Handoff, KvInPool
from baton_worker.engine.scheduling.requests import Phase
from baton_worker.records.columns import ErrorCode

ENGINES = ("paddle", "device")
PROMPT = tuple(2 + (7 * i) % 50 for i in range(70))
OTHER = tuple(3 + (5 * i) % 40 for i in range(70))


class LatePair(Pair):
    """A pair whose copies come when a test lets them, and whose decode has a stream already."""

    def __init__(self, make_bench: Callable[..., Any], **limits: Any) -> None:
        super().__init__(make_bench, overlap=True, **limits)
        self.late = LatePeer(self.peer)
        self.other = self.decode.submit(9, OTHER, max_tokens=40, logprobs_k=2)
        for _ in range(4):
            self.decode.step()
        assert len(self.tokens(self.other)) > 1

    def here(self, kv: KvInPool) -> KvInPool:
        return dataclasses.replace(kv, pool=self.late)

    def handoff(self, number: int = 0) -> tuple[Any, Handoff]:
        key = self.submit(number, PROMPT)
        for _ in range(10):
            for handoff in self.prefill.step().handoffs:
                return key, handoff
        raise AssertionError("prefill offered nothing")

    def tokens(self, key: Any) -> list[int]:
        tokens: list[int] = self.decode.reader[key].tokens
        return tokens

    def come_within_a_step(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have all come that is under way by the time that a step of decode's has landed."""
        move_on = self.decode.engine._move_on

        def landed(rows: Any) -> None:
            self.late.all_come()
            move_on(rows)

        monkeypatch.setattr(self.decode.engine, "_move_on", landed)

    def step(self, *offers: Handoff) -> Any:
        """Step decode; the offers come while the step under way is."""
        told = list(offers)

        def serve() -> None:
            while told:
                self.offer(told.pop(0))

        result = self.decode.engine.step(serve)
        self.decode.reader.read(result)
        self.decode.engine.check_integrity()
        for key in result.imported:
            self.prefill.engine.release_handoff(key)
        return result

    def finish(self) -> None:
        for _ in range(200):
            if self.decode.engine.has_work():
                self.late.all_come()
                self.step()
        self.prefill.drain()
        self.check_nothing_is_left()

    @property
    def goes_ahead(self) -> bool:
        """Whether the step under way was launched before the one before it had landed."""
        under_way = self.decode.engine._in_flight
        return under_way is not None and under_way.is_ahead


def other_alone(make_bench: Callable[..., Any]) -> Any:
    bench = make_bench()
    key = bench.submit(9, OTHER, max_tokens=40, logprobs_k=2)
    bench.drain()
    return said(bench, key)


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.node.callspec.params["make_bench"])


def test_it_decodes_in_the_step_behind_the_one_in_which_its_kv_came(
    make_bench: Callable[..., Any], engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = LatePair(make_bench)
    pair.come_within_a_step(monkeypatch)
    (first, one), (second, two) = pair.handoff(0), pair.handoff(1)
    results = [pair.step(one, two), pair.step(), pair.step()]
    # Over a device its KV comes during the very step in which it was offered; else in the next.
    at = 0 if engine == "device" else 1
    assert results[at].imported == (first, second)
    assert [len(pair.tokens(key)) for key in (first, second)] == [3 - at, 3 - at]
    pair.finish()
    assert said(pair.decode, first) == alone(make_bench, 0, PROMPT)
    assert said(pair.decode, second) == alone(make_bench, 1, PROMPT)
    assert said(pair.decode, pair.other) == other_alone(make_bench)


def test_steps_go_ahead_of_each_other_while_kv_is_on_its_way(
    make_bench: Callable[..., Any], engine: str
) -> None:
    pair = LatePair(make_bench)
    key, handoff = pair.handoff()
    assert pair.goes_ahead is (engine == "device")
    pair.step(handoff)
    for _ in range(5):
        pair.step()
        assert not pair.tokens(key)[1:]
    assert pair.goes_ahead is (engine == "device"), "nobody waits for a step to land"
    assert pair.decode.engine.load().waiting == 0
    pair.late.all_come()
    for _ in range(3):  # the one under way, the one behind it, and its own
        pair.step()
    assert len(pair.tokens(key)) > 1
    pair.finish()
    assert said(pair.decode, key) == alone(make_bench, 0, PROMPT)
    assert said(pair.decode, pair.other) == other_alone(make_bench)


@pytest.mark.parametrize("ended_by", ["abort", "loss", "refusal"])
def test_who_was_let_in_early_and_ends_leaves_nothing(
    make_bench: Callable[..., Any], ended_by: str
) -> None:
    pair = LatePair(make_bench)
    key, handoff = pair.handoff()
    told: list[Any] = []
    pair.step(handoff)
    if not pair.late.pulls:
        pair.step()
    (pull,) = pair.late.pulls
    if ended_by == "abort":
        assert pair.decode.engine.abort(key)
    elif ended_by == "loss":
        pull.lost = "its worker is silent"
    else:
        pair.prefill.engine.release_handoff(key)
        pull.come()
    for _ in range(4):
        told += pair.step().failed
    wanted = {"loss": ErrorCode.HANDOFF_PEER_LOST, "refusal": ErrorCode.HANDOFF_REFUSED}
    assert [one.code for one in told] == ([wanted[ended_by]] if ended_by in wanted else [])
    assert key not in pair.decode.known()
    pair.prefill.engine.release_handoff(key)
    pair.finish()
    assert said(pair.decode, pair.other) == other_alone(make_bench)


def admitted_by(pair: LatePair, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return whom decode's plans will admit, each of whom runs then."""
    scheduler, admitted = pair.decode.engine._parts.scheduler, list[Any]()
    plan = scheduler.plan

    def noted(*given: Any) -> Any:
        made = plan(*given)
        assert all(request.phase is Phase.RUNNING for request in made.admitted)
        admitted.extend(request.key for request in made.admitted)
        return made

    monkeypatch.setattr(scheduler, "plan", noted)
    return admitted


def test_who_was_let_in_early_counts_as_admitted_once(
    make_bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = LatePair(make_bench)
    admitted = admitted_by(pair, monkeypatch)
    (first, one), (second, two) = pair.handoff(0), pair.handoff(1)
    pair.step(one)
    pair.step(two)
    pair.finish()
    assert admitted == [first, second]


def test_who_was_let_in_early_and_ends_at_once_counts_as_admitted_by_no_plan(
    make_bench: Callable[..., Any], engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = LatePair(make_bench)
    admitted = admitted_by(pair, monkeypatch)
    key, handoff = pair.handoff()
    calls = 0

    def serve() -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            pair.offer(handoff)
        if calls == 2 or engine == "paddle":  # whose step asks once, when the one before has landed
            assert pair.decode.engine.abort(key)

    pair.decode.reader.read(pair.decode.engine.step(serve))
    assert calls == 2 - (engine == "paddle")
    pair.prefill.engine.release_handoff(key)
    pair.finish()
    assert admitted == []


def test_who_was_let_in_early_and_has_to_make_room_comes_in_again(
    make_bench: Callable[..., Any],
) -> None:
    # Room for the stream as it grows, or for the handoff beside it, and not for both to the end.
    pair = LatePair(make_bench, n_blocks=12, max_model_len=128, prefix_caching=False)
    key, handoff = pair.handoff()
    pair.step(handoff)
    for _ in range(45):
        pair.step()
    pair.finish()
    assert said(pair.decode, key) == alone(make_bench, 0, PROMPT)
    assert said(pair.decode, pair.other) == other_alone(make_bench)


@pytest.mark.parametrize("ended_by", ["loss", "refusal"])
def test_whose_kv_is_found_gone_when_it_has_to_make_room_is_asked_for_it_again(
    make_bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, ended_by: str
) -> None:
    pair = LatePair(make_bench, n_blocks=11, max_model_len=128, prefix_caching=False)
    key, handoff = pair.handoff()
    engine, move_on = pair.decode.engine, pair.decode.engine._move_on
    tables, other = engine._parts.scheduler._tables, engine._requests[pair.other]
    gone: list[Any] = []

    def landed(rows: Any) -> None:
        move_on(rows)
        is_short = tables.missing(other, len(other.tokens)) > tables.n_free
        if is_short and pair.late.pulls and not gone:  # the next plan takes its room away
            (pull,) = gone[:] = pair.late.pulls
            if ended_by == "loss":
                pull.lost = "its worker is silent"
            else:
                pair.prefill.engine.release_handoff(key)
                pull.come()

    monkeypatch.setattr(engine, "_move_on", landed)
    pair.step(handoff)
    for _ in range(30):
        pair.step()
    assert gone
    pair.finish()
    assert said(pair.decode, pair.other) == other_alone(make_bench)
    if ended_by == "loss":  # what was lost was a pull; the next one comes
        assert said(pair.decode, key) == alone(make_bench, 0, PROMPT)
    else:
        assert pair.decode.reader[key].error[0] is ErrorCode.HANDOFF_REFUSED


def test_who_was_let_in_early_did_not_ask_the_prefix_cache(
    make_bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = LatePair(make_bench, prefix_caching=True)
    pair.come_within_a_step(monkeypatch)
    _, handoff = pair.handoff()
    stats = [pair.step(*offers).stats for offers in ([handoff], [], [], [])]
    assert [s.prefix_query_tokens + s.prefix_hit_tokens for s in stats] == [0, 0, 0, 0]
    pair.finish()
