"""KV goes from one worker's ranks to another's without a host in between, as many ranks or not."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_testing.engine_bench import Clock
from baton_testing.pool_pair import LONG, Pair, alone, fill, said
from baton_testing.ranked_engines import benches, options, over
from baton_testing.tiny_model import TINY_MODEL
from baton_worker.engine.api import KvFilled
from baton_worker.engine.backends.device import orders
from baton_worker.engine.backends.device.engine import DeviceEngine
from baton_worker.engine.backends.device.head_copies import head_copies
from baton_worker.engine.kv.memory import CannotAttachError
from baton_worker.engine.model.shards import Shard
from baton_worker.messages import HANDOFF_LAYERS

POWERS = st.sampled_from([1, 2, 4, 8, 16])


@given(kv_heads=POWERS, there=POWERS, here=POWERS)
def test_every_head_of_every_part_is_filled_once_with_what_it_is(
    kv_heads: int, there: int, here: int
) -> None:
    parts = {
        rank: [None] * len(range(kv_heads)[Shard(rank, here).kv_heads(kv_heads)])
        for rank in range(here)
    }
    for copy in head_copies(kv_heads, there, here):
        theirs = range(kv_heads)[Shard(copy.there, there).kv_heads(kv_heads)]
        for n in range(copy.n_heads):
            assert parts[copy.here][copy.first_here + n] is None
            parts[copy.here][copy.first_here + n] = theirs[copy.first_there + n]
    for rank, heads in parts.items():
        assert heads == list(range(kv_heads)[Shard(rank, here).kv_heads(kv_heads)])


@given(kv_heads=POWERS, ranks=POWERS)
def test_groups_that_are_alike_copy_each_part_whole_from_its_counterpart(
    kv_heads: int, ranks: int
) -> None:
    copies = head_copies(kv_heads, ranks, ranks)
    assert [(copy.there, copy.here) for copy in copies] == [(r, r) for r in range(ranks)]
    assert {copy.n_heads for copy in copies} == {max(kv_heads // ranks, 1)}


@given(kv_heads=POWERS, there=POWERS)
def test_a_head_that_many_have_is_taken_from_different_ones(kv_heads: int, there: int) -> None:
    """As many copies out of one part as must be."""
    copies = head_copies(kv_heads, there, 16)
    taken = [copy.there for copy in copies]
    assert max(map(taken.count, taken)) <= max(len(copies) // there, 1)


GROUPS = [(2, 2), (1, 2), (2, 1), (2, 4), (4, 2), (4, 1), (1, 4), (4, 4)]


@pytest.mark.parametrize(("prefill", "decode"), GROUPS)
@pytest.mark.parametrize("is_compressed", [False, True], ids=["heads", "compressed"])
def test_the_same_bits_arrive_whoever_holds_the_heads(
    make_checkpoint: Callable[..., Any], prefill: int, decode: int, is_compressed: bool
) -> None:
    folder = make_checkpoint("deepseek_v3").path if is_compressed else TINY_MODEL
    theirs, blocks = [5, 6, 3, 9], [2, 3, 8, 7]
    with over(prefill, folder) as first, over(decode, folder) as second:
        engines = [DeviceEngine(m, options(share_kv=True), Clock()) for m in (first, second)]
        source, target = (engine.pool for engine in engines)
        (form,) = source.shape.arrays(len(blocks))
        values = np.random.default_rng(1).normal(size=form.shape).astype(form.dtype)
        source.import_blocks(theirs, [values])
        source.begin_export(theirs, 64)()  # it has come on every rank
        assert source.sharing is not None
        assert target.sharing is not None
        assert len(source.sharing.descriptors) == prefill
        sharing = source.sharing
        peer = target.sharing.attach(sharing.descriptors, sharing.n_bytes, source.shape)
        untouched = target.begin_export([4, 5, 6], 48)()[0].copy()
        copy = target.sharing.begin_pull(blocks, peer, theirs)
        copy.wait()
        assert copy.has_come()
        assert copy.seconds() > 0
        (found,) = target.begin_export(blocks, 64)()
        np.testing.assert_array_equal(found.view(np.uint32), values.view(np.uint32))
        np.testing.assert_array_equal(target.begin_export([4, 5, 6], 48)()[0], untouched)
        for engine in engines:
            engine.close()


@pytest.mark.parametrize(("prefill", "decode"), GROUPS)
@pytest.mark.parametrize("is_compressed", [False, True], ids=["heads", "compressed"])
def test_some_layers_arrive_alone_whoever_holds_the_heads(
    make_checkpoint: Callable[..., Any], prefill: int, decode: int, is_compressed: bool
) -> None:
    folder = make_checkpoint("deepseek_v3").path if is_compressed else TINY_MODEL
    theirs, blocks = [5, 6, 3, 9], [2, 3, 8, 7]
    with over(prefill, folder) as first, over(decode, folder) as second:
        engines = [DeviceEngine(m, options(share_kv=True), Clock()) for m in (first, second)]
        source, target = (engine.pool for engine in engines)
        n_layers = source.shape.n_layers
        (form,) = source.shape.arrays(len(blocks))
        rng = np.random.default_rng(1)
        values, before = (rng.normal(size=form.shape).astype(form.dtype) for _ in range(2))
        source.import_blocks(theirs, [values])
        source.begin_export(theirs, 64)()
        target.import_blocks(blocks, [before])
        assert source.sharing is not None
        assert target.sharing is not None
        sharing = source.sharing
        peer = target.sharing.attach(sharing.descriptors, sharing.n_bytes, source.shape)
        spans = np.array([[0, 1], [0, 1], [1, n_layers], [0, n_layers]])
        target.sharing.begin_pull(blocks, peer, theirs, spans).wait()
        (found,) = target.begin_export(blocks, 64)()
        for at, (start, stop) in enumerate(spans.tolist()):
            before[at, start:stop] = values[at, start:stop]
        np.testing.assert_array_equal(found.view(np.uint32), before.view(np.uint32))
        for engine in engines:
            engine.close()


def test_what_was_sent_and_given_up_does_not_land_on_what_is_pulled() -> None:
    """Other ranks write what is sent beside their steps: a pull into the same block waits."""
    with over(2) as first, over(2) as second:
        engines = [DeviceEngine(m, options(share_kv=True), Clock()) for m in (first, second)]
        source, target = (engine.pool for engine in engines)
        (form,) = source.shape.arrays(2)
        ones, twos = np.full(form.shape, 1, form.dtype), np.full(form.shape, 2, form.dtype)
        source.import_blocks([2, 3], [ones])
        source.begin_export([2, 3], 32)()
        assert source.sharing is not None
        assert target.sharing is not None
        sharing = source.sharing
        peer = target.sharing.attach(sharing.descriptors, sharing.n_bytes, source.shape)
        (member,) = second.team.followers._members  # type: ignore[union-attr]
        may_go_on = threading.Event()
        member.model.device.launch(lambda: may_go_on.wait(60))
        target.import_blocks([2, 3], [twos])
        followers = engines[1]._followers
        assert followers is not None
        meet = followers.meet
        followers.meet = lambda: (may_go_on.set(), meet())[1]  # type: ignore[method-assign]
        target.sharing.begin_pull([2, 3], peer, [2, 3]).wait()
        may_go_on.set()
        np.testing.assert_array_equal(target.begin_export([2, 3], 32)()[0], ones)
        for engine in engines:
            engine.close()


def test_a_pull_is_begun_without_waiting_for_the_step_in_flight() -> None:
    """Blocks are cleared in front of most steps; the one behind covers them. Where none is, ranks
    meet on their devices: no host waits.
    """
    with over(2) as first, over(2) as second:
        pair = Pair(benches(first, second))
        key = pair.decode.submit(50, LONG[:20], max_tokens=8, logprobs_k=0)
        pool = pair.decode.engine.kv
        (form,) = pool.shape.arrays(1)
        pair.submit(1, LONG)
        told = fill(pair)
        for is_behind in (False, True):
            pool.import_blocks([40], [np.zeros(form.shape, form.dtype)])
            if not is_behind:
                pair.decode.step()
            assert pair.decode.engine._in_flight is not None
            begun = threading.Thread(target=pair.tell, args=(told[1 + is_behind],), daemon=True)
            begun.start()
            begun.join(60)
            assert not begun.is_alive(), "it waits for what only this thread's steps end"
        (handoff,) = pair.compute()
        pair.offer(handoff)
        pair.finish()
        assert pair.decode.reader[key].tokens
        pair.check_nothing_is_left()


def open_files() -> set[tuple[str, int]]:
    """Return what this process has open: what it is of, and its inode."""
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # of the listing itself
            found.add((str(path.readlink()), path.stat().st_ino))
    return found


def test_an_engine_that_is_closed_gives_all_back_at_once() -> None:
    """Without the collector of garbage: other ranks' memory is mapped, and has descriptors. What
    tests before left may go meanwhile, so what comes to be open is counted.
    """
    gc.collect()
    gc.disable()
    try:
        with over(2) as model:
            before, counts = open_files(), []
            for _ in range(3):
                engine = DeviceEngine(model, options(share_kv=True), Clock())
                engine.close()
                del engine
                model.team.followers.tell([orders.Measure()])  # type: ignore[union-attr]
                model.team.followers.answers()  # type: ignore[union-attr]
                counts.append(len(open_files() - before))
            assert counts == [counts[0]] * 3, "nothing is left of two more engines"
    finally:
        gc.enable()


@pytest.mark.slow
@pytest.mark.parametrize(("prefill", "decode"), [(2, 2), (4, 4), (1, 2), (4, 2)])
@pytest.mark.parametrize("n_draft", [0, 3])
@pytest.mark.parametrize("features", [(), (HANDOFF_LAYERS,)], ids=["blocks", "layers"])
def test_what_is_pulled_while_it_is_computed_says_the_same(
    prefill: int, decode: int, n_draft: int, features: tuple[str, ...]
) -> None:
    """In groups that are alike bit for bit what one worker says, else to the rounding of sums."""
    limits = {"n_draft": n_draft, "overlap": bool(features)}
    with over(prefill) as first, over(decode) as second:
        make = benches(first, second)
        pair, heard = Pair(make, **limits), list[KvFilled]()
        tell, told = pair.tell, {"features": features}
        pair.tell = lambda word, *n: (heard.append(word), tell(word, *n))[1]  # type: ignore[method-assign]
        keys = [pair.submit(number, LONG[: 150 - number], **told) for number in (1, 2, 3)]
        for handoff in pair.compute():
            pair.offer(handoff)
        while pair.prefill.engine.has_work():
            for handoff in pair.compute():
                pair.offer(handoff)
        pair.finish()
        assert sum(pair.pulled()) == pytest.approx(3 * 10)
        assert pair.pulled()[0] > 0, "some of it before the offer"
        assert any(word.begun.n_blocks for word in heard) == bool(features)
        pair.check_nothing_is_left()
        for number, key in zip((1, 2, 3), keys, strict=True):
            ours = said(pair.decode, key)
            theirs = alone(make, number, LONG[: 150 - number], **limits)
            assert ours[0] == theirs[0]
            if prefill == decode:
                assert ours == theirs
            np.testing.assert_allclose(ours[1], theirs[1], rtol=0, atol=5e-5)


def test_a_pool_that_no_ranks_can_have_parts_of_is_not_attached() -> None:
    with over(1) as model:
        engine = DeviceEngine(model, options(share_kv=True), Clock())
        sharing = engine.pool.sharing
        assert sharing is not None
        with pytest.raises(CannotAttachError, match="3 ranks cannot have parts of its 2 KV heads"):
            sharing.attach([*sharing.descriptors] * 3, sharing.n_bytes, engine.pool.shape)
        with pytest.raises(CannotAttachError, match="bytes"):
            sharing.attach(sharing.descriptors, sharing.n_bytes // 2, engine.pool.shape)
        engine.close()


def test_ranks_whose_pool_is_read_by_address_alone_map_nothing() -> None:
    """As where NIXL alone is used: each rank's part lies in memory that has no descriptor."""
    with over(2) as model:
        engine = DeviceEngine(model, options(share_kv=True, map_kv=False), Clock())
        sharing = engine.pool.sharing
        assert sharing is not None
        assert sharing.descriptors == ()
        assert sharing.n_ranks == 2
        engine.close()
