"""Decode maps prefill's pool and copies blocks out of it: nothing travels, else all is the same."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import mmap
import os
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_testing.numpy_device import NumpyDevice
from baton_worker.engine.api import EngineRefusedError, Handoff, KvInPool
from baton_worker.engine.backends.device.pool import DevicePool
from baton_worker.engine.kv.layers import runs_of
from baton_worker.engine.kv.leases import Leases, mapped_leases
from baton_worker.engine.kv.memory import CannotAttachError
from baton_worker.engine.kv.payload import KvShape
from baton_worker.engine.kv.pool import KvPool
from baton_worker.engine.kv.sharing import PeerPool
from baton_worker.records.columns import ErrorCode

ENGINES = ("paddle", "device")

OPTIONS: dict[str, Any] = {"max_tokens": 12, "logprobs_k": 2}


def peer_of(prefill: Any, decode: Any) -> PeerPool:
    """Return prefill's pool as decode has it."""
    theirs = prefill.engine.kv.sharing
    peer = decode.engine.kv.sharing.attach(
        theirs.descriptors, theirs.n_bytes, prefill.engine.kv.shape
    )
    leases = prefill.engine.leases
    return peer._replace(leases=mapped_leases(leases.descriptor, leases.n_bytes))


def at_decode(handoff: Handoff, peer: PeerPool) -> Handoff:
    """Return what the transport makes of an offer."""
    assert isinstance(handoff.kv, KvInPool)
    return Handoff(handoff.state, dataclasses.replace(handoff.kv, pool=peer))


def said(bench: Any, key: Any) -> tuple[Any, ...]:
    stream = bench.reader[key]
    assert stream.tokens
    return stream.tokens, stream.logprobs, stream.ranks, stream.topk


def prefilled(bench: Any, prompts: Iterable[tuple[int, ...]], **options: Any) -> list[Handoff]:
    for n, prompt in enumerate(prompts):
        sampled = {"temperature": 0.9 * (n % 2), "seed": n}
        bench.submit(n, prompt, hand_over=True, kv_stays=True, **(OPTIONS | sampled | options))
    return bench.handoffs()


def moved(prefill: Any, decode: Any, handoffs: Iterable[Handoff]) -> list[Any]:
    """Hand over; prefill keeps its blocks until decode says that it has them."""
    peer = peer_of(prefill, decode)
    for handoff in handoffs:
        decode.engine.admit_handoff(at_decode(handoff, peer))
    results = []
    while decode.engine.has_work():
        results.append(decode.step())
        for key in results[-1].imported:
            prefill.engine.release_handoff(key)
    return results


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("n_draft", [0, 3])
def test_a_pulled_request_says_what_one_that_stayed_says(
    make_bench: Callable[..., Any], make_prompts: Any, n_draft: int, overlap: bool
) -> None:
    prompts = make_prompts(6, longest=70)
    limits = {"n_draft": n_draft, "overlap": overlap}
    alone = make_bench(**limits)
    keys = [
        alone.submit(n, prompt, **OPTIONS, temperature=0.9 * (n % 2), seed=n)
        for n, prompt in enumerate(prompts)
    ]
    alone.drain()
    prefill = make_bench(**limits, share_kv=True)
    decode = make_bench(**limits, share_kv=True, reader=prefill.reader)
    handoffs = prefilled(prefill, prompts)
    assert [handoff.sent_bytes for handoff in handoffs] == [0] * len(prompts)
    moved(prefill, decode, handoffs)
    for key in keys:
        assert said(decode, key) == said(alone, key)
    for bench in (prefill, decode):
        bench.check_nothing_is_left()


def test_prefill_keeps_its_blocks_until_decode_has_them(
    make_bench: Callable[..., Any], make_prompts: Any
) -> None:
    prefill = make_bench(share_kv=True)
    decode = make_bench(share_kv=True, reader=prefill.reader)
    handoffs = prefilled(prefill, make_prompts(3, longest=70))
    held = sum(len(handoff.kv.blocks) for handoff in handoffs)  # type: ignore[union-attr]
    assert prefill.engine.load().kv_blocks_used >= held
    moved(prefill, decode, handoffs)
    assert prefill.engine.load().kv_blocks_used == 0


def test_kv_that_travels_still_does_between_shared_pools(
    make_bench: Callable[..., Any], make_prompts: Any, hand_over: Any
) -> None:
    prefill = make_bench(share_kv=True)
    decode = make_bench(share_kv=True, reader=prefill.reader)
    prefill.submit(0, make_prompts(1)[0], hand_over=True, **OPTIONS)
    (handoff,) = prefill.handoffs()
    assert handoff.sent_bytes > 0
    hand_over(prefill, decode, [handoff])
    decode.drain()
    decode.check_nothing_is_left()


@pytest.mark.parametrize("after_steps", [1, 2])
def test_who_leaves_while_it_is_pulled_leaves_its_blocks_to_nobody_before_that_has_come(
    make_bench: Callable[..., Any], make_prompts: Any, after_steps: int
) -> None:
    """Else a copy under way would write into the next owner's KV."""
    prompts = make_prompts(2, longest=70)
    limits = {"n_blocks": 8, "max_model_len": 128, "max_running": 2, "prefix_caching": False}
    alone = make_bench(**limits)
    expected = alone.submit(7, prompts[1], **OPTIONS)
    alone.drain()
    prefill = make_bench(share_kv=True)
    decode = make_bench(**limits, share_kv=True, reader=prefill.reader)
    (handoff,) = prefilled(prefill, prompts[:1])
    peer = peer_of(prefill, decode)
    decode.engine.admit_handoff(at_decode(handoff, peer))
    decode.submit(1, (5, 6, 7), max_tokens=20)  # so that steps need not wait for the pull
    for _ in range(after_steps):
        decode.step()
    decode.engine.abort(handoff.state.key)
    next_one = decode.submit(7, prompts[1], **OPTIONS)
    decode.drain()
    assert said(decode, next_one) == said(alone, expected)
    decode.check_nothing_is_left()


def test_a_pull_that_was_preempted_is_made_again(
    make_bench: Callable[..., Any], make_prompts: Any
) -> None:
    prompts = make_prompts(4, longest=60)
    limits = {"n_blocks": 9, "max_model_len": 128, "max_running": 4, "prefix_caching": False}
    alone, prefill = make_bench(), make_bench(share_kv=True)
    keys = [
        alone.submit(n, p, **OPTIONS, temperature=0.9 * (n % 2), seed=n)
        for n, p in enumerate(prompts)
    ]
    alone.drain()
    decode = make_bench(**limits, share_kv=True, reader=prefill.reader)
    moved(prefill, decode, prefilled(prefill, prompts))
    for key in keys:
        assert said(decode, key) == said(alone, key)
    decode.check_nothing_is_left()


def test_kv_of_the_host_that_is_not_fit_is_refused(make_sim_bench: Callable[..., Any]) -> None:
    prefill = make_sim_bench(share_kv=True)
    decode = make_sim_bench(share_kv=True, reader=prefill.reader)
    (handoff,) = prefilled(prefill, [tuple(range(2, 60))])
    assert isinstance(handoff.kv, KvInPool)
    prefill.engine._parts.pool.values[0][handoff.kv.blocks[1], 0, 3, 1] = np.nan
    decode.engine.admit_handoff(at_decode(handoff, peer_of(prefill, decode)))
    (failure,) = [f for result in decode.drain() for f in result.failed]
    assert failure.code is ErrorCode.INCOMPATIBLE
    assert "NaN" in failure.message
    decode.check_nothing_is_left()


@pytest.mark.parametrize(
    ("blocks", "told"),
    [
        ((2, 3, 4), "3 blocks, 4"),
        ((2, 3, 4, 1), "block 1"),
        ((2, 3, 4, 10**9), "block 1000000000"),
        ((2, 3, 4, -1), "block -1"),
    ],
)
def test_blocks_that_are_none_are_refused(
    make_sim_bench: Callable[..., Any], blocks: tuple[int, ...], told: str
) -> None:
    prefill, decode = make_sim_bench(share_kv=True), make_sim_bench(share_kv=True)
    (handoff,) = prefilled(prefill, [tuple(range(2, 60))])
    assert isinstance(handoff.kv, KvInPool)
    kv = KvInPool(blocks, handoff.kv.lease, peer_of(prefill, decode))
    bad = Handoff(handoff.state, kv)
    with pytest.raises(EngineRefusedError, match=told) as refusal:
        decode.engine.admit_handoff(bad)
    assert refusal.value.code is ErrorCode.INCOMPATIBLE


@pytest.mark.parametrize("after_steps", [0, 1, 2, 3])
@pytest.mark.parametrize("way", ["release", "abort", "fail"])
def test_decode_does_not_go_on_with_blocks_that_prefill_gave_to_another(
    make_bench: Callable[..., Any], way: str, after_steps: int
) -> None:
    """Prefill gives up (deadline, abort, lost gateway) what decode has heard of and not pulled."""
    prompt = tuple(2 + (7 * i) % 50 for i in range(60))
    other = tuple(3 + (11 * i) % 50 for i in range(60))
    limits = {"n_blocks": 6, "max_model_len": 96, "max_running": 1, "prefix_caching": False}
    alone = make_bench()
    expected = alone.submit(0, prompt, temperature=0.0, **OPTIONS)
    alone.drain()
    prefill = make_bench(**limits, share_kv=True)
    (handoff,) = prefilled(prefill, [prompt])
    # What prefill says of its end comes over another link, whenever.
    decode = make_bench(share_kv=True, reader=copy.deepcopy(prefill.reader))
    key = handoff.state.key
    decode.submit(9, (5, 6, 7), max_tokens=20)  # so that steps need not wait for the pull
    decode.engine.admit_handoff(at_decode(handoff, peer_of(prefill, decode)))
    results = [decode.step() for _ in range(after_steps)]
    if way == "abort":
        prefill.engine.abort(key)
    elif way == "fail":
        prefill.engine.fail(key, ErrorCode.DRAINING, "so")
    prefill.engine.release_handoff(key)  # what the loop does at HandoffFailed
    prefill.submit(1, other, hand_over=True, kv_stays=True, **OPTIONS)
    prefill.drain()
    results += decode.drain()
    failed = [failure for result in results for failure in result.failed]
    if failed:
        assert [failure.code for failure in failed] == [ErrorCode.HANDOFF_REFUSED]
        assert not any(key in result.imported for result in results)
    else:
        assert after_steps, "it cannot have been read before"
        assert said(decode, key) == said(alone, expected)
    decode.check_nothing_is_left()


def test_kv_that_was_pulled_and_refused_is_cleared_before_the_next_holder(
    make_bench: Callable[..., Any], make_prompts: Any
) -> None:
    """A device does not look at what it pulls, and a NaN spoils whoever is beside it."""
    limits = {"n_blocks": 8, "max_model_len": 128, "max_running": 2, "prefix_caching": False}
    prefill = make_bench(share_kv=True)
    decode = make_bench(**limits, share_kv=True, reader=prefill.reader)
    (handoff,) = prefilled(prefill, make_prompts(1, longest=70))
    decode.engine.admit_handoff(at_decode(handoff, peer_of(prefill, decode)))
    memory_of(prefill)[:] = 0xFF  # NaN in every format
    prefill.engine.release_handoff(handoff.state.key)
    assert [failure for result in decode.drain() for failure in result.failed]
    for prompt in ((5, 6, 7), tuple(range(2, 80))):
        key = decode.submit(len(prompt), prompt, **OPTIONS)
        decode.step()
        request = decode.engine._requests[key]
        rows = blocks_of(decode)[request.blocks] if decode.engine.kv.shape.is_by_block else ()
        assert np.isfinite(rows).all()
        decode.drain()


def blocks_of(bench: Any) -> npt.NDArray[np.float32]:
    shape = bench.engine.kv.shape
    assert shape.dtype == "float32"
    memory = memory_of(bench)
    whole = len(memory) - len(memory) % shape.block_bytes
    return memory[:whole].view(np.float32).reshape(-1, shape.block_bytes // 4)


def memory_of(bench: Any) -> npt.NDArray[np.uint8]:
    sharing = bench.engine.kv.sharing
    return np.frombuffer(mmap.mmap(*sharing.descriptors, sharing.n_bytes), np.uint8)


def test_a_lease_holds_until_it_is_ended_and_its_place_is_used_again() -> None:
    leases = Leases(2)
    seen = PeerPool(SHAPE, None, mapped_leases(leases.descriptor, leases.n_bytes))
    first, second = leases.begin(), leases.begin()
    assert seen.is_lent(*first[1:])
    assert seen.is_lent(*second[1:])
    first.end()
    assert not seen.is_lent(*first[1:])
    third = leases.begin()
    assert third.slot == first.slot
    assert seen.is_lent(*third[1:])
    assert not seen.is_lent(*first[1:]), "the place is another's now"


@pytest.mark.parametrize("lease", [(-1, 1), (0, 0), (1 << 40, 1), (0, 5), (511, 0)])
def test_a_lease_that_is_none_does_not_hold(lease: tuple[int, int]) -> None:
    leases = Leases(4)
    leases.begin()
    seen = PeerPool(SHAPE, None, mapped_leases(leases.descriptor, leases.n_bytes))
    assert not seen.is_lent(*lease)


def test_memory_that_may_shrink_is_not_mapped() -> None:
    """Who reads behind its end then is ended by the kernel."""
    descriptor = os.memfd_create("unsealed")
    os.truncate(descriptor, 1 << 20)
    with pytest.raises(CannotAttachError, match="may shrink"):
        mapped_leases(descriptor, 4096)
    os.close(descriptor)


SHAPE = KvShape(2, 2, 4, 8, 6)


def pools(is_by_block: bool) -> tuple[Any, Any]:
    shape = dataclasses.replace(SHAPE, is_by_block=is_by_block)
    if is_by_block:
        return tuple(DevicePool(NumpyDevice(), shape, 1 << 20, is_shared=True) for _ in "ab")
    return KvPool(shape, is_shared=True), KvPool(shape, is_shared=True)


@pytest.mark.parametrize("is_by_block", [False, True])
@pytest.mark.parametrize("field", ["n_layers", "kv_heads", "block_size", "head_dim"])
def test_a_pool_of_other_blocks_is_not_attached(is_by_block: bool, field: str) -> None:
    own, other = pools(is_by_block)
    shape = dataclasses.replace(other.shape, **{field: 1})
    with pytest.raises(CannotAttachError, match=f"its {field} is 1"):
        own.sharing.attach(other.sharing.descriptors, other.sharing.n_bytes, shape)


@pytest.mark.parametrize("is_by_block", [False, True])
def test_a_pool_that_is_smaller_than_it_says_is_not_attached(is_by_block: bool) -> None:
    own, other = pools(is_by_block)
    larger = dataclasses.replace(other.shape, n_blocks=10_000)
    descriptors, n_bytes = other.sharing.descriptors, other.sharing.n_bytes
    with pytest.raises(CannotAttachError, match="10000 blocks"):
        own.sharing.attach(descriptors, n_bytes, larger)
    with pytest.raises(CannotAttachError):
        own.sharing.attach(descriptors, 1 << 40, larger)


@pytest.mark.parametrize("is_by_block", [False, True])
def test_what_is_no_pool_is_not_attached(is_by_block: bool) -> None:
    own, other = pools(is_by_block)
    with open("/dev/null") as nothing, pytest.raises(CannotAttachError):  # noqa: PTH123
        own.sharing.attach([nothing.fileno()], other.sharing.n_bytes, other.shape)


@pytest.mark.slow
@given(
    pairs=st.lists(
        st.tuples(st.integers(2, 40), st.integers(2, 40)),
        min_size=1,
        max_size=30,
        unique_by=(lambda pair: pair[0], lambda pair: pair[1]),
    )
)
@settings(max_examples=200)
def test_neighbours_that_go_to_neighbours_are_one_piece(pairs: list[tuple[int, int]]) -> None:
    theirs, blocks = [p[0] for p in pairs], [p[1] for p in pairs]
    pieces = runs_of(theirs, blocks).tolist()
    listed = [(at + i, to + i) for at, to, count in pieces for i in range(count)]
    assert listed == pairs
    for (at, to, count), (next_at, next_to, _) in itertools.pairwise(pieces):
        assert (at + count, to + count) != (next_at, next_to)
