"""Whatever happens to a decode worker that reads KV as slowly as a network likes, copies it or is
sent it - offers, prompts of its own, aborts, pauses, other draft counts, pulls that are lost,
leases that end, few blocks, few bytes a step - what it says of a request is what that is given
alone, it tells once that it has its KV, and nothing is left.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton_testing.engine_bench import Reader, key
from baton_testing.late_pulls import LatePeer
from baton_testing.pool_pair import Pair, said
from baton_worker.engine.api import EngineRefusedError, Handoff, KvFilled, KvInPool
from baton_worker.engine.options import DraftSources, NgramSizes
from baton_worker.identity import RequestKey
from baton_worker.messages import DecodeTarget, Submit
from baton_worker.records.columns import ErrorCode
from baton_worker.sampling import SamplingParams

ENGINES = ("paddle", "device")
COMMON = tuple(2 + (7 * i) % 50 for i in range(48))
DRAFTS: tuple[dict[str, Any], ...] = (
    {},
    {"n_draft": 3, "use_mtp": True},
    {"n_draft": 2, "use_mtp": False, "drafts": DraftSources(0, NgramSizes(1, 3))},
)


def request(at: RequestKey, number: int, is_handed_over: bool, priority: int = 0) -> Submit:
    """Return a request whose prompt and sampling follow from a number."""
    rng = random.Random(number)
    prompt = COMMON * (number % 3 == 0) + tuple(rng.choices(range(2, 60), k=rng.randint(1, 29)))
    sampling = SamplingParams(
        max_tokens=rng.choice([2, 5, 12, 40, 60]),
        temperature=0.9 * (number % 2),
        seed=number,
        ignore_eos=True,
    )
    decode = DecodeTarget("decode-0", "", features=()) if is_handed_over else None
    return Submit(
        *at,
        prompt_token_ids=prompt,
        sampling=sampling,
        logprobs_k=number % 3,
        priority=priority,
        decode=decode,
    )


class Life(Pair):
    """A pair, and what happens to its decode; all of it follows from a seed."""

    def __init__(self, make_bench: Callable[..., Any], seed: int) -> None:
        self.rng = rng = random.Random(seed)
        same = dict(rng.choice(DRAFTS), prefix_caching=rng.random() < 0.6, max_model_len=160)
        self.prefill = make_bench(
            share_kv=True, prefill_tokens=rng.choice([32, 512]), max_running=12, **same
        )
        self.reader: Reader = self.prefill.reader
        self.decode = make_bench(
            share_kv=True,
            reader=self.reader,
            overlap=True,
            max_running=rng.choice([2, 3, 6]),
            n_blocks=rng.choice([10, 11, 12, 14, 30]),
            prefill_tokens=rng.choice([16, 512]),
            kv_bytes_per_step=rng.choice([1, 1 << 15, 1 << 23]),
            **same,
        )
        self.peer = self.introduced()
        self.late = LatePeer(self.peer)
        self.late_share = rng.choice([0.0, 0.3, 1.0])
        self.is_late: dict[RequestKey, bool] = {}
        self.numbers: dict[RequestKey, int] = {}
        self.pending: list[Handoff] = []
        self.at_decode: set[RequestKey] = set()
        self.ended: set[RequestKey] = set()
        self.imported: list[RequestKey] = []
        self.come_share = rng.choice([0.05, 0.4, 1.0])
        self.wild_share = rng.choice([0.0, 0.05, 0.15])

    def seen(self, at: RequestKey, kv: KvInPool) -> KvInPool:
        """Return what the transport makes of it: of whose KV comes late, and of whose is copied."""
        return dataclasses.replace(kv, pool=self.late if self.is_late[at] else self.peer)

    def tell(self, filled: KvFilled, n_tokens: int = 160) -> None:
        kv = self.seen(filled.key, filled.kv)
        self.decode.engine.pull_ahead(filled._replace(kv=kv), n_tokens)

    def offer(self, handoff: Handoff) -> None:
        state, kv = handoff.state, handoff.kv
        kv = self.seen(state.key, kv) if isinstance(kv, KvInPool) else kv
        self.decode.engine.admit_handoff(Handoff(state, kv))

    def happens(self) -> bool:
        return self.rng.random() < self.wild_share

    def ask(self) -> None:
        """Have somebody ask, mostly for a prompt that prefill computes."""
        at, number = key(len(self.numbers) + 1, self.rng.choice([1, 1, 2])), self.rng.randrange(30)
        is_handed_over = self.rng.random() < 0.75
        asked = request(at, number, is_handed_over, self.rng.choice([0, 0, 0, 1, -1]))
        if is_handed_over:
            self.prefill.engine.submit(asked, kv_stays=self.rng.random() < 0.8)
            self.is_late[at] = self.rng.random() < self.late_share
        else:
            self.decode.engine.submit(asked)
            self.at_decode.add(at)
        self.numbers[at] = number

    def compute_some(self) -> None:
        """Step prefill; decode is told of some of what is filled."""
        if self.prefill.engine.has_work():
            result = self.prefill.step()
            for filled in result.filled:
                if self.rng.random() < 0.5:
                    self.tell(filled)
            self.pending += result.handoffs

    def offer_one(self) -> None:
        handoff = self.pending.pop(self.rng.randrange(len(self.pending)))
        at = handoff.state.key
        try:
            self.offer(handoff)
            self.at_decode.add(at)
        except EngineRefusedError:
            self.decode.engine.drop_ahead(at)
            self.prefill.engine.release_handoff(at)
            self.ended.add(at)

    def events(self) -> None:
        """Let happen what may while a step of decode's is under way."""
        rng, engine = self.rng, self.decode.engine
        if self.pending and rng.random() < 0.5:
            self.offer_one()
        if len(self.numbers) < 10 and rng.random() < 0.3:
            self.ask()
        under_way = [pull for pull in self.late.pulls if not pull.has_come()]
        for pull in under_way:
            if rng.random() < self.come_share:
                pull.come()
        some = rng.choice(sorted(self.at_decode)) if self.at_decode else None
        if some and self.happens() and engine.abort(some):
            self.ended.add(some)
        if some and self.happens() and engine.fail(some, ErrorCode.DECODE_FULL, "late"):
            self.ended.add(some)
        if some and self.happens():
            self.prefill.engine.release_handoff(some)  # which ends its lease
        if under_way and self.happens():
            rng.choice(under_way).lost = "its worker is silent"
        if self.happens():
            engine.set_paused(frozenset(rng.choice([(1,), (2,), (1, 2)])))
        elif rng.random() < 0.3:
            engine.set_paused(frozenset())
        if engine.max_speculative_tokens and self.happens():
            engine.set_num_speculative_tokens(rng.randint(0, engine.max_speculative_tokens))

    def step_decode(self, serve: Callable[[], None]) -> None:
        if not self.decode.engine.has_work():
            return
        result = self.decode.engine.step(serve)
        self.reader.read(result)
        self.decode.engine.check_integrity()
        self.ended |= {failed.key for failed in result.failed}
        self.imported += result.imported
        for at in (*result.imported, *(failed.key for failed in result.failed)):
            self.prefill.engine.release_handoff(at)

    def live(self) -> None:
        for _ in range(self.rng.randrange(20, 70)):
            self.compute_some()
            self.events()
            self.step_decode(self.events)
        self.decode.engine.set_paused(frozenset())
        for _ in range(1000):
            self.compute_some()
            while self.pending:
                self.offer_one()
            self.late.all_come()
            self.step_decode(lambda: None)
            if not (self.decode.engine.has_work() or self.prefill.engine.has_work()):
                return
        raise AssertionError("it does not end")


@pytest.fixture(scope="module")
def alone(make_bench: Callable[..., Any]) -> Callable[[int], Any]:
    """`alone(number)`: what is said of a request that nothing happens to."""
    known: dict[int, Any] = {}

    def of(number: int) -> Any:
        if number not in known:
            bench = make_bench(max_model_len=160)
            bench.engine.submit(request(key(1), number, is_handed_over=False))
            bench.drain()
            known[number] = said(bench, key(1))
        return known[number]

    return of


@pytest.mark.slow
@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_said_is_what_a_request_is_given_alone(
    make_bench: Callable[..., Any], alone: Callable[[int], Any], seed: int
) -> None:
    life = Life(make_bench, seed)
    life.live()
    for at in life.numbers:  # of whom decode heard, and who was never offered
        life.prefill.engine.release_handoff(at)
        life.decode.engine.drop_ahead(at)
    assert not life.decode.engine.has_work()
    life.check_nothing_is_left()
    assert len(life.imported) == len({*life.imported})
    whole = {at for at in life.is_late if at in life.at_decode and at not in life.ended}
    assert whole <= {*life.imported}
    for at, number in life.numbers.items():
        wanted, found = alone(number), life.reader[at]
        told = (found.tokens, found.logprobs, found.ranks, found.topk)
        if at in life.ended:
            assert all(some == all_[: len(some)] for some, all_ in zip(told, wanted, strict=True))
        else:
            assert found.error is None
            assert told == wanted
