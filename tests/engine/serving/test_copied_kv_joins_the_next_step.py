"""KV that is copied, out of shared memory or of what was sent, is there for the step that is
launched next: its request looks on in none, and no more is copied for a step than ever.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from baton_testing.pool_pair import OPTIONS, Pair, alone, said
from baton_worker.engine.api import Handoff, KvInPool
from baton_worker.records.columns import ErrorCode, Finish

ENGINES = ("paddle", "device")
PROMPT = tuple(2 + (7 * i) % 50 for i in range(70))
OTHER = tuple(3 + (5 * i) % 40 for i in range(70))


class CopyingPair(Pair):
    """A pair of which decode has a stream already, and copies what it is offered.

    Over a device, whose copies out of a pool go beside its steps, that is what is sent.
    """

    def __init__(self, make_bench: Callable[..., Any], **limits: Any) -> None:
        super().__init__(make_bench, **{"overlap": True} | limits)
        self.other = self.decode.submit(9, OTHER, max_tokens=40, logprobs_k=2)
        for _ in range(4):
            self.decode.step()
        self.decode.engine.check_integrity()

    def offers(self, stays: bool, count: int = 1, **options: Any) -> list[Handoff]:
        for number in range(count):
            told = OPTIONS | {"temperature": 0.9 * (number % 2), "seed": number} | options
            self.prefill.submit(number, PROMPT, hand_over=True, kv_stays=stays, **told)
        offers: list[Handoff] = []
        while len(offers) < count:
            offers += self.prefill.step().handoffs
        return offers

    def offer(self, handoff: Handoff) -> None:
        if isinstance(handoff.kv, KvInPool):
            super().offer(handoff)
        else:
            self.decode.engine.admit_handoff(handoff)

    def step(self, *offers: Handoff, then: Callable[[], object] = lambda: None) -> Any:
        """Step decode; offers come while a step is under way, and `then` happens once it landed."""
        told, after = list(offers), [then]

        def serve() -> None:
            while told:
                self.offer(told.pop(0))
            while after and self.decode.engine._in_flight is None:
                after.pop()()

        result = self.decode.engine.step(serve)
        self.decode.reader.read(result)
        self.decode.engine.check_integrity()
        for key in (*result.imported, *(failed.key for failed in result.failed)):
            self.prefill.engine.release_handoff(key)
        return result

    def n_tokens(self, key: Any) -> int:
        return len(self.decode.reader[key].tokens)

    def finish(self) -> None:
        while self.decode.engine.has_work():
            self.step()
        self.prefill.drain()
        self.check_nothing_is_left()


class CountedCopies:
    """Counts the blocks that an engine copies, of which it may do so many a step."""

    def __init__(self, transfers: Any, most: int) -> None:
        self._copy, self._n = transfers._import, 0
        transfers._blocks_per_step = most
        transfers._import = self._counted

    def _counted(self, request: Any, room: int, imported: Any) -> int:
        n_blocks: int = self._copy(request, room, imported)
        self._n += n_blocks
        return n_blocks

    def taken(self) -> int:
        """Return how many since it was last asked."""
        n, self._n = self._n, 0
        return n


def other_alone(make_bench: Callable[..., Any]) -> Any:
    bench = make_bench()
    key = bench.submit(9, OTHER, max_tokens=40, logprobs_k=2)
    bench.drain()
    return said(bench, key)


def ways(engine: str) -> list[bool]:
    return [True, False] if engine == "paddle" else [False]


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.node.callspec.params["make_bench"])


@pytest.mark.parametrize("count", [1, 3])
def test_it_decodes_in_the_step_behind_the_one_in_which_it_was_offered(
    make_bench: Callable[..., Any], engine: str, count: int
) -> None:
    for stays in ways(engine):
        pair = CopyingPair(make_bench)
        offers = pair.offers(stays, count)
        keys = [offer.state.key for offer in offers]
        before = pair.n_tokens(pair.other)
        assert pair.step(*offers).imported == tuple(keys)
        pair.step()
        assert all(pair.n_tokens(key) > 1 for key in keys)
        assert pair.n_tokens(pair.other) == before + 2, "and holds up nobody"
        pair.finish()
        for number, key in enumerate(keys):
            assert said(pair.decode, key) == alone(make_bench, number, PROMPT)
        assert said(pair.decode, pair.other) == other_alone(make_bench)


def test_without_overlap_it_decodes_in_the_step_behind_its_import(
    make_bench: Callable[..., Any], engine: str
) -> None:
    for stays in ways(engine):
        pair = CopyingPair(make_bench, overlap=False)
        (offer,) = pair.offers(stays)
        pair.offer(offer)
        assert pair.step().imported == (offer.state.key,)
        pair.step()
        assert pair.n_tokens(offer.state.key) == 2, "the echo, and its own"
        pair.finish()
        assert said(pair.decode, offer.state.key) == alone(make_bench, 0, PROMPT)


def test_drafts_that_come_with_it_are_verified_there(
    make_bench: Callable[..., Any], engine: str
) -> None:
    drafting = {"n_draft": 3, "use_mtp": True}
    for stays in ways(engine):
        pair = CopyingPair(make_bench, **drafting)
        (offer,) = pair.offers(stays)
        assert len(offer.state.drafts) == 3
        pair.step(offer)
        pair.step()
        assert pair.decode.reader[offer.state.key].proposed[0] == 3
        pair.finish()
        assert said(pair.decode, offer.state.key) == alone(make_bench, 0, PROMPT)


def test_no_step_copies_more_than_it_may_and_nobody_is_passed(
    make_bench: Callable[..., Any], engine: str
) -> None:
    for stays in ways(engine):
        pair = CopyingPair(make_bench)
        offers = pair.offers(stays, 3)
        copied = CountedCopies(pair.decode.engine._transfers, 2)  # of the five blocks of each
        told = list(pair.step(*offers).imported)
        counts = [copied.taken()]
        while len(told) < 3:
            told += pair.step().imported
            counts.append(copied.taken())
        assert told == [offer.state.key for offer in offers]
        assert counts == [2, 2, 2, 2, 2, 2, 2, 1]
        pair.finish()
        for number, key in enumerate(told):
            assert said(pair.decode, key) == alone(make_bench, number, PROMPT)


@pytest.mark.parametrize("ended_by", ["abort", "refusal", "values"])
def test_who_ends_before_it_is_copied_is_told_of_once_and_leaves_nothing(
    make_bench: Callable[..., Any], engine: str, ended_by: str
) -> None:
    for stays in ways(engine):
        if (ended_by, stays) in (("refusal", False), ("values", True)):
            continue  # what is sent has no lease, what a pool of the same kind holds is fit
        pair = CopyingPair(make_bench)
        (offer,) = pair.offers(stays)
        key, then = offer.state.key, list[Callable[[], object]]()
        if ended_by == "abort":
            then.append(lambda pair=pair, key=key: pair.decode.engine.abort(key))
        elif ended_by == "refusal":
            pair.prefill.engine.release_handoff(key)
        else:
            assert isinstance(offer.kv, tuple)
            arrays = tuple(array.copy() for array in offer.kv)
            arrays[0][..., 0] = np.nan
            offer = dataclasses.replace(offer, kv=arrays)
        results = [pair.step(offer, then=lambda then=then: [call() for call in then])]
        results += [pair.step() for _ in range(3)]
        assert not any(result.imported for result in results)
        codes = {"refusal": ErrorCode.HANDOFF_REFUSED, "values": ErrorCode.INCOMPATIBLE}
        told = [failed.code for result in results for failed in result.failed]
        assert told == ([codes[ended_by]] if ended_by in codes else [])
        wanted = Finish.ABORT if ended_by == "abort" else Finish.ERROR
        assert pair.decode.reader[key].finish is wanted
        pair.prefill.engine.release_handoff(key)
        pair.finish()
        assert said(pair.decode, pair.other) == other_alone(make_bench)


def test_an_engine_that_closes_with_it_under_way_ends(
    make_bench: Callable[..., Any], engine: str
) -> None:
    for stays in ways(engine):
        pair = CopyingPair(make_bench)
        pair.step(*pair.offers(stays))
        pair.decode.engine.close()
        assert pair.decode.engine._in_flight is None


def test_who_is_copied_into_a_full_pool_goes_on_exactly(
    make_bench: Callable[..., Any], engine: str
) -> None:
    for stays in ways(engine):
        # Room for the stream as it grows, or for the handoff beside it, and not for both.
        pair = CopyingPair(make_bench, n_blocks=12, max_model_len=128, prefix_caching=False)
        (offer,) = pair.offers(stays)
        results = [pair.step(offer)]
        results += [pair.step() for _ in range(45)]
        assert [key for result in results for key in result.imported] == [offer.state.key]
        pair.finish()
        assert said(pair.decode, offer.state.key) == alone(make_bench, 0, PROMPT)
        assert said(pair.decode, pair.other) == other_alone(make_bench)


def test_blocks_of_who_was_half_copied_are_cleared_before_they_are_filled(
    make_bench: Callable[..., Any], engine: str
) -> None:
    for stays in ways(engine):
        pair = CopyingPair(make_bench, n_blocks=14, max_model_len=128)
        first, second = pair.offers(stays, 2)
        transfers = pair.decode.engine._transfers
        most = transfers._blocks_per_step
        transfers._blocks_per_step = 2
        assert not pair.step(first).imported
        pair.decode.engine.abort(first.state.key)
        pair.prefill.engine.release_handoff(first.state.key)
        pair.step()
        transfers._blocks_per_step = most
        assert pair.step(second).imported == (second.state.key,)
        pair.finish()
        assert said(pair.decode, second.state.key) == alone(make_bench, 1, PROMPT)


@pytest.mark.parametrize("how", ["abort", "finish"])
def test_a_key_that_comes_again_is_told_of_in_another_record_than_its_end(
    make_bench: Callable[..., Any], how: str
) -> None:
    pair = CopyingPair(make_bench)
    (offer,) = pair.offers(False, max_tokens=3 if how == "finish" else 12)
    key, decode = offer.state.key, pair.decode.engine
    pair.step(offer)
    pair.step()
    if how == "abort":
        assert decode.abort(key)
    again = [offer]

    def offer_again() -> None:
        if again and decode._in_flight is None and key not in decode._requests:
            decode.admit_handoff(again.pop())

    handles: list[list[int]] = []
    while decode.has_work():
        handles.append(decode.step(offer_again).columns.handle.tolist())
    assert all(len(told) == len(set(told)) for told in handles)
    assert not again
