"""What a rank other than 0 keeps: one step's arrays and nothing of any request (R17, R18)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from baton_worker.config import ConfigError, EngineConfig, ModelConfig, ProcessConfig
from baton_worker.engine.backends.parallel import orders
from baton_worker.engine.backends.parallel.follower import Follower
from baton_worker.engine.backends.parallel.mirrored import MirroredModel, MirroredPool
from baton_worker.engine.backends.parallel.shard import ModelShard, ShardSizes, build_shard
from baton_worker.engine.build import build_engine
from baton_worker.engine.kv.layout import TokenGroup
from baton_worker.engine.kv.pool import clear_blocks
from baton_worker.engine.step.mtp import DraftSeeds, propose

BLOCKS = 24
N_MTP = 2


class Ranks:
    """A group of two whose other rank is a follower here, over the whole model. Orders pass as
    bytes."""

    size = 2

    def __init__(self, follower: Follower) -> None:
        self.follower = follower
        self.told: list[orders.Order] = []

    def tell(self, order: orders.Order) -> None:
        self._obey(order)

    def tell_each(self, by_rank: Sequence[orders.Order]) -> None:
        assert len(by_rank) == 1
        self._obey(by_rank[0])

    def ask(self, order: orders.Export) -> list[Any]:
        return [self._obey(order)]

    def _obey(self, order: orders.Order) -> Any:
        self.told.append(order)
        answer = self.follower.obey(orders.decode_order(orders.encode(order)))
        return None if answer is None else orders.decode_answer(orders.encode(answer))


@pytest.fixture
def make_shard(tiny: Any) -> Callable[[], ModelShard]:
    sizes = ShardSizes(block_size=16, n_blocks=BLOCKS, max_positions=256, n_mtp=N_MTP)
    shape = dataclasses.replace(tiny.shape, n_mtp_layers=N_MTP)
    mtp = tiny.weights.mtp[0]
    other = dataclasses.replace(mtp, proj=0.5 * np.asarray(mtp.proj))
    weights = dataclasses.replace(tiny.weights, mtp=(mtp, other))
    return lambda: build_shard(shape, weights, sizes)


@pytest.fixture
def followed(make_shard: Any) -> ModelShard:
    """The follower's own shard."""
    return make_shard()


@pytest.fixture
def follower(followed: ModelShard) -> Follower:
    return Follower(followed.model, followed.pool)


def _step(model: Any, rng: np.random.Generator, n_draft: int) -> None:
    """One step as the runner and the drafter drive a model: a prompt, its MTP pass, drafts."""
    table = np.arange(2, 10, dtype=np.int32)[None]
    groups = (TokenGroup(table, np.zeros(1, np.int64), 20),)
    plan = model.plan(groups)
    hidden = model.forward(rng.integers(5, 500, 20), plan)
    last, unscored = np.array([19]), np.array([-1], np.int32)
    seeds = DraftSeeds(last, last, table, unscored)
    propose(model, hidden, rng.integers(5, 500, (N_MTP, 20)), plan, seeds, n_draft)


def test_a_follower_repeats_every_pass_bit_for_bit(
    make_shard: Any, follower: Follower, followed: ModelShard
) -> None:
    shard, ranks = make_shard(), Ranks(follower)
    model = MirroredModel(shard.model, ranks)  # type: ignore[arg-type]
    for n_draft in (0, 1, 5):
        _step(model, np.random.default_rng(n_draft), n_draft)
        for ours, theirs in zip(
            (*shard.pool.keys, *shard.pool.values),
            (*followed.pool.keys, *followed.pool.values),
            strict=True,
        ):
            np.testing.assert_array_equal(ours, theirs)


def test_a_new_step_drops_all_that_the_last_one_left(make_shard: Any, follower: Follower) -> None:
    ranks = Ranks(follower)
    model = MirroredModel(make_shard().model, ranks)  # type: ignore[arg-type]
    _step(model, np.random.default_rng(1), 3)
    before = (follower._plan, follower._hidden)
    assert follower._output is not None
    begin = next(order for order in ranks.told if isinstance(order, orders.Forward))
    follower.obey(begin)
    assert follower._output is None
    assert follower._plan is not before[0]
    assert follower._hidden is not before[1]


def test_an_order_names_no_request() -> None:
    """Tokens, positions, tables: a rank that never hears of a request has none to forget."""
    fields = {
        name
        for order in (orders.Forward, orders.ForwardMtp, orders.Import, orders.Export, orders.Group)
        for name in order.__struct_fields__
    }
    assert fields == {
        "tokens", "groups", "layer", "source", "rows", "blocks", "arrays", "n_positions",
        "q_len", "table_width", "tables", "first_position",
    }  # fmt: skip


def test_heads_are_gathered_and_scattered_in_rank_order(
    make_shard: Any, follower: Follower, followed: ModelShard
) -> None:
    shard, rng = make_shard(), np.random.default_rng(3)
    for pool in (shard.pool, followed.pool):
        for array in (*pool.keys, *pool.values):
            array[:] = rng.normal(size=array.shape)
    whole = MirroredPool(shard.pool, Ranks(follower))  # type: ignore[arg-type]
    heads = shard.pool.shape.kv_heads
    assert whole.shape.kv_heads == 2 * heads
    exported = whole.export_blocks([4, 7], 21)
    own, theirs = shard.pool.export_blocks([4, 7], 21), followed.pool.export_blocks([4, 7], 21)
    for array, first, second in zip(exported, own, theirs, strict=True):
        np.testing.assert_array_equal(array[:, :heads], first)
        np.testing.assert_array_equal(array[:, heads:], second)
    whole.import_blocks([9, 3], exported)
    for array, again in zip(exported, whole.export_blocks([9, 3], 21), strict=True):
        np.testing.assert_array_equal(array, again)


def test_blocks_are_cleared_on_every_rank_and_no_other_is_touched(
    make_shard: Any, follower: Follower, followed: ModelShard
) -> None:
    shard = make_shard()
    for pool in (shard.pool, followed.pool):
        for array in (*pool.keys, *pool.values):
            array[:] = np.nan
    whole = MirroredPool(shard.pool, Ranks(follower))  # type: ignore[arg-type]
    blocks = [3, *range(6, 24)]
    clear_blocks(whole, blocks)
    for pool in (shard.pool, followed.pool):
        for array in (*pool.keys, *pool.values):
            cleared = [not block.any() for block in np.nan_to_num(array, nan=1.0)]
            assert [index for index, is_clear in enumerate(cleared) if is_clear] == blocks


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (4, "engine.tensor_parallel_size is 4, which does not divide .* num_key_value_heads 2"),
        (3, "engine.tensor_parallel_size is 3, which does not divide .* num_attention_heads 4"),
    ],
)
def test_a_size_that_does_not_divide_the_model_is_refused_by_field(
    tiny_model_dir: Any, size: int, message: str
) -> None:
    engine = EngineConfig(tensor_parallel_size=size)
    with pytest.raises(ConfigError, match=message):
        build_engine(ProcessConfig(model=ModelConfig(str(tiny_model_dir)), engine=engine))


def test_ranks_of_a_simulated_model_are_refused() -> None:
    with pytest.raises(ValueError, match="tensor_parallel_size is 2, but device 'sim'"):
        EngineConfig(device="sim", tensor_parallel_size=2)
