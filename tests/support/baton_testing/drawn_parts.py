"""Models of real shape with random weights, part by part, as ranks have them: made where they lie.

Owns the names of the shapes that ranks are started for, and two ways to a rank's weights: cut out
of a whole model that every rank draws alike, where answers are compared, or drawn as a part, where
only time is. Knows no test.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from baton_testing.exactness.random_model import qwen3_8b, random_weights
from baton_worker.engine.backends.device.seam import Device
from baton_worker.engine.backends.device.weights import DeviceLayer, DeviceMtp, DeviceWeights
from baton_worker.engine.model.shape import ModelShape
from baton_worker.engine.model.shards import Shard, head_rows, local_shape

Draw = Callable[[tuple[int, ...], float], Any]
"""Returns a tensor of normal values, of this deviation around 0, or around 1 for a vector."""


def qwen3_32b(n_layers: int = 64) -> ModelShape:
    """Return the shape; without a draft layer."""
    return dataclasses.replace(
        qwen3_8b(n_layers, 0), hidden_size=5120, n_heads=64, intermediate_size=25_600
    )


def small(n_layers: int = 2) -> ModelShape:
    """Return a shape for machines without a GPU, whose vocabulary no number of ranks divides."""
    return dataclasses.replace(
        qwen3_8b(n_layers, 0),
        vocab_size=331,
        hidden_size=64,
        n_heads=8,
        n_kv_heads=4,
        head_dim=16,
        intermediate_size=96,
        max_position_embeddings=8192,
        dtype="float32",
        eos_token_ids=(3,),
    )


def shape_of(name: str) -> ModelShape:
    """Return the shape called so: `qwen3-8b/12` has 12 layers."""
    made = {"qwen3-8b": qwen3_8b, "qwen3-32b": qwen3_32b, "small": small}
    kind, _, layers = name.partition("/")
    return made[kind](int(layers)) if layers else made[kind]()


def drawn(shape: ModelShape, shard: Shard, draw: Draw, dtype: Any) -> DeviceWeights:
    """Return a part of a model that nobody has whole: for time, not for what it says."""
    local, hidden = local_shape(shape, shard.size), shape.hidden_size
    into_residual = 0.02 / (2 * shape.n_layers) ** 0.5

    def layer() -> DeviceLayer:
        norms = (draw((shape.head_dim,), 0.1), draw((shape.head_dim,), 0.1))
        return DeviceLayer(
            input_norm=draw((hidden,), 0.1),
            qkv=draw((local.q_size + 2 * local.kv_size, hidden), 0.02),
            o=draw((hidden, local.q_size), into_residual),
            post_norm=draw((hidden,), 0.1),
            gate_up=draw((2 * local.intermediate_size, hidden), 0.02),
            down=draw((hidden, local.intermediate_size), into_residual),
            qk_norm=norms if shape.has_qk_norm else None,
        )

    return DeviceWeights(
        dtype=dtype,
        embed=draw((shape.vocab_size, hidden), 1.0),
        layers=tuple(layer() for _ in range(shape.n_layers)),
        mtp=(),
        final_norm=draw((hidden,), 0.1),
        lm_head=draw((head_rows(shape.vocab_size, shard.size), hidden), 0.02),
        identity=f"drawn {shape.n_layers}",
    )


def torch_draw(torch: Any, seed: int) -> Draw:
    """Return how a rank's bfloat16 weights are drawn on the current GPU."""
    source = torch.Generator(device="cuda")
    source.manual_seed(seed)

    def draw(sizes: tuple[int, ...], scale: float) -> Any:
        made = torch.empty(sizes, device="cuda", dtype=torch.bfloat16)
        return made.normal_(1.0 if len(sizes) == 1 else 0.0, scale, generator=source)

    return draw


def host_draw(device: Device, seed: int) -> Draw:
    """Return how a rank's float32 weights are drawn for a device without a framework."""
    rng = np.random.default_rng(seed)

    def draw(sizes: tuple[int, ...], scale: float) -> Any:
        values = rng.normal(1.0 if len(sizes) == 1 else 0.0, scale, sizes).astype(np.float32)
        tensor = device.empty(sizes, "float32")
        device.upload(values, tensor)
        device.synchronise()
        return tensor

    return draw


def cut(torch: Any, shape: ModelShape, shard: Shard, seed: int = 0) -> DeviceWeights:
    """Return a part of `random_weights`, which is drawn whole and dropped."""
    whole = random_weights(torch, shape, seed)
    ids = shard.vocabulary(shape.vocab_size)
    rows = head_rows(shape.vocab_size, shard.size)
    head = torch.zeros((rows, shape.hidden_size), device="cuda", dtype=torch.bfloat16)
    head[: ids.stop - ids.start] = whole.lm_head[ids]
    return dataclasses.replace(
        whole,
        layers=tuple(_cut_layer(torch, layer, shape, shard) for layer in whole.layers),
        mtp=tuple(_cut_mtp(torch, mtp, shape, shard) for mtp in whole.mtp),
        lm_head=head,
    )


def _cut_mtp(torch: Any, mtp: DeviceMtp, shape: ModelShape, shard: Shard) -> DeviceMtp:
    return dataclasses.replace(mtp, layer=_cut_layer(torch, mtp.layer, shape, shard))


def _cut_layer(torch: Any, layer: DeviceLayer, shape: ModelShape, shard: Shard) -> DeviceLayer:
    q, kv, inner = shape.q_size, shape.kv_size, shape.intermediate_size
    heads = shard.kv_heads(shape.n_kv_heads)
    own = slice(heads.start * shape.head_dim, heads.stop * shape.head_dim)
    query, key, value = torch.split(layer.qkv, [q, kv, kv])
    gate, up = torch.split(layer.gate_up, [inner, inner])
    return dataclasses.replace(
        layer,
        qkv=torch.cat([query[shard.part(q)], key[own], value[own]]),
        o=layer.o[:, shard.part(q)].contiguous(),
        gate_up=torch.cat([gate[shard.part(inner)], up[shard.part(inner)]]),
        down=layer.down[:, shard.part(inner)].contiguous(),
    )
