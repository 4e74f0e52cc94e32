"""Several pulls fill the same blocks, layers behind layers, as slowly as a network likes: a block
is whole when all of them have come, and nobody's when one of them has not.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from baton_testing.engine_bench import LoadedModel
from baton_testing.late_pulls import LatePeer, LatePull
from baton_testing.pool_pair import LONG, Pair, alone, said
from baton_worker.engine.api import Handoff, KvFilled
from baton_worker.engine.kv import layers
from baton_worker.messages import HANDOFF_LAYERS
from baton_worker.records.columns import ErrorCode

ENGINES = ("paddle", "device")
MARKS = (4, 6, 7)


@pytest.fixture(autouse=True)
def short_steps_are_told_as_long_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "FEW_TOKENS", 0)


@pytest.fixture(scope="module")
def deep(make_model: Callable[..., LoadedModel]) -> LoadedModel:
    return make_model(5, n_layers=8)


class LatePair(Pair):
    """Words are heard in order, behind prefill's computing."""

    peer: LatePeer  # type: ignore[assignment]

    def introduced(self) -> Any:
        return LatePeer(super().introduced())  # type: ignore[arg-type]

    def told(self, number: int = 1) -> tuple[Any, list[KvFilled], Handoff]:
        """Compute a prompt; return its key, the words and the offer."""
        key = self.submit(number, LONG, features=(HANDOFF_LAYERS,))
        words: list[KvFilled] = []
        while True:
            result = self.prefill.step(words.append)
            words += result.filled
            if result.handoffs:
                return key, words, result.handoffs[0]

    def finish(self) -> None:
        while self.decode.engine.has_work():
            self.peer.all_come()
            for key in self.decode.step().imported:
                self.prefill.engine.release_handoff(key)


def made(make_bench: Callable[..., Any], deep: LoadedModel, **more: Any) -> LatePair:
    return LatePair(make_bench, **({"model": deep, "overlap": True} | more))


def come(pulls: list[LatePull]) -> None:
    for pull in pulls:
        pull.come()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
@pytest.mark.parametrize("is_before", [True, False], ids=["before the offer", "behind it"])
def test_what_comes_in_any_order_is_whole_when_all_has_come(
    make_bench: Callable[..., Any], deep: LoadedModel, order: tuple[int, ...], is_before: bool
) -> None:
    pair = made(make_bench, deep)
    key, words, handoff = pair.told()
    for word in words:
        pair.tell(word)
    whole, late = pair.peer.pulls[:-3], pair.peer.pulls[-3:]
    assert len(words) == 4 + len(MARKS)
    come(whole)
    if not is_before:
        pair.offer(handoff)
    for index in order:
        pair.decode.engine.check_integrity()
        late[index].come()
        pair.decode.engine.has_work()
    if is_before:
        assert not pair.decode.engine.load().kv_blocks_used, "they are nobody's"
        pair.offer(handoff)
    pair.finish()
    assert said(pair.decode, key) == alone(make_bench, 1, LONG, model=deep)
    ahead = 8 + 2 * 7 / 8 * is_before
    assert pair.pulled() == pytest.approx((ahead, 10 - ahead))
    pair.check_nothing_is_left()


@pytest.mark.parametrize("lost", range(3))
@pytest.mark.parametrize("is_before", [True, False], ids=["before the offer", "behind it"])
def test_blocks_one_of_whose_pulls_is_lost_are_pulled_again_whole(
    make_bench: Callable[..., Any], deep: LoadedModel, lost: int, is_before: bool
) -> None:
    pair = made(make_bench, deep)
    key, words, handoff = pair.told()
    for word in words:
        pair.tell(word)
    late = pair.peer.pulls[-3:]
    late[lost].lost = "its worker is silent"
    if not is_before:
        pair.offer(handoff)
    for pull in pair.peer.pulls[:-3] + [pull for pull in late if not pull.lost]:
        pull.come()
        pair.decode.engine.has_work()
        pair.decode.engine.check_integrity()
    if is_before:
        pair.offer(handoff)
    late[lost].come()
    n_begun = len(pair.peer.pulls)
    pair.finish()
    assert said(pair.decode, key) == alone(make_bench, 1, LONG, model=deep)
    assert pair.decode.engine.load().kv_left_ahead == {"lost": 1}
    assert pair.pulled()[1] >= 2, "both blocks of the last chunk"
    assert len(pair.peer.pulls) > n_begun or is_before
    pair.check_nothing_is_left()


def test_of_what_was_lost_nothing_is_begun_while_something_comes_for_it(
    make_bench: Callable[..., Any], deep: LoadedModel
) -> None:
    """A pull under way would be taken for that of other blocks in the same places."""
    pair = made(make_bench, deep)
    key, words, handoff = pair.told()
    for word in words[:-1]:
        pair.tell(word)
    come(pair.peer.pulls[:-2])
    first, second = pair.peer.pulls[-2:]
    first.lost = "its worker is silent"
    pair.tell(words[-1])
    assert pair.decode.engine.load().kv_left_ahead == {"lost": 1, "coming": 1}
    first.come()
    second.come()
    pair.tell(words[-1])
    third = pair.peer.pulls[-1]
    assert third is not second
    third.come()
    pair.offer(handoff)
    pair.finish()
    assert said(pair.decode, key) == alone(make_bench, 1, LONG, model=deep)
    pair.check_nothing_is_left()


def test_blocks_of_who_left_are_nobodys_before_the_last_write(
    make_bench: Callable[..., Any], deep: LoadedModel
) -> None:
    pair = made(make_bench, deep)
    key, words, _ = pair.told()
    for word in words:
        pair.tell(word)
    come(pair.peer.pulls[:-3])
    pair.decode.engine.drop_ahead(key)
    for pull in pair.peer.pulls[-3:]:
        assert pair.decode.engine.load().kv_blocks_used == 2
        pair.decode.engine.check_integrity()
        pull.come()
        pair.decode.engine.has_work()
    load = pair.decode.engine.load()
    assert load.kv_blocks_used == 0
    assert load.kv_pulled_ahead_blocks == 8, "what had come when it left"
    assert load.kv_pulled_behind_blocks == pytest.approx(2 * 7 / 8)
    pair.decode.engine.check_integrity()
    pair.prefill.engine.release_handoff(key)


@pytest.mark.parametrize("seed", range(12))
def test_whatever_comes_and_is_lost_what_is_said_is_the_same(
    make_bench: Callable[..., Any], deep: LoadedModel, seed: int
) -> None:
    rng = random.Random(seed)
    pair = made(make_bench, deep, n_blocks=24, max_model_len=192, max_running=3)
    told = [pair.told(number) for number in range(3)]
    events: list[Callable[[], None]] = []
    for _, words, handoff in told:
        where = 0
        for word in words:
            where = rng.randrange(where, len(events) + 1)
            events.insert(where, lambda word=word: pair.tell(word))
            where += 1
        events.insert(rng.randrange(where, len(events) + 1), lambda h=handoff: pair.offer(h))
    for event in events:
        event()
        for pull in pair.peer.pulls:
            if not pull.has_come() and rng.random() < 0.4:
                pull.lost = "" if rng.random() < 0.8 or pull.lost else "its worker is silent"
                if not pull.lost:
                    pull.come()
        if rng.random() < 0.5 and pair.decode.engine.has_work():
            for key in pair.decode.step().imported:
                pair.prefill.engine.release_handoff(key)
        pair.decode.engine.check_integrity()
    pair.finish()
    ends = [(number, key, pair.decode.reader[key].error) for number, (key, _, _) in enumerate(told)]
    assert any(error is None for _, _, error in ends)
    for number, key, error in ends:
        if error is None:
            assert said(pair.decode, key) == alone(make_bench, number, LONG, model=deep)
        else:
            assert error[0] is ErrorCode.HANDOFF_PEER_LOST, "its offer's own pull was lost"
            pair.prefill.engine.release_handoff(key)
    pair.check_nothing_is_left()
