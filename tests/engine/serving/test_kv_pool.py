"""Blocks are accounted for exactly, and their bytes travel without loss."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_worker.engine.kv.payload import KvShape
from baton_worker.engine.kv.pool import (
    NULL_BLOCK,
    TRASH_BLOCK,
    BlockAllocator,
    KvPool,
    OutOfBlocksError,
    PoolTooLargeError,
)

SHAPE = KvShape(n_layers=2, kv_heads=2, block_size=4, head_dim=8, n_blocks=10)


@given(st.lists(st.integers(-5, 8), max_size=60))
def test_accounting_is_exact_under_any_sequence(moves: list[int]) -> None:
    """A positive move allocates so many blocks, another one frees the table at that index."""
    allocator = BlockAllocator(12)
    tables: list[list[int]] = []
    for move in moves:
        held = sum(map(len, tables))
        if move > 12 - held:
            with pytest.raises(OutOfBlocksError):
                allocator.allocate(move)
        elif move > 0:
            tables.append(allocator.allocate(move))
        elif tables:
            allocator.free(tables.pop(move % len(tables)))
        allocator.check_integrity(tables)
        assert allocator.n_used + allocator.n_free == allocator.total == 12
        assert allocator.n_used == sum(map(len, tables))
        assert not {NULL_BLOCK, TRASH_BLOCK} & {b for table in tables for b in table}


NAMES = [bytes([n]) * 16 for n in range(6)]


class Holders:
    """Tables that hold blocks, and what each named block must hold while it is findable."""

    def __init__(self) -> None:
        self.allocator = BlockAllocator(8)
        self.tables: list[list[int]] = []

    def take(self, count: int) -> None:
        if count <= self.allocator.n_free:
            self.tables.append(self.allocator.allocate(count))

    def name(self, index: int, name: bytes) -> None:
        held = [block for table in self.tables for block in table]
        if held:
            before = self.allocator.find(name)
            self.allocator.name(held[index % len(held)], name)
            assert before in (None, self.allocator.find(name)), "a name keeps its block"

    def share(self, name: bytes) -> None:
        block = self.allocator.find(name)
        if block is not None:
            self.allocator.share([block])
            self.tables.append([block])
            assert self.allocator.find(name) == block

    def free(self, index: int) -> None:
        if self.tables:
            self.allocator.free(self.tables.pop(index % len(self.tables)))


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("take"), st.integers(0, 5)),
            st.tuples(st.just("name"), st.integers(0, 9), st.sampled_from(NAMES)),
            st.tuples(st.just("share"), st.sampled_from(NAMES)),
            st.tuples(st.just("free"), st.integers(0, 9)),
        ),
        max_size=60,
    )
)
def test_accounting_is_exact_when_blocks_are_named_and_shared(moves: list[Any]) -> None:
    holders = Holders()
    for name, *arguments in moves:
        getattr(holders, name)(*arguments)
        allocator = holders.allocator
        allocator.check_integrity(holders.tables)
        held = {block for table in holders.tables for block in table}
        assert allocator.n_used == len(held)
        assert allocator.n_free == 8 - len(held)
        assert allocator.n_idle <= allocator.n_free
    for table in holders.tables:
        holders.allocator.free(table)
    holders.allocator.check_integrity([])
    assert len(set(holders.allocator.allocate(8))) == 8
    assert all(holders.allocator.find(name) is None for name in NAMES)


def test_nameless_blocks_go_first_then_the_least_recently_used() -> None:
    allocator = BlockAllocator(5)
    old, new, plain = allocator.allocate(2), allocator.allocate(2), allocator.allocate(1)
    for block, name in zip((*old, *new), NAMES, strict=False):
        allocator.name(block, name)
    for table in (old, new, plain):
        allocator.free(table)
    assert allocator.n_idle == 4
    assert allocator.allocate(1) == plain
    assert allocator.allocate(1) == [old[1]], "of a chain the end goes first"
    assert [allocator.find(name) for name in NAMES[:4]] == [old[0], None, *new]
    allocator.share([old[0]])
    allocator.free([old[0]])
    assert allocator.allocate(2) == new, "sharing made the other one recent"
    assert [allocator.find(name) for name in NAMES[:4]] == [old[0], None, None, None]


def test_tables_lie_in_one_run_also_when_the_pool_has_gone_round() -> None:
    """What one request held, and others may still share, goes to the next in its order."""
    allocator, size = BlockAllocator(64), 16
    for number in range(12):
        blocks = allocator.allocate(size)
        assert blocks == list(range(blocks[0], blocks[0] + size))
        for index, block in enumerate(blocks):
            allocator.name(block, b"%d %d" % (number, index))
        allocator.free(blocks)
    assert allocator.n_idle == allocator.total


@given(freed=st.permutations(range(8)), count=st.integers(1, 8))
def test_blocks_are_handed_out_in_ascending_order(freed: list[int], count: int) -> None:
    allocator = BlockAllocator(8)
    blocks = allocator.allocate(8)
    for index in freed:
        if index % 2:
            allocator.name(blocks[index], bytes([index]))
        allocator.free([blocks[index]])
    taken = allocator.allocate(count)
    assert taken == sorted(taken)
    allocator.check_integrity([taken])


def test_what_was_kept_is_adopted_up_to_what_is_gone() -> None:
    allocator = BlockAllocator(6)
    blocks, names = allocator.allocate(4), [b"a", b"b", b"c", b"d"]
    allocator.taint(blocks)
    allocator.keep(blocks, names)
    allocator.forget([b"c"])
    found = allocator.kept(names)
    assert allocator.adopt(names) == found == blocks[:2]
    assert allocator.kept(names) == []
    assert allocator.find(b"d") == blocks[3], "nobody has asked for what lies behind"
    allocator.check_integrity([found])
    assert allocator.allocate(1) == [blocks[2]]
    assert allocator.take_uncleared() == [blocks[2]]
    allocator.free(found)
    assert allocator.take_uncleared() == [], "what was adopted is whole"


def test_a_block_nobody_holds_cannot_be_named() -> None:
    with pytest.raises(ValueError, match="block 3 is named but nobody holds it"):
        BlockAllocator(4).name(3, NAMES[0])


def test_freeing_twice_or_a_stranger_is_an_error_and_frees_nothing() -> None:
    allocator = BlockAllocator(4)
    blocks = allocator.allocate(2)
    for wrong in ([blocks[0], blocks[0]], [blocks[0], 99], [NULL_BLOCK]):
        with pytest.raises(ValueError, match="freed but not owned, or twice"):
            allocator.free(wrong)
        allocator.check_integrity([blocks])
    allocator.free(blocks)
    with pytest.raises(ValueError, match="freed but not owned"):
        allocator.free(blocks)


@pytest.mark.parametrize("tables", [[[2]], [[2, 3, 4]], [[2, 2]], [[2, 3], [3]]])
def test_integrity_check_sees_lost_and_doubled_blocks(tables: list[list[int]]) -> None:
    allocator = BlockAllocator(6)
    assert sorted(allocator.allocate(2)) == [2, 3]
    with pytest.raises(ValueError, match="handed out"):
        allocator.check_integrity(tables)


def test_an_allocator_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="n_blocks is 0"):
        BlockAllocator(0)


@pytest.mark.parametrize("is_shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("power", [40, 60, 80])
def test_a_pool_that_no_host_holds_is_refused_with_its_fields(power: int, is_shared: bool) -> None:
    """Some of it as more than there is, some as more than an array or a file can have."""
    shape = dataclasses.replace(SHAPE, n_blocks=1 << power)
    gibibytes = f"takes {(1 << power) * 1024 / (1 << 30):,.1f} GiB"
    told = f"engine.kv_blocks {1 << power} {gibibytes}"
    with pytest.raises(PoolTooLargeError, match=f"{re.escape(told)}.*max_running.*max_model_len"):
        KvPool(shape, is_shared)


@pytest.fixture
def filled() -> KvPool:
    pool = KvPool(SHAPE)
    rng = np.random.default_rng(0)
    for array in (*pool.keys, *pool.values):
        array[2:] = rng.normal(size=array[2:].shape)
    return pool


@pytest.mark.parametrize("n_positions", [1, 3, 4, 5, 8, 11])
def test_export_then_import_is_bitwise_and_zeroes_the_tail(
    filled: KvPool, n_positions: int
) -> None:
    source, target = [7, 3, 9], [2, 11, 5]
    arrays = filled.export_blocks(source, n_positions)
    n_blocks = -(-n_positions // 4)
    assert [a.shape for a in arrays] == [(n_blocks, 2, 4, 8)] * 4
    other = KvPool(SHAPE)
    other.import_blocks(target, arrays)
    for layer in range(2):
        for pool, copy in ((filled.keys, other.keys), (filled.values, other.values)):
            for position in range(n_blocks * 4):
                block, offset = divmod(position, 4)
                there = copy[layer][target[block], :, offset]
                here = pool[layer][source[block], :, offset]
                expected = here if position < n_positions else np.zeros_like(here)
                assert there.tobytes() == expected.tobytes()


def test_an_export_does_not_change_when_the_pool_does(filled: KvPool) -> None:
    arrays = filled.export_blocks([4], 4)
    before = [array.copy() for array in arrays]
    for array in (*filled.keys, *filled.values):
        array[:] = -1.0
    assert all((a == b).all() for a, b in zip(arrays, before, strict=True))


def test_import_takes_read_only_views(filled: KvPool) -> None:
    arrays = [
        np.frombuffer(a.tobytes(), a.dtype).reshape(a.shape)
        for a in filled.export_blocks([4, 5], 7)
    ]
    assert not arrays[0].flags.writeable
    other = KvPool(SHAPE)
    other.import_blocks([9, 8], arrays)
    assert (other.keys[0][9] == filled.keys[0][4]).all()


def test_a_wrong_number_of_arrays_is_refused(filled: KvPool) -> None:
    with pytest.raises(ValueError, match="3 KV arrays for 2 layers"):
        filled.import_blocks([4], filled.export_blocks([4], 4)[:3])


def test_a_new_pool_is_zero() -> None:
    """Masked positions keep a weight of 1.6e-28, so stale NaN would poison a row."""
    pool = KvPool(SHAPE)
    assert all((array == 0).all() for array in (*pool.keys, *pool.values))
