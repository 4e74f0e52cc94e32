"""KV of handoffs is checked and copied some blocks a step: long ones hold up no row that decodes.

However few a step takes, what is said is the same, and a request joins the batch when all is in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_worker.config import SimConfig
from baton_worker.engine.kv.pool import KvPool
from baton_worker.identity import RequestKey
from baton_worker.records.columns import ErrorCode, Finish

ENGINES = ("paddle", "device")

BLOCK_BYTES = 2 * 4 * 16 * 4
"""A block of the simulated engine: K and V, 16 positions of 4 float32."""
OPTIONS: dict[str, Any] = {"max_tokens": 10, "logprobs_k": 1, "ignore_eos": True}


class Moved:
    """Bytes that pools copied, by direction, since it was last asked."""

    def __init__(self) -> None:
        self.imported = self.exported = 0

    def taken(self) -> tuple[int, int]:
        moved = self.imported, self.exported
        self.imported = self.exported = 0
        return moved


@pytest.fixture(scope="module")
def moved() -> Iterator[Moved]:
    count = Moved()
    with pytest.MonkeyPatch.context() as patch:
        real_import, real_export = KvPool.import_blocks, KvPool.export_blocks

        def import_blocks(self: KvPool, blocks: Any, arrays: Any) -> None:
            count.imported += sum(array.nbytes for array in arrays)
            real_import(self, blocks, arrays)

        def export_blocks(self: KvPool, blocks: Any, n_positions: int) -> Any:
            arrays = real_export(self, blocks, n_positions)
            count.exported += sum(array.nbytes for array in arrays)
            return arrays

        patch.setattr(KvPool, "import_blocks", import_blocks)
        patch.setattr(KvPool, "export_blocks", export_blocks)
        yield count


def _steps(bench: Any, moved: Moved, bound: int) -> list[Any]:
    results = []
    while bench.engine.has_work():
        moved.taken()
        n_launched = 2 if bench.engine.options.overlap and not bench.engine._in_flight else 1
        results.append(bench.step())
        imported, exported = moved.taken()
        assert imported <= bound * n_launched, "an overlapped engine launches two at first"
        assert exported <= bound
        assert len(results) < 2000
    return results


def _handoffs(bench: Any, prompts: Any, moved: Moved, bound: int) -> list[Any]:
    for n, prompt in enumerate(prompts):
        bench.submit(n, prompt, temperature=0.9 * (n % 2), seed=n, hand_over=True, **OPTIONS)
    return [h for result in _steps(bench, moved, bound) for h in result.handoffs]


@pytest.mark.slow
@settings(max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=5),
    blocks_per_step=st.integers(1, 40),
    overlap=st.booleans(),
)
def test_bounded_transfers_give_what_unbounded_ones_give(
    make_sim_bench: Callable[..., Any],
    moved: Moved,
    lengths: list[int],
    blocks_per_step: int,
    overlap: bool,
) -> None:
    bound = blocks_per_step * BLOCK_BYTES
    prompts = [tuple(2 + (n * 7 + i) % 500 for i in range(size)) for n, size in enumerate(lengths)]
    whole = make_sim_bench(n_draft=2)
    keys = [
        whole.submit(n, prompt, temperature=0.9 * (n % 2), seed=n, **OPTIONS)
        for n, prompt in enumerate(prompts)
    ]
    whole.drain()
    limits = {"n_draft": 2, "kv_bytes_per_step": bound + BLOCK_BYTES - 1, "overlap": overlap}
    unbounded = make_sim_bench(n_draft=2)
    expected = _handoffs(unbounded, prompts, moved, 1 << 40)
    prefill = make_sim_bench(**limits)
    handoffs = _handoffs(prefill, prompts, moved, bound)
    for got, wanted in zip(handoffs, expected, strict=True):
        assert got.state == wanted.state
        for array, other in zip(got.kv, wanted.kv, strict=True):
            np.testing.assert_array_equal(array, other)
    decode = make_sim_bench(**limits, reader=prefill.reader)
    for handoff in handoffs:
        decode.engine.admit_handoff(handoff)
    results = _steps(decode, moved, bound)
    assert {key for result in results for key in result.imported} == set(keys)
    for key in keys:
        assert decode.reader[key].tokens == whole.reader[key].tokens
        assert decode.reader[key].logprobs == whole.reader[key].logprobs
    assert decode.engine.load().kv_blocks_used == 0


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["paddle", "sim"])
@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
def test_rows_decode_in_every_step_of_a_long_import(
    make_bench: Callable[..., Any], make_sim_bench: Callable[..., Any], engine: str, overlap: bool
) -> None:
    make = make_bench if engine == "paddle" else make_sim_bench
    prompt = tuple(2 + i % 400 for i in range(200))
    prefill = make(n_draft=1, kv_bytes_per_step=1)
    key = prefill.submit(1, prompt, temperature=0.0, hand_over=True, **OPTIONS)
    busy = prefill.submit(2, (5, 6, 7), temperature=0.0, max_tokens=40, ignore_eos=True)
    handoffs, waited = [], 0
    while not handoffs:
        before = len(prefill.reader[busy].tokens)
        handoffs += prefill.step().handoffs
        assert len(prefill.reader[busy].tokens) > before, "a step of export without a token"
        waited += 1
    assert waited >= 13, "a block a step"
    alone = make(n_draft=1)
    alone.submit(1, prompt, temperature=0.0, **OPTIONS)
    alone.drain()
    decode = make(n_draft=1, kv_bytes_per_step=1, overlap=overlap, reader=prefill.reader)
    other = decode.submit(3, (8, 9), temperature=0.0, max_tokens=60, ignore_eos=True)
    decode.step()
    decode.engine.admit_handoff(handoffs[0])
    steps = 0
    while not decode.reader[key].echoed:
        before = len(decode.reader[other].tokens)
        decode.step()
        assert len(decode.reader[other].tokens) > before, "a step of import without a token"
        steps += 1
    assert steps >= 13, "a block a step"
    decode.drain()
    assert decode.reader[key].tokens == alone.reader[key].tokens


def test_values_are_looked_at_with_the_block_that_holds_them(
    make_sim_bench: Callable[..., Any], moved: Moved
) -> None:
    prefill = make_sim_bench()
    prefill.submit(1, range(2, 122), temperature=0.0, hand_over=True, **OPTIONS)
    (handoff,) = prefill.handoffs()
    handoff.kv[1][5, 0, 3, 1] = np.nan
    decode = make_sim_bench(kv_bytes_per_step=2 * BLOCK_BYTES, reader=prefill.reader)
    decode.engine.admit_handoff(handoff)
    moved.taken()
    results = decode.drain()
    assert moved.taken()[0] == 4 * BLOCK_BYTES, "what was fit before it, and no block of its step"
    (failure,) = [f for result in results for f in result.failed]
    assert failure.code is ErrorCode.INCOMPATIBLE
    assert decode.reader[failure.key].finish is Finish.ERROR
    assert decode.engine.load().kv_blocks_used == 0


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("after", [0, 1, 3])
def test_an_abort_half_way_frees_everything_on_both_sides(
    make_sim_bench: Callable[..., Any], overlap: bool, after: int
) -> None:
    options = {"kv_bytes_per_step": 1, "overlap": overlap}
    prefill = make_sim_bench()
    prefill.submit(1, range(2, 122), temperature=0.0, hand_over=True, **OPTIONS)
    (handoff,) = prefill.handoffs()
    key = RequestKey(handoff.state.handle, handoff.state.attempt)
    decode = make_sim_bench(**options, reader=prefill.reader)
    decode.engine.admit_handoff(handoff)
    sender = make_sim_bench(**options)
    sender.submit(1, range(2, 122), temperature=0.0, hand_over=True, **OPTIONS)
    for bench in (decode, sender):
        for _ in range(1 + after):
            bench.step()
        assert bench.engine.abort(key)
        assert not any(result.handoffs or result.imported for result in bench.drain())
        assert bench.reader[key].finish is Finish.ABORT
        load = bench.engine.load()
        assert (load.kv_blocks_used, load.running, load.held_handoffs) == (0, 0, 0)


def test_an_import_that_lost_its_blocks_begins_again(make_sim_bench: Callable[..., Any]) -> None:
    """The least urgent gives its blocks to a row that grows, also while its KV comes in."""
    sender = make_sim_bench(n_draft=2)
    prompt = tuple(range(2, 202))
    sender.submit(1, prompt, temperature=0.0, hand_over=True, priority=5, **OPTIONS)
    (handoff,) = sender.handoffs()
    whole = make_sim_bench(n_draft=2)
    key = whole.submit(1, prompt, temperature=0.0, **OPTIONS)
    whole.drain()
    eager = SimConfig(0.0, 0.0, 0.0, acceptance=(1.0, 1.0, 1.0, 1.0, 1.0))  # three tokens a step
    limits = {"kv_bytes_per_step": 1, "n_blocks": 22}
    decode = make_sim_bench(eager, reader=sender.reader, n_draft=2, **limits)
    growing = [
        decode.submit(n, range(3 * n, 3 * n + 15), temperature=0.0, max_tokens=60, ignore_eos=True)
        for n in (2, 3, 4)
    ]
    decode.step()
    decode.engine.admit_handoff(handoff)
    results = []
    while not decode.reader[key].echoed:
        results.append(decode.step())
    assert sum(result.stats.preempted for result in results) > 0, "while it was coming in"
    decode.drain()
    assert {decode.reader[other].finish for other in growing} == {Finish.LENGTH}
    assert decode.reader[key].tokens == whole.reader[key].tokens
    assert decode.reader[key].proposed[0] == 2, "its drafts came with it and are still there"
