"""KV may take longer to come than a step: whoever else is served goes on, and so do ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from baton_testing.pool_pair import LONG, OPTIONS, Pair, alone, fill, said
from baton_worker.engine.kv.sharing import PeerPool
from baton_worker.identity import RequestKey

ENGINES = ("paddle", "device")


class SlowPull:
    """A pull that comes when it is let. Whoever waits for it without an end stands still."""

    def __init__(self, copy: Callable[[], Any]) -> None:
        self._copy = copy
        self._is_done = False

    def has_come(self) -> bool:
        return self._is_done

    def wait(self, most_seconds: float = math.inf) -> None:
        assert self._is_done or most_seconds < 1, "the engine would stand still"

    def let(self) -> None:
        self._copy()
        self._is_done = True


class SlowSharing:
    """A pool whose pulls go on beside the steps, and come when they are let."""

    goes_beside = True

    def __init__(self, sharing: Any) -> None:
        self._sharing = sharing
        self.pulls: list[SlowPull] = []

    def begin_pull(
        self, blocks: Sequence[int], peer: PeerPool, theirs: Sequence[int], spans: Any
    ) -> SlowPull:
        own = tuple(blocks), peer, tuple(theirs), spans
        pull = SlowPull(lambda: self._sharing.begin_pull(*own).wait())
        self.pulls.append(pull)
        return pull

    def let_all(self) -> None:
        for pull in self.pulls:
            if not pull.has_come():
                pull.let()


@pytest.fixture
def pair(make_bench: Callable[..., Any]) -> Pair:
    return Pair(make_bench, prefix_caching=False)


@pytest.fixture
def slow(pair: Pair) -> SlowSharing:
    pool = pair.decode.engine.kv
    pool.sharing = SlowSharing(pool.sharing)
    return pool.sharing


def offered(pair: Pair, number: int = 1) -> RequestKey:
    """Have a prompt pulled ahead, as far as it is told, and offered."""
    key = pair.submit(number, LONG)
    (handoff,) = pair.compute()
    pair.offer(handoff)
    return key


def spin(pair: Pair, steps: int = 3) -> list[RequestKey]:
    """Step decode where it has work, but not for ever; return what was imported."""
    imported: list[RequestKey] = []
    for _ in range(steps):
        if pair.decode.engine.has_work():
            imported += pair.decode.step().imported
        pair.decode.engine.check_integrity()
    return imported


def end(pair: Pair, slow: SlowSharing) -> None:
    """Let all come and go, and look whether anything is left."""
    while pair.decode.engine.has_work():
        slow.let_all()
        for key in pair.decode.step().imported:
            pair.prefill.engine.release_handoff(key)
    slow.let_all()
    pair.decode.engine.has_work()
    pair.prefill.drain()
    pair.check_nothing_is_left()
    assert pair.decode.engine._parts.allocator.n_idle == 0


def test_an_offer_whose_blocks_are_coming_is_decoded_when_they_have(
    pair: Pair, slow: SlowSharing, make_bench: Callable[..., Any]
) -> None:
    key = offered(pair)
    assert slow.pulls
    assert not spin(pair)
    assert pair.decode.engine.has_work(), "or nobody would look whether they have come"
    end(pair, slow)
    assert said(pair.decode, key) == alone(make_bench, 1, LONG)
    assert pair.pulled() == (0, 10), "each block once, and none before the offer"


def test_others_are_admitted_and_served_meanwhile(pair: Pair, slow: SlowSharing) -> None:
    offered(pair)
    other = pair.decode.submit(7, LONG[:30], **OPTIONS)
    spin(pair, 40)
    assert len(pair.decode.reader[other].tokens) == OPTIONS["max_tokens"]
    end(pair, slow)


@pytest.mark.parametrize("stage", ["told", "offered", "admitted"])
def test_an_abort_is_answered_at_once_and_blocks_are_free_once_the_pull_has_come(
    pair: Pair, slow: SlowSharing, make_bench: Callable[..., Any], stage: str
) -> None:
    if stage == "told":
        pair.submit(1, LONG)
        told = fill(pair)
        pair.tell(told[-1])
        key = told[-1].key
        pair.decode.engine.drop_ahead(key)
        pair.prefill.engine.abort(key)
    else:
        key = offered(pair)
        if stage == "admitted":
            slow.let_all()
            spin(pair, 1)
            assert not slow.pulls[-1].has_come(), "the offer's own"
        pair.decode.engine.abort(key)
        spin(pair, 2)
        assert pair.decode.reader[key].finish.name == "ABORT"
        pair.prefill.engine.release_handoff(key)
    assert pair.decode.engine.load().kv_blocks_used > 0, "something still writes to them"
    other = pair.decode.submit(3, LONG[:40], **OPTIONS, temperature=0.9, seed=3)
    spin(pair, 1)
    slow.let_all()  # now, among the blocks of others: it must not reach them
    end(pair, slow)
    assert said(pair.decode, other) == alone(make_bench, 3, LONG[:40])


def test_the_same_request_may_come_anew_while_its_old_blocks_are_coming(
    pair: Pair, slow: SlowSharing, make_bench: Callable[..., Any]
) -> None:
    pair.submit(1, LONG)
    pair.tell(fill(pair)[-1])
    (handoff,) = pair.compute()
    pair.decode.engine.drop_ahead(handoff.state.key)
    pair.offer(handoff)
    spin(pair, 2)
    end(pair, slow)
    assert said(pair.decode, handoff.state.key) == alone(make_bench, 1, LONG)
