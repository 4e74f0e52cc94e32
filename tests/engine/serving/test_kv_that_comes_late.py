"""KV that takes as long as a network likes: the engine waits for none of it, and nobody's KV is
written to by what comes when its request is long gone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from baton_testing.late_pulls import LatePeer
from baton_worker.engine.api import Handoff, KvFilled, KvInPool
from baton_worker.engine.kv.leases import mapped_leases
from baton_worker.records.columns import ErrorCode

ENGINES = ("paddle", "device")
OPTIONS: dict[str, Any] = {"max_tokens": 12, "logprobs_k": 2}
PROMPT = tuple(2 + (7 * i) % 50 for i in range(70))
OTHER = tuple(3 + (5 * i) % 40 for i in range(70))


class Pair:
    def __init__(self, make_bench: Callable[..., Any], **limits: Any) -> None:
        self.prefill = make_bench(share_kv=True, prefill_tokens=32)
        self.decode = make_bench(share_kv=True, reader=self.prefill.reader, **limits)
        theirs, leases = self.prefill.engine.kv.sharing, self.prefill.engine.leases
        peer = self.decode.engine.kv.sharing.attach(
            theirs.descriptors, theirs.n_bytes, self.prefill.engine.kv.shape
        )
        words = mapped_leases(leases.descriptor, leases.n_bytes)
        self.peer = LatePeer(peer._replace(leases=words))

    def here(self, kv: KvInPool) -> KvInPool:
        return dataclasses.replace(kv, pool=self.peer)

    def handoff(
        self, number: int, prompt: tuple[int, ...], ahead: bool = False
    ) -> tuple[Any, Handoff]:
        key = self.prefill.submit(number, prompt, hand_over=True, kv_stays=True, **OPTIONS)
        while True:
            result = self.prefill.step()
            for filled in result.filled if ahead else ():
                told = KvFilled(filled.key, self.here(filled.kv))
                self.decode.engine.pull_ahead(told, len(prompt))
            if result.handoffs:
                (handoff,) = result.handoffs
                assert isinstance(handoff.kv, KvInPool)
                return key, Handoff(handoff.state, self.here(handoff.kv))

    def finish(self) -> None:
        while self.decode.engine.has_work():
            self.peer.all_come()
            for key in self.decode.step().imported:
                self.prefill.engine.release_handoff(key)

    def used(self) -> int:
        return int(self.decode.engine.load().kv_blocks_used)


def alone(make_bench: Callable[..., Any], number: int, prompt: tuple[int, ...]) -> Any:
    bench = make_bench()
    key = bench.submit(number, prompt, **OPTIONS)
    bench.drain()
    return said(bench, key)


def said(bench: Any, key: Any) -> tuple[Any, ...]:
    stream = bench.reader[key]
    assert stream.tokens
    return stream.tokens, stream.logprobs, stream.ranks, stream.topk


def test_steps_without_rows_end_though_nothing_comes(make_bench: Callable[..., Any]) -> None:
    pair = Pair(make_bench)
    key, handoff = pair.handoff(0, PROMPT)
    pair.decode.engine.admit_handoff(handoff)
    for _ in range(5):
        assert not pair.decode.step().imported
    pair.finish()
    assert said(pair.decode, key) == alone(make_bench, 0, PROMPT)
    pair.decode.check_nothing_is_left()


def test_others_decode_while_it_comes(make_bench: Callable[..., Any]) -> None:
    pair = Pair(make_bench)
    other = pair.decode.submit(9, OTHER, **OPTIONS)
    key, handoff = pair.handoff(0, PROMPT)
    pair.decode.engine.admit_handoff(handoff)
    while len(pair.decode.reader[other].tokens) < OPTIONS["max_tokens"]:
        pair.decode.step()
    assert not pair.peer.pulls[0].has_come()
    pair.finish()
    assert said(pair.decode, key) == alone(make_bench, 0, PROMPT)
    assert said(pair.decode, other) == alone(make_bench, 9, OTHER)


@pytest.mark.parametrize("ended_by", ["abort", "loss"])
def test_blocks_of_who_left_are_nobodys_before_the_last_write(
    make_bench: Callable[..., Any], ended_by: str
) -> None:
    limits = {"n_blocks": 8, "max_model_len": 128, "max_running": 2, "prefix_caching": False}
    pair = Pair(make_bench, **limits)
    key, handoff = pair.handoff(0, PROMPT)
    pair.decode.engine.admit_handoff(handoff)
    pair.decode.step()
    (pull,) = pair.peer.pulls
    if ended_by == "abort":
        assert pair.decode.engine.abort(key)
    else:
        pull.lost = "its worker is silent"
    result = pair.decode.step()
    if ended_by == "loss":
        assert [one.code for one in result.failed] == [ErrorCode.HANDOFF_PEER_LOST]
    held = pair.used()
    assert held > 0, "something may still write there"
    other = pair.decode.submit(9, OTHER, **OPTIONS)
    pair.decode.step()
    assert not pair.decode.reader[other].tokens, "there is no room for it yet"
    pair.decode.engine.check_integrity()
    pull.come()
    pair.finish()
    assert said(pair.decode, other) == alone(make_bench, 9, OTHER)
    pair.decode.check_nothing_is_left()


@pytest.mark.parametrize("offered", [True, False])
def test_what_was_pulled_ahead_and_is_not_here_is_pulled_again_elsewhere(
    make_bench: Callable[..., Any], offered: bool
) -> None:
    pair = Pair(make_bench)
    key, handoff = pair.handoff(0, PROMPT, ahead=True)
    late = list(pair.peer.pulls)
    assert late
    if offered:
        pair.decode.engine.admit_handoff(handoff)
    else:
        pair.decode.engine.drop_ahead(key)
    assert pair.used() > 0
    pair.decode.engine.check_integrity()
    other = pair.decode.submit(9, OTHER, **OPTIONS)
    pair.decode.step()
    for pull in late:
        pull.come()
    pair.finish()
    if offered:
        assert said(pair.decode, key) == alone(make_bench, 0, PROMPT)
    assert said(pair.decode, other) == alone(make_bench, 9, OTHER)
    pair.decode.check_nothing_is_left()


def test_what_has_come_unfit_or_not_at_all_ahead_is_told_by_the_offer(
    make_bench: Callable[..., Any],
) -> None:
    pair = Pair(make_bench)
    key, handoff = pair.handoff(0, PROMPT, ahead=True)
    late = list(pair.peer.pulls)
    assert late
    for pull in late:
        pull.lost = "its worker is gone"
        pull.come()
    pair.decode.engine.pull_ahead(KvFilled(key, handoff.kv), len(PROMPT))  # type: ignore[arg-type]
    assert pair.decode.engine.load().kv_left_ahead["lost"] == len(late)
    pair.decode.engine.admit_handoff(handoff)
    pair.finish()
    assert said(pair.decode, key) == alone(make_bench, 0, PROMPT)
    pair.decode.check_nothing_is_left()
