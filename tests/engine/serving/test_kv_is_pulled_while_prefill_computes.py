"""What a prompt has filled is pulled before its offer: never wrong, and in nobody's way."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from baton_testing.numpy_device import ASKED_IN_VAIN
from baton_testing.pool_pair import LONG, OPTIONS, Pair, alone, fill, memory_of, said
from baton_worker.engine.api import Handoff, KvFilled, KvInPool, LeaseName
from baton_worker.engine.kv.sharing import UnfitKvError
from baton_worker.records.columns import ErrorCode

ENGINES = ("paddle", "device")


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("n_draft", [0, 3])
def test_a_prompt_that_is_pulled_while_it_is_computed_says_the_same(
    make_bench: Callable[..., Any], n_draft: int, overlap: bool
) -> None:
    limits = {"n_draft": n_draft, "overlap": overlap}
    pair = Pair(make_bench, **limits)
    key = pair.submit(1, LONG)
    (handoff,) = pair.compute()
    pair.come()
    pair.offer(handoff)
    pair.finish()
    assert said(pair.decode, key) == alone(make_bench, 1, LONG, **limits)
    assert pair.pulled() == (8, 2), "4 chunks of 2 blocks each, then the rest"
    pair.check_nothing_is_left()


def test_what_does_not_stay_is_not_told(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(share_kv=True, prefill_tokens=32)
    bench.submit(0, LONG, hand_over=True, **OPTIONS)
    bench.submit(1, LONG, **OPTIONS)
    assert not [filled for result in bench.drain() for filled in result.filled]


def test_what_is_told_grows_and_is_lent_under_what_the_offer_says(
    make_bench: Callable[..., Any],
) -> None:
    pair = Pair(make_bench)
    pair.submit(0, LONG)
    results = pair.prefill.drain()
    told = [filled.kv for result in results for filled in result.filled]
    (handoff,) = [handoff for result in results for handoff in result.handoffs]
    assert isinstance(handoff.kv, KvInPool)
    assert [len(kv.blocks) for kv in told] == [2, 4, 6, 8]
    assert all(handoff.kv.blocks[: len(kv.blocks)] == kv.blocks for kv in told)
    assert {kv.lease for kv in told} == {handoff.kv.lease}


def test_a_word_that_was_lost_is_made_up_for_by_the_next(make_bench: Callable[..., Any]) -> None:
    pair = Pair(make_bench)
    key = pair.submit(0, LONG)
    told = fill(pair)
    pair.tell(told[2])
    pair.tell(told[0])  # late
    pair.tell(told[3])
    (handoff,) = pair.compute()
    pair.come()
    pair.offer(handoff)
    pair.finish()
    assert pair.pulled() == (8, 2)
    assert said(pair.decode, key) == alone(make_bench, 0, LONG)


def test_who_is_short_of_blocks_takes_them_and_they_are_pulled_again(
    make_bench: Callable[..., Any],
) -> None:
    limits = {"n_blocks": 12, "max_model_len": 192, "max_running": 2}
    pair = Pair(make_bench, **limits)
    key = pair.submit(0, LONG)
    (handoff,) = pair.compute()
    assert pair.pulled() == (8, 0)
    other = pair.decode.submit(5, LONG[:90], max_tokens=20)
    pair.decode.drain()
    pair.offer(handoff)
    pair.finish()
    assert pair.pulled()[1] in range(3, 11), "what was taken, and the rest"
    assert said(pair.decode, key) == alone(make_bench, 0, LONG)
    assert pair.decode.reader[other].tokens
    pair.check_nothing_is_left()


def test_running_requests_keep_what_they_grow_into(make_bench: Callable[..., Any]) -> None:
    pair = Pair(make_bench, n_blocks=10, max_model_len=160, max_running=2)
    pair.decode.submit(5, LONG[:90], max_tokens=30)
    pair.decode.step()
    free = 10 - pair.decode.engine.load().kv_blocks_used
    pair.submit(0, LONG)
    told = fill(pair)
    assert [len(filled.kv.blocks) for filled in told] == [2, 4, 6, 8]
    assert free == 4
    pair.tell(told[1])  # which would leave it none
    assert pair.pulled() == (0, 0)
    assert pair.decode.engine.load().kv_left_ahead == {"room": 1}
    pair.tell(told[0])
    assert pair.pulled() == (2, 0)


def test_what_leaves_each_who_runs_one_block_is_pulled(make_bench: Callable[..., Any]) -> None:
    pair = Pair(make_bench, n_blocks=11, max_model_len=160, max_running=2)
    pair.decode.submit(5, LONG[:90], max_tokens=30)
    pair.decode.step()
    assert pair.decode.engine.load().kv_blocks_used == 6
    pair.submit(0, LONG)
    pair.tell(fill(pair)[1])
    assert pair.pulled() == (4, 0), "of five that are free"


def test_what_is_lent_no_more_is_not_pulled(make_bench: Callable[..., Any]) -> None:
    """As where prefill preempted the prompt before its word was out."""
    pair = Pair(make_bench)
    key = pair.submit(0, LONG)
    told = fill(pair)
    first = told[-1].kv
    wrong = KvInPool(first.blocks[::-1], LeaseName(first.lease.slot, first.lease.serial + 7))
    pair.tell(KvFilled(told[-1].key, wrong))
    assert pair.pulled() == (0, 0)
    assert pair.decode.engine.load().kv_left_ahead == {"lease": 1}
    pair.prefill.engine.abort(key)
    pair.prefill.drain()
    pair.tell(told[-1])
    assert pair.pulled() == (0, 0)


def test_a_prompt_that_prefill_preempted_is_told_anew(make_bench: Callable[..., Any]) -> None:
    limits = {"n_blocks": 14, "max_model_len": 192, "max_running": 2, "prefill_tokens": 6}
    pair = Pair(make_bench, **limits)
    pair.prefill.submit(7, LONG[3:50], max_tokens=60, priority=-1)
    while not pair.prefill.step().columns.n_rows:
        pass
    key = pair.submit(0, LONG)
    leases = set()
    handoffs: list[Handoff] = []
    while not handoffs:
        result = pair.prefill.step()
        leases |= {filled.kv.lease for filled in result.filled}
        for filled in result.filled:
            pair.tell(filled)
        handoffs += result.handoffs
    assert len(leases) == 2, "the running one grew"
    pair.offer(handoffs[0])
    pair.finish()
    assert pair.pulled()[0] > 9, "as much as there was, and again"
    assert said(pair.decode, key) == alone(make_bench, 0, LONG)
    pair.prefill.drain()
    pair.check_nothing_is_left()


def let_end(pair: Pair) -> None:
    """Ask after copies under way until they have ended by themselves."""
    for _ in range(ASKED_IN_VAIN + 1):
        pair.decode.engine.has_work()


@pytest.mark.parametrize("n_told", [1, 3])
def test_what_is_dropped_is_free_and_its_content_is_nobodys(
    make_bench: Callable[..., Any], n_told: int
) -> None:
    pair = Pair(make_bench)
    pair.submit(0, LONG)
    for _ in range(n_told):
        for filled in pair.prefill.step().filled:
            pair.tell(filled)
    key = filled.key
    pair.decode.engine.drop_ahead(key)
    pair.decode.engine.drop_ahead(key)
    let_end(pair)
    load = pair.decode.engine.load()
    assert (load.kv_blocks_used, load.kv_blocks_cached) == (0, 0)
    pair.decode.engine.check_integrity()
    assert pair.decode.engine._parts.allocator.n_free == load.kv_blocks_total


@pytest.mark.parametrize(
    "blocks",
    [(0,), (1,), (-1,), (10**9,), tuple(range(2, 13))],
    ids=["null", "trash", "negative", "behind", "more than its prompt has"],
)
def test_what_no_pool_has_is_not_pulled(
    make_bench: Callable[..., Any], blocks: tuple[int, ...]
) -> None:
    pair = Pair(make_bench)
    key = pair.submit(0, LONG)
    pair.tell(KvFilled(key, KvInPool(blocks, LeaseName(0, 1))))
    assert pair.pulled() == (0, 0)
    assert pair.decode.engine.load().kv_left_ahead == {"blocks": 1}
    pair.decode.engine.check_integrity()


def test_nobody_has_told_what_a_request_that_is_here_needs(make_bench: Callable[..., Any]) -> None:
    pair = Pair(make_bench)
    pair.submit(0, LONG)
    told = fill(pair)
    (handoff,) = pair.compute(1)
    pair.offer(handoff)
    pair.tell(told[-1])  # late
    pair.finish()
    pair.check_nothing_is_left()


def test_what_a_device_pulled_and_nobody_took_is_cleared_before_the_next_holder(
    make_bench: Callable[..., Any],
) -> None:
    pair = Pair(make_bench, n_blocks=10, max_model_len=160, prefix_caching=False)
    pair.submit(0, LONG)
    told = fill(pair)
    sharing = pair.prefill.engine.kv.sharing
    memory = memory_of(sharing)
    memory[:] = 0xFF  # NaN in every format
    pair.tell(told[-1])
    pair.decode.engine.drop_ahead(told[-1].key)
    key = pair.decode.submit(3, LONG[:40], **OPTIONS, temperature=0.9, seed=3)
    pair.decode.drain()
    assert said(pair.decode, key) == alone(make_bench, 3, LONG[:40])


@pytest.mark.parametrize("way", ["abort", "fail"])
@pytest.mark.parametrize("after_steps", [0, 1, 2])
def test_who_ends_with_blocks_that_were_pulled_before_leaves_none(
    make_bench: Callable[..., Any], way: str, after_steps: int
) -> None:
    pair = Pair(make_bench)
    key = pair.submit(0, LONG)
    (handoff,) = pair.compute()
    pair.decode.submit(9, (5, 6, 7), max_tokens=20)
    pair.decode.step()
    pair.offer(handoff)
    for _ in range(after_steps):
        pair.decode.step()
    if way == "abort":
        pair.decode.engine.abort(key)
    else:
        pair.decode.engine.fail(key, ErrorCode.DRAINING, "so")
    pair.decode.drain()
    pair.prefill.engine.release_handoff(key)
    pair.prefill.drain()
    pair.check_nothing_is_left()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_any_order_of_what_is_told_and_what_happens_is_exact(
    make_bench: Callable[..., Any], seed: int
) -> None:
    """Words are lost or late, prompts dropped, both pools small: what is said is as if alone."""
    rng = random.Random(seed)
    limits = {"n_blocks": 18, "max_model_len": 192, "max_running": 3, "n_draft": seed % 3}
    limits |= {"overlap": bool(seed % 2)}
    pair = Pair(make_bench, **limits)
    prompts = {n: LONG[rng.randrange(60) :][: rng.randrange(20, 110)] for n in range(6)}
    keys = {n: pair.submit(n, prompt) for n, prompt in prompts.items()}
    late: list[Callable[[], None]] = []
    offered: set[Any] = set()
    while pair.prefill.engine.has_work() or late or pair.decode.engine.has_work():
        if pair.prefill.engine.has_work() and rng.random() < 0.7:
            result = pair.prefill.step()
            heard = [filled for filled in result.filled if rng.random() < 0.8]
            late += [partial(pair.tell, filled) for filled in heard]
            late += [partial(pair.offer, handoff) for handoff in result.handoffs]
            offered.update(handoff.state.key for handoff in result.handoffs)
        while late and rng.random() < 0.6:
            late.pop(0 if rng.random() < 0.8 else rng.randrange(len(late)))()
        if rng.random() < 0.1:
            pair.decode.engine.drop_ahead(rng.choice(list(keys.values())))
        if pair.decode.engine.has_work():
            for key in pair.decode.step().imported:
                pair.prefill.engine.release_handoff(key)
        pair.decode.engine.check_integrity()
    assert offered == set(keys.values())
    for n, key in keys.items():
        assert said(pair.decode, key) == alone(make_bench, n, prompts[n], n_draft=seed % 3)
        pair.decode.engine.drop_ahead(key)  # told behind its end
    pair.check_nothing_is_left()


def test_pulls_that_have_come_let_in_who_waits_though_nobody_steps(
    make_bench: Callable[..., Any],
) -> None:
    pair = Pair(make_bench, n_blocks=12, max_model_len=192, max_running=2)
    pair.submit(0, LONG)
    pair.tell(fill(pair)[-1])
    pair.come()
    other = pair.decode.submit(5, LONG[:100], max_tokens=20)
    assert pair.decode.engine.has_work()
    pair.decode.drain()
    assert pair.decode.reader[other].tokens


def test_pulls_that_have_come_let_in_who_waits_while_steps_go_ahead(
    make_bench: Callable[..., Any],
) -> None:
    pair = Pair(make_bench, n_blocks=18, max_model_len=288, max_running=2, overlap=True)
    pair.decode.submit(5, LONG[:20], max_tokens=100)
    for _ in range(3):
        pair.decode.step()
    pair.submit(0, LONG)
    pair.tell(fill(pair)[-1])
    pair.come()
    second = pair.decode.submit(6, LONG[:130], max_tokens=5)
    for _ in range(10):
        pair.decode.step()
    assert pair.decode.reader[second].tokens


@pytest.mark.parametrize("n_told", [9, 13])
def test_no_more_is_adopted_than_an_offer_names(
    make_bench: Callable[..., Any], n_told: int
) -> None:
    """A place may be for more tokens than any request may have, and an offer for fewer."""
    pair = Pair(make_bench, n_blocks=40, max_model_len=160, max_running=4)
    key = pair.submit(0, LONG[:40])
    (handoff,) = pair.compute()
    pair.decode.engine.drop_ahead(key)
    let_end(pair)
    assert isinstance(handoff.kv, KvInPool)
    told = KvInPool(tuple(range(2, 2 + n_told)), handoff.kv.lease)
    pair.tell(KvFilled(key, told), n_told * 16)
    pair.offer(handoff)
    imported = pair.decode.step().imported
    assert pair.decode.engine.load().kv_blocks_used <= 4
    for each in imported:
        pair.prefill.engine.release_handoff(each)
    pair.finish()
    assert not pair.decode.engine._parts.allocator.n_idle
    pair.check_nothing_is_left()


def test_what_was_pulled_for_an_offer_that_travels_is_forgotten(
    make_bench: Callable[..., Any],
) -> None:
    pair, other = Pair(make_bench), make_bench(prefill_tokens=32)
    pair.submit(0, LONG)
    pair.tell(fill(pair)[-1])
    other.submit(0, LONG, hand_over=True, **OPTIONS)
    (handoff,) = other.handoffs()
    pair.decode.engine.admit_handoff(handoff)
    assert not pair.decode.engine._pulls._bets
    pair.decode.drain()
    pair.decode.check_nothing_is_left()


def test_what_was_pulled_out_of_one_pool_is_not_taken_for_what_lies_in_another(
    make_bench: Callable[..., Any],
) -> None:
    """Leases of every prefill process count alike, from 1."""
    limits = {"n_blocks": 40, "max_model_len": 192, "max_running": 4}
    one = Pair(make_bench, **limits)
    two = Pair(make_bench, reader=one.prefill.reader, **limits)
    two.decode = one.decode
    key = one.submit(0, tuple(reversed(LONG)))
    one.tell(fill(one)[-1])
    assert two.submit(0, LONG) == key
    handoffs: list[Handoff] = []
    while not handoffs:
        handoffs += two.prefill.step().handoffs
    two.offer(handoffs[0])
    two.finish()
    assert said(two.decode, key) == alone(make_bench, 0, LONG)


def test_a_host_copies_no_more_at_once_than_a_step_may_move(
    make_bench: Callable[..., Any],
) -> None:
    pair = Pair(make_bench, kv_bytes_per_step=1)
    pair.submit(0, LONG)
    pair.tell(fill(pair)[-1])
    is_beside = pair.decode.engine.kv.sharing.goes_beside
    assert pair.pulled() == ((8 if is_beside else 1), 0)


def test_one_block_that_was_taken_costs_the_end_and_not_the_front(
    make_bench: Callable[..., Any],
) -> None:
    pair = Pair(make_bench, n_blocks=12, max_model_len=192, max_running=2)
    pair.submit(0, LONG)
    for filled in fill(pair):
        pair.tell(filled)
        pair.come()
    (handoff,) = pair.compute()
    assert pair.pulled() == (8, 0)
    pair.decode.submit(5, LONG[:66], max_tokens=2)  # 5 blocks, and 4 are empty
    pair.decode.drain()
    pair.offer(handoff)
    pair.finish()
    assert pair.pulled()[1] <= 4, "those of its last chunk, and what was taken"


def test_a_prompt_is_pulled_twice_at_most_however_often_it_begins_anew(
    make_bench: Callable[..., Any],
) -> None:
    pair = Pair(make_bench)
    key = pair.submit(0, LONG)
    blocks = fill(pair)[-1].kv.blocks
    for _ in range(20):
        lease = pair.prefill.engine.leases.begin()
        pair.tell(KvFilled(key, KvInPool(blocks, LeaseName(lease.slot, lease.serial))))
    assert 8 <= sum(pair.pulled()) <= 20, "of 10 that it may have"


def test_values_that_are_not_fit_are_not_tried_for_ever(
    make_bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, tries = Pair(make_bench), []
    pair.submit(0, LONG)
    told = fill(pair)[-1]

    def unfit(blocks: Any, peer: Any, theirs: Any, spans: Any) -> Any:
        tries.append(len(theirs))
        raise UnfitKvError("NaN")

    monkeypatch.setattr(pair.decode.engine.kv.sharing, "begin_pull", unfit)
    for _ in range(20):
        pair.tell(told)
    assert 8 <= sum(tries) <= 20
    assert pair.decode.engine.load().kv_blocks_used == 0
    pair.decode.engine.check_integrity()
