"""The shards of a tensor-parallel group partition the model by heads and intermediate width."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from baton_worker.engine.model.shape import load_shape
from baton_worker.engine.model.shards import Shard
from baton_worker.engine.model.weights import load_weights


def all_layers(weights: Any) -> list[Any]:
    return [*weights.layers, *(mtp.layer for mtp in weights.mtp)]


def all_mlps(layer: Any) -> list[Any]:
    own = layer.mixture.experts if layer.mixture else ()
    return [*own, *([layer.mlp] if layer.mlp else [])]


@pytest.mark.parametrize("storage", ["F32", "BF16"])
@pytest.mark.parametrize("family", ["ernie4_5", "mimo", "qwen3_moe", "glm4_moe"])
def test_two_shards_put_together_are_the_whole(
    make_checkpoint: Callable[..., Any], family: str, storage: str
) -> None:
    path = make_checkpoint(family, storage=storage).path
    shape = load_shape(path)
    whole = load_weights(path, shape)
    halves = [load_weights(path, shape, Shard(rank, 2)) for rank in (0, 1)]
    q, kv = shape.q_size // 2, shape.kv_size // 2
    for i, layer in enumerate(all_layers(whole)):
        parts = [all_layers(half)[i] for half in halves]
        split = [np.split(part.qkv, [q, q + kv], axis=1) for part in parts]
        rejoined = [np.concatenate(pair, axis=1) for pair in zip(*split, strict=True)]
        np.testing.assert_array_equal(np.concatenate(rejoined, axis=1), layer.qkv)
        for mlp, *cut in zip(all_mlps(layer), *map(all_mlps, parts), strict=True):
            gates = [np.split(part.gate_up, 2, axis=1) for part in cut]
            rejoined = [np.concatenate(pair, axis=1) for pair in zip(*gates, strict=True)]
            np.testing.assert_array_equal(np.concatenate(rejoined, axis=1), mlp.gate_up)
            np.testing.assert_array_equal(np.concatenate([part.down for part in cut]), mlp.down)
        if layer.mixture is not None:
            for part in parts:
                np.testing.assert_array_equal(part.mixture.router, layer.mixture.router)
        np.testing.assert_array_equal(np.concatenate([part.o for part in parts]), layer.o)
        if layer.qkv_bias is not None:
            split = [np.split(part.qkv_bias, [q, q + kv]) for part in parts]
            rejoined = [np.concatenate(pair) for pair in zip(*split, strict=True)]
            np.testing.assert_array_equal(np.concatenate(rejoined), layer.qkv_bias)
        for part in parts:
            np.testing.assert_array_equal(part.input_norm, layer.input_norm)
    np.testing.assert_array_equal(halves[0].lm_head, whole.lm_head)
    assert halves[1].lm_head.size == 0, "rank 0 alone computes logits"
    for half in halves:
        assert half.identity == whole.identity


@pytest.mark.parametrize("q_rank", [20, None])
def test_shards_split_heads_and_share_what_heads_share(
    make_checkpoint: Callable[..., Any], q_rank: int | None
) -> None:
    path = make_checkpoint("deepseek_v3", q_lora_rank=q_rank).path
    shape = load_shape(path)
    whole = load_weights(path, shape)
    halves = [load_weights(path, shape, Shard(rank, 2)) for rank in (0, 1)]
    for i, layer in enumerate(all_layers(whole)):
        parts = [all_layers(half)[i] for half in halves]
        np.testing.assert_array_equal(np.concatenate([part.o for part in parts]), layer.o)
        up = np.concatenate([part.latent.kv_up for part in parts])
        np.testing.assert_array_equal(up, layer.latent.kv_up)
        query, row = np.split(layer.qkv, [shape.projected_sizes[0]], axis=1)
        own = [query] * 2 if q_rank else np.split(query, 2, axis=1)
        for part, wanted in zip(parts, own, strict=True):
            np.testing.assert_array_equal(part.qkv, np.concatenate([wanted, row], axis=1))
            np.testing.assert_array_equal(part.latent.kv_norm, layer.latent.kv_norm)
        if q_rank:
            up = np.concatenate([part.latent.q_up for part in parts], axis=1)
            np.testing.assert_array_equal(up, layer.latent.q_up)


@pytest.mark.parametrize(
    ("size", "config", "field"),
    [
        (4, {}, "num_key_value_heads 2"),
        (3, {}, "num_attention_heads 4"),
        (2, {"intermediate_size": 33}, "intermediate_size 33"),
    ],
)
def test_a_size_that_does_not_divide_is_refused_by_field(
    make_checkpoint: Callable[..., Any], size: int, config: dict[str, int], field: str
) -> None:
    path = make_checkpoint(**config).path
    with pytest.raises(ValueError, match=f"^{field} does not divide by {size} shards"):
        load_weights(path, load_shape(path), Shard(0, size))


@pytest.mark.parametrize(("rank", "size"), [(-1, 2), (2, 2), (0, 0)])
def test_a_rank_outside_its_group_is_refused(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match=f"shard rank {rank}"):
        Shard(rank, size)
