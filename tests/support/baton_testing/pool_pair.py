"""An engine that prefills and one that decodes out of its pool; what they tell each other goes by
hand.
"""

from __future__ import annotations

import dataclasses
import mmap
from collections.abc import Callable
from typing import Any

import numpy as np

from baton_worker.engine.api import Handoff, KvFilled, KvInPool
from baton_worker.engine.kv.leases import mapped_leases
from baton_worker.engine.kv.sharing import Peer, PeerPool

OPTIONS: dict[str, Any] = {"max_tokens": 12, "logprobs_k": 2}
LONG = tuple(2 + (7 * i) % 50 for i in range(150))


class Pair:
    """Prefill with chunks of 32 tokens, and decode; what they tell each other goes by hand."""

    def __init__(self, make_bench: Callable[..., Any], reader: Any = None, **limits: Any) -> None:
        chunks = {"prefill_tokens": 32} | limits
        self.prefill = make_bench(share_kv=True, reader=reader, **chunks)
        self.decode = make_bench(share_kv=True, reader=reader or self.prefill.reader, **limits)
        self.peer = self.introduced()

    def introduced(self) -> Peer:
        """Return prefill's pool as decode has it."""
        theirs, leases = self.prefill.engine.kv.sharing, self.prefill.engine.leases
        peer: PeerPool = self.decode.engine.kv.sharing.attach(
            theirs.descriptors, theirs.n_bytes, self.prefill.engine.kv.shape
        )
        words = mapped_leases(leases.descriptor, leases.n_bytes)
        return peer._replace(leases=words)

    def submit(self, number: int, prompt: tuple[int, ...], **options: Any) -> Any:
        told = OPTIONS | {"temperature": 0.9 * (number % 2), "seed": number} | options
        return self.prefill.submit(number, prompt, hand_over=True, kv_stays=True, **told)

    def here(self, kv: KvInPool) -> KvInPool:
        """Return what the transport makes of it."""
        return dataclasses.replace(kv, pool=self.peer)

    def tell(self, filled: KvFilled, n_tokens: int = 150) -> None:
        self.decode.engine.pull_ahead(filled._replace(kv=self.here(filled.kv)), n_tokens)

    def offer(self, handoff: Handoff) -> None:
        assert isinstance(handoff.kv, KvInPool)
        self.decode.engine.admit_handoff(Handoff(handoff.state, self.here(handoff.kv)))

    def compute(self, most: int = 100) -> list[Handoff]:
        """Step prefill, all that is filled being told, until it has something to offer."""
        for _ in range(most):
            if not self.prefill.engine.has_work():
                return []
            result = self.prefill.step(self.tell)
            for filled in result.filled:
                self.tell(filled)
            if result.handoffs:
                return list(result.handoffs)
        return []

    def finish(self) -> None:
        while self.decode.engine.has_work():
            for key in self.decode.step().imported:
                self.prefill.engine.release_handoff(key)

    def come(self) -> None:
        """Let all copies come that are under way and whose offers are not here."""
        for bet in self.decode.engine._pulls._bets.values():
            for going in bet.pulls:
                going.pull.wait(60)

    def pulled(self) -> tuple[float, float]:
        """Return the blocks that were there before their offers, or will be, and all others."""
        self.come()
        self.decode.engine.has_work()
        load = self.decode.engine.load()
        return load.kv_pulled_ahead_blocks, load.kv_pulled_behind_blocks

    def check_nothing_is_left(self) -> None:
        self.prefill.check_nothing_is_left()
        self.decode.check_nothing_is_left()
        assert not self.decode.engine._pulls._bets


def memory_of(sharing: Any) -> Any:
    """Return the bytes of a shared pool, uint8[*]."""
    return np.frombuffer(mmap.mmap(*sharing.descriptors, sharing.n_bytes), np.uint8)


def fill(pair: Pair) -> list[KvFilled]:
    """Compute four chunks of the long prompt, and return what was told of each."""
    return [filled for _ in range(4) for filled in pair.prefill.step().filled]


def said(bench: Any, key: Any) -> tuple[Any, ...]:
    stream = bench.reader[key]
    assert stream.tokens
    return stream.tokens, stream.logprobs, stream.ranks, stream.topk


def alone(make_bench: Callable[..., Any], number: int, prompt: Any, **limits: Any) -> Any:
    bench = make_bench(**limits)
    told = OPTIONS | {"temperature": 0.9 * (number % 2), "seed": number}
    key = bench.submit(number, prompt, **told)
    bench.drain()
    return said(bench, key)
