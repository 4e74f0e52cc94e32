"""An FP8 checkpoint lands on the device as bytes and scales of rows, the host's own numbers."""

from __future__ import annotations

import dataclasses
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton_testing.e4m3_numbers import number
from baton_testing.fp8_folder import Scheme, quantise_folder
from baton_testing.numpy_device import NumpyDevice, NumpyTensor, on_device
from baton_testing.numpy_engine import uploaded
from baton_worker.engine.backends.device import placing, staging
from baton_worker.engine.backends.device.loading import load_device_weights
from baton_worker.engine.backends.device.placing import MultipliedOut, RowScales
from baton_worker.engine.backends.device.scaled_kernels import Scaled
from baton_worker.engine.backends.device.sizing import weight_bytes
from baton_worker.engine.backends.device.weights import DeviceWeights
from baton_worker.engine.load_progress import LoadProgress
from baton_worker.engine.model.checkpoint import CheckpointError, open_checkpoint
from baton_worker.engine.model.shape import ModelShape, load_shape
from baton_worker.engine.model.shards import WHOLE, Shard, local_shape
from baton_worker.engine.model.weights import load_weights

SIZES = {"hidden_size": 160, "intermediate_size": 200, "head_dim": 40}
"""Two groups along each shared dimension, the second of them short."""
CUT = {"head_dim": 64, "intermediate_size": 512, "moe_intermediate_size": 256}
"""Whole groups for two ranks."""
LATENT = {"head_dim": None, "q_lora_rank": 140, "kv_lora_rank": 132}
"""Of MLA: two groups along both ranks."""
WHOLE_HEADS = LATENT | {"qk_nope_head_dim": 64, "v_head_dim": 64}
"""Of MLA: rows of whole blocks."""
IN_BLOCKS = {"hidden_size": 256, "head_dim": 128}
"""Matrices of whole blocks, attention's too."""
SMALL_BYTES = 64 << 10
"""Of Python's objects, which are no rows."""
NUMBERS = np.array([number(bits) for bits in range(256)], np.float32)


@pytest.fixture
def make(make_checkpoint: Callable[..., Any]) -> Callable[..., Path]:
    """`make(family, scheme="fp8", kept=(), **config)`: a folder in FP8, its drafts too."""

    def made(
        family: str, scheme: Scheme = "fp8", kept: tuple[str, ...] = (), **config: Any
    ) -> Path:
        folder: Path = make_checkpoint(family, **(SIZES | config)).path
        quantise_folder(folder, scheme, kept, with_drafts=True)
        return folder

    return made


def streamed(folder: Path, shard: Shard = WHOLE, **given: Any) -> DeviceWeights:
    device = given.pop("device", None) or NumpyDevice()
    shape, checkpoint = load_shape(folder), open_checkpoint(folder)
    n_mtp = min(shape.n_mtp_layers, 1)
    return load_device_weights(device, checkpoint, shape, "float32", n_mtp, shard, **given)


def of_rows(values: Any, scales: Any) -> Any:
    """Return each row's scales, which may be stored once for each block."""
    assert len(values) in (len(scales), 128 * len(scales))
    return np.repeat(scales, len(values) // len(scales), axis=0)


def tensors(of: Any, name: str = "", as_stored: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield every tensor of some weights, by where it is: scales of each row, or as they lie."""
    if isinstance(of, NumpyTensor):
        yield name, on_device(of)
    elif isinstance(of, Scaled):
        yield f"{name}, values", NUMBERS[on_device(of.values)]
        scales = on_device(of.scales)
        yield f"{name}, scales", scales if as_stored else of_rows(on_device(of.values), scales)
    elif dataclasses.is_dataclass(of):
        for field in dataclasses.fields(of):
            yield from tensors(getattr(of, field.name), f"{name}.{field.name}", as_stored)
    elif isinstance(of, tuple):
        for index, each in enumerate(of):
            yield from tensors(each, f"{name}[{index}]", as_stored)


def same(ours: Any, theirs: Any) -> None:
    found, wanted = dict(tensors(ours)), dict(tensors(theirs))
    assert found.keys() == wanted.keys()
    for name, array in found.items():
        np.testing.assert_array_equal(array, wanted[name], err_msg=name)


@pytest.mark.parametrize("scheme", ["fp8", "block", "channel"])
@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        *((name, {}) for name in ("qwen2", "ernie4_5", "mimo", "qwen3_moe", "glm4_moe")),
        ("deepseek_v3", LATENT),
        ("qwen3_moe", IN_BLOCKS),
        ("glm4_moe", IN_BLOCKS | {"head_dim": 512}),
        ("deepseek_v3", IN_BLOCKS | WHOLE_HEADS | {"q_lora_rank": 128}),
        ("deepseek_v3", IN_BLOCKS | WHOLE_HEADS | {"q_lora_rank": None}),
    ],
)
def test_every_tensor_is_the_hosts(make: Any, family: str, sizes: Any, scheme: Scheme) -> None:
    folder = make(family, scheme, **sizes)
    shape = load_shape(folder)
    device = streamed(folder)
    host = load_weights(folder, shape)
    same(device, uploaded(NumpyDevice(), host, shape.n_mtp_layers > 0, shape))
    assert isinstance(device.layers[0].qkv, Scaled)
    assert on_device(device.layers[0].qkv.values).dtype == np.uint8
    assert device.identity == host.identity


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("family", ["mimo", "qwen3_moe", "deepseek_v3"])
def test_ranks_have_the_parts_that_ranks_of_the_host_have(make: Any, family: str) -> None:
    """Rows of blocks that other ranks have too, and columns of their own groups."""
    cut = CUT | (LATENT | {"v_head_dim": 64} if family == "deepseek_v3" else {})
    folder = make(family, num_key_value_heads=4, **cut)
    shape = load_shape(folder)
    for shard in (Shard(0, 2), Shard(1, 2)):
        device, local = streamed(folder, shard), local_shape(shape, 2)
        host = uploaded(NumpyDevice(), load_weights(folder, shape, shard), True, local)
        same((device.layers, device.mtp), (host.layers, host.mtp))


def has_blocks(weight: Any) -> bool:
    return len(on_device(weight.scales)) < len(on_device(weight.values))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "ranks", "are_blocks"),
    [
        ({}, 1, (True, False, True, False, False, False)),
        ({}, 2, (True, False, True, False, False, False)),
        ({"moe_intermediate_size": 384}, 2, (True, False, False, False, False, False)),
        ({"hidden_size": 256}, 1, (True, True, True, True, False, True)),
        ({"hidden_size": 256, "head_dim": 512}, 2, (True, True, True, True, True, True)),
        (
            {"hidden_size": 256, "intermediate_size": 200},
            1,
            (False, True, True, True, False, True),
        ),
    ],
)
@pytest.mark.parametrize("scheme", ["fp8", "block", "channel"])
def test_scales_of_whole_blocks_stay_those_of_blocks(
    make: Any, scheme: Scheme, sizes: Any, ranks: int, are_blocks: tuple[bool, ...]
) -> None:
    """Of a dense layer's gates and ups, and its down, of experts', and of attention's two: where
    each of their matrices is of whole ones on every rank.
    """
    folder = make("glm4_moe", scheme, **(CUT | {"num_key_value_heads": 4} | sizes))
    if scheme == "channel":
        ranks, are_blocks = 1, (False,) * 6
    for rank in range(ranks):
        first, *_, last = streamed(folder, Shard(rank, ranks)).layers
        assert last.mixture is not None
        of_dense, of_experts = (
            (first.gate_up, first.down),
            (last.mixture.gate_up, last.mixture.down),
        )
        found = [*of_dense, *of_experts, first.qkv, first.o]
        assert tuple(map(has_blocks, found)) == are_blocks
        assert tuple(map(has_blocks, [last.gate_up, last.down])) == are_blocks[2:4]


@pytest.mark.parametrize("sizes", [{}, WHOLE_HEADS], ids=["parts", "whole-blocks"])
def test_heads_matrices_of_compressed_rows_are_multiplied_out(make: Any, sizes: Any) -> None:
    """By the format's definition: each number times its block's scale; so bfloat16 has them."""
    folder = make("deepseek_v3", **(LATENT | sizes))
    key = "model.layers.1.self_attn.kv_b_proj"
    stored = open_checkpoint(folder)
    values, scales = (stored[f"{key}.{name}"] for name in ("weight", "weight_scale_inv"))
    by_block = np.repeat(np.repeat(scales.float32(), 128, 0), 128, 1)
    wanted = values.e4m3() * by_block[: values.shape[0], : values.shape[1]]
    latent = streamed(folder).layers[1].latent
    assert latent is not None
    np.testing.assert_array_equal(on_device(latent.kv_up), wanted)
    assert isinstance(latent.q_up, Scaled)
    kept = streamed(make("deepseek_v3", kept=(key,), **LATENT)).layers[1].latent
    assert kept is not None
    assert on_device(kept.kv_up).dtype == np.float32


@pytest.mark.slow
def test_a_piece_is_multiplied_out_through_less_than_a_readers_threads_have(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a float32 copy of the piece it would be more than the piece itself."""
    n_bytes, columns = 32 << 10, LATENT["kv_lora_rank"]
    stored = open_checkpoint(make("deepseek_v3", v_head_dim=2048, **LATENT))
    key = "model.layers.1.self_attn.kv_b_proj.weight"
    values, scales = stored[key], stored[f"{key}_scale_inv"].float32()
    whole = MultipliedOut(values, RowScales(scales, range(values.shape[0]), 128), 128)
    wanted, out = np.empty((2, *values.shape), np.float32)
    whole.write_to(wanted, slice(None))
    monkeypatch.setattr(placing, "BLOCK_BYTES", n_bytes)
    tracemalloc.start()
    try:
        whole.write_to(out, slice(None))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < n_bytes + SMALL_BYTES < out.nbytes
    np.testing.assert_array_equal(out, wanted)
    some = np.empty((30, columns), np.float32)
    whole.write_to(some, slice(117, 147))
    np.testing.assert_array_equal(some, wanted[117:147])


def test_modules_that_are_kept_stay_as_they_are(make: Any) -> None:
    kept = tuple(f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up"))
    layers = streamed(make("qwen3", kept=kept)).layers
    assert isinstance(layers[0].gate_up, Scaled)
    assert on_device(layers[1].gate_up).dtype == np.float32
    assert isinstance(layers[1].down, Scaled)


@pytest.mark.parametrize(
    ("family", "kept"),
    [
        ("qwen3", "model.layers.1.self_attn.k_proj"),
        ("qwen3_moe", "model.layers.1.mlp.experts.2.down_proj"),
    ],
)
def test_what_is_quantised_in_part_is_refused_before_a_byte_is_copied(
    make: Any, family: str, kept: str
) -> None:
    device = NumpyDevice()
    with pytest.raises(CheckpointError, match=f"{kept}.weight: the first is quantised"):
        streamed(make(family, kept=(kept,)), device=device)
    assert device.memory().peak == 0


class Added(LoadProgress):
    """Counts what it was told of as read."""

    n_added = 0

    def add(self, n_bytes: int) -> None:
        self.n_added += n_bytes
        super().add(n_bytes)


@pytest.mark.parametrize("piece", [1, 200, 1000])
def test_pieces_of_any_size_give_the_same(
    make: Any, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    folder = make("mimo")
    whole = streamed(folder)
    monkeypatch.setattr(staging, "PIECE_BYTES", piece)
    progress = Added()
    same(streamed(folder, progress=progress), whole)
    assert progress.n_added == progress.now().n_bytes > 0


EXPERTS_OF_1 = tuple(f"experts.{i}.{name}_proj" for i in range(8) for name in ("gate", "up"))


def bytes_of(weights: DeviceWeights, shape: ModelShape) -> int:
    """Return what matrices take as they lie on the device, as `weight_bytes` counts them."""
    n_bytes = 0
    for name, array in tensors(weights, as_stored=True):
        if array.ndim > 1 and not (name == ".lm_head" and shape.tie_word_embeddings):
            is_values = name.endswith("values") and ".proj" not in name
            is_of_draft = name.endswith("scales") and ".proj" in name
            n_bytes += 0 if is_of_draft else array.size * (1 if is_values else 4)
    return n_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("glm4_moe", {}),
        ("glm4_moe", {"head_dim": 512}),
        ("qwen3", {}),
        ("qwen3", {"head_dim": 128}),
        ("deepseek_v3", WHOLE_HEADS),
        ("deepseek_v3", LATENT | {"q_lora_rank": 128, "qk_nope_head_dim": 112}),
    ],
)
def test_what_weights_take_is_known_of_blocks_too(make: Any, family: str, sizes: Any) -> None:
    folder = make(family, **(CUT | {"hidden_size": 256} | sizes))
    shape = load_shape(folder)
    assert weight_bytes(shape, shape.n_mtp_layers, 4) == bytes_of(streamed(folder), shape)


@pytest.mark.parametrize("scheme", ["fp8", "channel"])
@pytest.mark.parametrize(
    ("family", "kept"),
    [
        ("qwen3", ()),
        ("mimo", ()),
        ("glm4_moe", ()),
        ("deepseek_v3", ()),
        ("deepseek_v3", ("model.layers.0.self_attn.q_b_proj",)),
        ("qwen3", ("model.layers.0.self_attn.o_proj", "model.layers.1.mlp.down_proj")),
        ("mimo", tuple(f"model.mtp_layers.0.mlp.{name}_proj" for name in ("gate", "up"))),
        ("glm4_moe", tuple(f"model.layers.1.mlp.{name}" for name in EXPERTS_OF_1)),
        ("glm4_moe", tuple(f"model.layers.3.self_attn.{name}_proj" for name in "qkv")),
    ],
)
def test_what_weights_take_is_known_before_they_are_there(
    make: Any, family: str, kept: tuple[str, ...], scheme: Scheme
) -> None:
    """Norms and biases are not counted, and a draft's projection as if it were not quantised."""
    folder = make(family, scheme, kept, **(LATENT if family == "deepseek_v3" else {}))
    shape = load_shape(folder)
    assert weight_bytes(shape, shape.n_mtp_layers, 4) == bytes_of(streamed(folder), shape)


def test_a_file_that_is_cut_meanwhile_is_named(make: Any) -> None:
    folder = make("qwen3", num_nextn_predict_layers=0)
    shape, checkpoint = load_shape(folder), open_checkpoint(folder)
    key = "model.layers.0.self_attn.q_proj.weight"
    stored = checkpoint[key]
    assert stored.file is not None
    out = np.empty(stored.shape, np.uint8)
    stored.write_to(out, slice(None))
    np.testing.assert_array_equal(NUMBERS[out], stored.e4m3())
    path = stored.file.path
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    with pytest.raises(CheckpointError, match="it was longer when it was opened"):
        load_device_weights(NumpyDevice(), checkpoint, shape, "float32", 0)
