"""The exchange over NumPy refuses what a real one would get wrong; the collective keeps to it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_testing.numpy_device import NumpyDevice, on_device
from baton_testing.numpy_kernels import NumpyKernels
from baton_testing.numpy_ranks import HEAD_BYTES
from baton_testing.rank_heads import look_at_ranks
from baton_worker.engine.api import DeviceError, RankDiedError
from baton_worker.engine.backends.device.collective import Collective, ExchangeSizes
from baton_worker.engine.backends.device.operands import Norm
from baton_worker.engine.model.shards import Shard, head_rows

SIZES = ExchangeSizes(sum_bytes=1024, rows=4, width=8)
PATIENCE_SECONDS = 60.0


class Rank:
    """A rank's collective, on a device whose work is done when somebody waits for it."""

    def __init__(self, collective: Collective, device: NumpyDevice) -> None:
        self.collective, self.device, self.kernels = collective, device, NumpyKernels(device)

    def put(self, values: Any) -> Any:
        array = np.asarray(values, np.float32)
        tensor = self.device.empty(array.shape, "float32")
        self.device.upload(array, tensor)
        self.device.synchronise()
        return tensor

    def add(self, values: Any) -> Any:
        """Add a part to the others' and return where the sum will be."""
        array = np.asarray(values, np.float32)
        part = self.collective.part(*array.shape, "float32")
        self.device.copy(self.put(array), part)
        out = self.device.empty(array.shape, "float32")
        self.collective.sum(part, out)
        return out

    def norm(self, values: Any, residual: Any, weight: Any) -> tuple[Any, Any]:
        """Add a part to the others' and return what that makes of the residual, and its norm."""
        array = np.asarray(values, np.float32)
        part = self.collective.part(*array.shape, "float32")
        self.device.copy(self.put(array), part)
        room, out = (self.device.empty(array.shape, "float32") for _ in range(2))
        stream = self.put(residual)
        self.collective.sum_norm(part, room, stream, Norm(self.put(weight), 1e-6), out)
        return stream, out

    def look(self) -> None:
        """Refuse what was computed if not all came to it."""
        look_at_ranks(self.device, self.collective)

    def read(self, tensor: Any) -> Any:
        self.device.synchronise()
        return on_device(tensor).copy()


def group(size: int, limit_seconds: float = PATIENCE_SECONDS) -> list[Rank]:
    devices = [NumpyDevice() for _ in range(size)]
    shared = [device.shared(SIZES.buffer_bytes(NumpyKernels(device))) for device in devices]
    ranks = []
    for rank, device in enumerate(devices):
        buffers = tuple(
            own.tensor if other == rank else device.map(own.descriptor, own.n_bytes)
            for other, own in enumerate(shared)
        )
        kernels = NumpyKernels(device)
        collective = Collective(
            device, kernels, Shard(rank, size), SIZES, shared[rank], buffers, limit_seconds
        )
        ranks.append(Rank(collective, device))
    for own in shared:
        os.close(own.descriptor)
    return ranks


def together(ranks: list[Rank], work: Callable[[Rank], Any]) -> list[Any]:
    """Do work of every rank at once; what one raises is raised."""
    found: list[Any] = [None] * len(ranks)

    def one(number: int) -> None:
        try:
            found[number] = work(ranks[number])
        except Exception as error:  # noqa: BLE001 - raised by the caller
            found[number] = error

    threads = [threading.Thread(target=one, args=(n,)) for n in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    for result in found:
        if isinstance(result, Exception):
            raise result
    return found


@pytest.fixture(params=[2, 4, 8])
def ranks(request: pytest.FixtureRequest) -> list[Rank]:
    return group(request.param)


def test_every_rank_has_the_bits_of_the_ordered_sum(ranks: list[Rank]) -> None:
    rng = np.random.default_rng(1)
    parts = (rng.normal(size=(len(ranks), 7, 3, 4)) * 10.0 ** rng.integers(-6, 6)).astype(
        np.float32
    )

    def sums(rank: Rank) -> list[Any]:
        number = rank.collective.shard.rank
        return [rank.read(out) for out in [rank.add(parts[number, call]) for call in range(7)]]

    for found in together(ranks, sums):
        for call in range(7):
            wanted = parts[0, call].copy()
            for part in parts[1:, call]:
                wanted += part
            np.testing.assert_array_equal(found[call].view(np.uint32), wanted.view(np.uint32))


def test_a_sum_that_is_normed_at_once_is_the_sum_and_the_norm(ranks: list[Rank]) -> None:
    rng = np.random.default_rng(2)
    parts = rng.normal(size=(len(ranks), 2, 3, 4)).astype(np.float32)
    stream, weight = (rng.normal(size=size).astype(np.float32) for size in ((3, 4), 4))

    def work(rank: Rank) -> list[Any]:
        number = rank.collective.shard.rank
        at_once = [rank.read(of) for of in rank.norm(parts[number, 0], stream, weight)]
        apart = [rank.put(stream), rank.put(stream)]
        added = rank.add(parts[number, 0])  # on the other half
        rank.kernels.add_norm(added, apart[0], rank.put(weight), 1e-6, apart[1])
        return [*at_once, *map(rank.read, apart)]

    for found in together(ranks, work):
        np.testing.assert_array_equal(found[:2], found[2:])
        assert np.abs(found[0] - stream - parts[:, 0].sum(0)).max() < 1e-5


@pytest.mark.parametrize("rows", [1, 4, 11])
def test_logits_are_a_whole_heads_however_many_rows(rows: int) -> None:
    """More rows than are gathered at once go in several calls; columns are each rank's own."""
    ranks, vocab_size, rng = group(4), 27, np.random.default_rng(2)
    head = rng.integers(-9, 9, (vocab_size, 6)).astype(np.float32)  # in any order the same sums
    states = rng.integers(-9, 9, (rows, 6)).astype(np.float32)

    def logits(rank: Rank) -> Any:
        ids = rank.collective.shard.vocabulary(vocab_size)
        own = np.zeros((SIZES.width, 6), np.float32)
        own[: ids.stop - ids.start] = head[ids]
        out = rank.device.empty((rows, vocab_size), "float32")
        rank.collective.logits(rank.put(states), rank.put(own), out)
        rank.collective.even()
        return rank.read(out)

    whole = group(2)[0]
    wanted = whole.device.empty((rows, vocab_size), "float32")
    whole.kernels.matmul(whole.put(states), whole.put(head), wanted)
    for found in together(ranks, logits):
        np.testing.assert_array_equal(found, whole.read(wanted))


@pytest.mark.parametrize("calls", [0, 1, 2, 3])
def test_a_unit_of_work_begins_with_the_same_half(calls: int) -> None:
    def work(rank: Rank) -> int:
        for _ in range(3):
            for _ in range(calls):
                rank.add([[1.0, 2.0, 3.0, 4.0]])
            rank.collective.even()
        rank.device.synchronise()
        return rank.collective._half

    assert together(group(2), work) == [0, 0]


def test_a_half_that_is_taken_twice_running_is_told() -> None:
    def work(rank: Rank) -> None:
        rank.add([[1.0] * 4])
        rank.collective._half ^= 1
        rank.read(rank.add([[1.0] * 4]))

    with pytest.raises(DeviceError, match="half 0 is taken twice running"):
        together(group(2), work)


def test_ranks_that_make_different_calls_are_told() -> None:
    def work(rank: Rank) -> None:
        rank.read(rank.add(np.ones((1 + rank.collective.shard.rank, 4))))

    with pytest.raises(DeviceError, match="makes another call than sum"):
        together(group(2), work)


def test_a_part_that_begins_no_half_is_told() -> None:
    rank = group(2)[0]
    part = rank.device.view(rank.collective._own.tensor, HEAD_BYTES + 16, (1, 4), "float32")
    rank.collective.sum(part, rank.device.empty((1, 4), "float32"))
    with pytest.raises(DeviceError, match="begins no half"):
        rank.device.synchronise()


def test_a_part_is_of_no_use_behind_the_next_call() -> None:
    """It may be overwritten then, so that who keeps a view of it has filler."""

    def work(rank: Rank) -> Any:
        part = rank.collective.part(1, 4, "float32")
        for _ in range(2):
            rank.add([[1.0] * 4])
        rank.device.synchronise()
        return on_device(part).copy()

    for left in together(group(2), work):
        assert not (left == 1.0).any()


def test_a_rank_that_does_not_come_is_named_and_nobody_waits_again() -> None:
    first = group(2, limit_seconds=0.05)[0]
    for _ in range(2):
        assert np.isnan(first.read(first.add([[1.0] * 4]))).all()
    with pytest.raises(RankDiedError, match=r"rank 1 did not come to a sum within 0.05 s"):
        first.look()


def test_who_is_slower_than_the_limit_is_told_that_its_sums_do_not_count() -> None:
    """Rank 1 has given rank 0 up and runs on over what it reads, when that one comes."""
    slow, quick = group(2, limit_seconds=0.05)
    part = slow.collective.part(1, 4, "float32")
    slow.device.copy(slow.put([[1.0] * 4]), part)
    slow.device.synchronise()
    for value in (2.0, 3.0, 4.0):  # on the two halves in turns
        assert np.isnan(quick.read(quick.add([[value] * 4]))).all()
    out = slow.device.empty((1, 4), "float32")
    slow.collective.sum(part, out)
    np.testing.assert_array_equal(slow.read(out), [[1.0 + 4.0] * 4])  # a number, and 3 is right
    with pytest.raises(RankDiedError, match=r"rank 0 did not come .* 0.05 s, as seen by rank 1"):
        slow.look()


@pytest.mark.parametrize("error_of_0", [0, 2, 3])
def test_a_rank_0_that_stood_still_is_named_whomever_it_gave_up_then(error_of_0: int) -> None:
    first = group(4)[0]
    with pytest.raises(RankDiedError, match=r"rank 0 did not come .* as seen by rank 1"):
        first.collective.refuse(np.array([error_of_0, 1, 1, 1, 9, 9, 9, 9], np.int32))


def test_a_rank_that_rank_0_alone_gave_up_is_named() -> None:
    first = group(4)[0]
    with pytest.raises(RankDiedError, match=r"rank 2 did not come .* as seen by rank 0"):
        first.collective.refuse(np.array([3, 0, 0, 0], np.int32))


def test_who_has_all_others_is_content() -> None:
    def work(rank: Rank) -> None:
        rank.read(rank.add([[np.nan] * 4]))
        rank.look()

    together(group(2), work)


@given(st.integers(1, 400_000), st.sampled_from([1, 2, 4, 8]))
def test_every_id_is_one_ranks(vocab_size: int, size: int) -> None:
    parts = [Shard(rank, size).vocabulary(vocab_size) for rank in range(size)]
    assert [i for part in parts for i in (part.start, part.stop)] == sorted(
        i for part in parts for i in (part.start, part.stop)
    )
    assert sum(part.stop - part.start for part in parts) == vocab_size
    rows = head_rows(vocab_size, size)
    assert all(part.stop - part.start <= rows for part in parts)
    assert size == 1 or rows % 8 == 0


@given(st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from([1, 2, 4, 8]), st.integers(1, 8))
def test_every_query_head_is_where_its_kv_head_is(kv_heads: int, size: int, times: int) -> None:
    """Ranks that are more than KV heads have one that neighbours have too."""
    heads = max(kv_heads, size) * times
    for rank in range(size):
        shard = Shard(rank, size)
        own = shard.kv_heads(kv_heads)
        wanted = {head * kv_heads // heads for head in range(heads)[shard.part(heads)]}
        assert wanted == set(range(own.start, own.stop))
