"""A checkpoint lands on the device as the host has it, in the layout and dtype of the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from baton_testing.numpy_device import NumpyDevice, NumpyTensor, on_device
from baton_testing.numpy_engine import heads_in_order
from baton_worker.engine import load_progress
from baton_worker.engine.api import DeviceError
from baton_worker.engine.backends.device import staging
from baton_worker.engine.backends.device.loading import load_device_weights, model_dtype
from baton_worker.engine.backends.device.seam import DType
from baton_worker.engine.backends.device.sizing import weight_bytes
from baton_worker.engine.backends.device.weights import DeviceWeights
from baton_worker.engine.model.checkpoint import StoredTensor, open_checkpoint, rounded
from baton_worker.engine.model.shape import ModelShape, load_shape
from baton_worker.engine.model.shards import Shard, head_rows
from baton_worker.engine.model.weights import Weights, load_weights


def on_host(made: Any) -> Weights:
    return load_weights(made.path, load_shape(made.path))


def streamed(
    made: Any, dtype: DType = "float32", n_mtp: int = 1, device: NumpyDevice | None = None
) -> DeviceWeights:
    model_shape = load_shape(made.path)
    return load_device_weights(
        device or NumpyDevice(), open_checkpoint(made.path), model_shape, dtype, n_mtp
    )


def values(tensor: NumpyTensor) -> npt.NDArray[np.float32]:
    array = on_device(tensor)
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return np.asarray(array, np.float32)


def mixtures(ours: Any, theirs: Any) -> list[tuple[NumpyTensor, npt.NDArray[Any]]]:
    assert (ours is None) == (theirs is None)
    if theirs is None:
        return []
    found = [(ours.router, theirs.router.T)]
    for name in ("gate_up", "down"):
        whole = np.concatenate([getattr(each, name).T for each in theirs.experts])
        found.append((getattr(ours, name), whole))
    assert (ours.choice_bias is None) == (theirs.choice_bias is None)
    if theirs.choice_bias is not None:
        found.append((ours.choice_bias, theirs.choice_bias))
    return found


def latents(ours: Any, theirs: Any) -> list[tuple[NumpyTensor, npt.NDArray[Any]]]:
    assert (ours is None) == (theirs is None)
    if theirs is None:
        return []
    assert (ours.q_up is None) == (ours.q_norm is None) == (theirs.q_up is None)
    found = [(ours.kv_norm, theirs.kv_norm)]
    found.append((ours.kv_up, theirs.kv_up.reshape(-1, theirs.kv_up.shape[2])))
    if theirs.q_up is not None:
        found += [(ours.q_up, theirs.q_up.T), (ours.q_norm, theirs.q_norm)]
    return found


def pairs(
    device: DeviceWeights, host: Weights, shape: ModelShape
) -> list[tuple[NumpyTensor, npt.NDArray[Any]]]:
    """Each of the device's tensors, with what it must equal."""
    found = [(device.embed, host.embed), (device.lm_head, host.lm_head.T)]
    found += [(device.final_norm, host.final_norm)]
    layers = list(zip(device.layers, host.layers, strict=True))
    for ours, theirs in zip(device.mtp, host.mtp, strict=True):
        layers.append((ours.layer, theirs.layer))
        found += [(ours.emb_norm, theirs.emb_norm), (ours.hidden_norm, theirs.hidden_norm)]
        found += [(ours.proj, theirs.proj.T), (ours.final_norm, theirs.final_norm)]
    for ours, theirs in layers:
        found += [(ours.qkv, heads_in_order(theirs.qkv.T, shape)), (ours.o, theirs.o.T)]
        found += [(ours.input_norm, theirs.input_norm), (ours.post_norm, theirs.post_norm)]
        assert (ours.gate_up is None) == (ours.down is None) == (theirs.mlp is None)
        if theirs.mlp is not None:
            found += [(ours.gate_up, theirs.mlp.gate_up.T), (ours.down, theirs.mlp.down.T)]
        found += mixtures(ours.mixture, theirs.mixture)
        norms = [heads_in_order(norm, shape) for norm in theirs.qk_norm or ()]
        found += list(zip(ours.qk_norm or (), norms, strict=True))
        assert (ours.qkv_bias is None) == (theirs.qkv_bias is None)
        found += latents(ours.latent, theirs.latent)
        if theirs.qkv_bias is not None:
            found.append((ours.qkv_bias, heads_in_order(theirs.qkv_bias, shape)))
    return found


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "ernie4_5",
        "qwen2",
        "qwen3",
        "mimo",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3_moe", "ernie4_5_moe")),
        "glm4_moe",
        "deepseek_v3",
    ],
)
@pytest.mark.parametrize("storage", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("tied", [True, False])
def test_every_tensor_is_the_hosts(
    make_checkpoint: Callable[..., Any], family: str, storage: str, tied: bool
) -> None:
    made = make_checkpoint(family=family, storage=storage, tie_word_embeddings=tied)
    device, host = streamed(made), on_host(made)
    for ours, theirs in pairs(device, host, load_shape(made.path)):
        np.testing.assert_array_equal(values(ours), theirs)
    assert device.identity == host.identity
    assert (device.lm_head is device.embed) == tied, "tied weights are there once"


@pytest.mark.parametrize("mtp", ["ernie", "deepseek"])
def test_both_schemes_of_draft_layers_are_read(
    make_checkpoint: Callable[..., Any], mtp: str
) -> None:
    made = make_checkpoint(mtp=mtp, shards=2)
    for ours, theirs in pairs(streamed(made), on_host(made), load_shape(made.path)):
        np.testing.assert_array_equal(values(ours), theirs)


def test_a_bfloat16_checkpoint_stays_as_it_is(make_checkpoint: Callable[..., Any]) -> None:
    made = make_checkpoint(storage="BF16")
    weights = streamed(made, "bfloat16")
    assert on_device(weights.embed).dtype == np.uint16
    for ours, theirs in pairs(weights, on_host(made), load_shape(made.path)):
        np.testing.assert_array_equal(values(ours), theirs)


def test_routers_and_their_biases_stay_float32(make_checkpoint: Callable[..., Any]) -> None:
    """Half a bit of a score may be another expert; they are small."""
    made = make_checkpoint("glm4_moe")
    mixture = streamed(made, "bfloat16").layers[1].mixture
    assert on_device(mixture.gate_up).dtype == np.uint16
    theirs = on_host(made).layers[1].mixture
    np.testing.assert_array_equal(on_device(mixture.router), theirs.router.T)
    np.testing.assert_array_equal(on_device(mixture.choice_bias), theirs.choice_bias)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("qwen3", {}),
        ("qwen3_moe", {}),
        ("ernie4_5_moe", {}),
        ("glm4_moe", {}),
        ("deepseek_v3", {}),
        ("deepseek_v3", {"q_lora_rank": None}),
    ],
)
@pytest.mark.parametrize("item_bytes", [2, 4])
def test_what_weights_take_is_known_before_they_are_there(
    make_checkpoint: Callable[..., Any], family: str, fields: dict[str, Any], item_bytes: int
) -> None:
    made = make_checkpoint(family, **fields)
    n_bytes = 0
    for key, value in made.tensors.items():
        if min(value.shape) > 1 < value.ndim:
            n_bytes += value.size * (4 if key.endswith(".mlp.gate.weight") else item_bytes)
    shape = load_shape(made.path)
    assert weight_bytes(shape, shape.n_mtp_layers, item_bytes) == n_bytes


def test_a_draft_layer_that_is_not_wanted_takes_no_memory(
    make_checkpoint: Callable[..., Any],
) -> None:
    made, with_it, without = make_checkpoint(), NumpyDevice(), NumpyDevice()
    streamed(made, device=with_it)
    assert streamed(made, n_mtp=0, device=without).mtp == ()
    assert without.memory().peak < with_it.memory().peak


@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("tied", [True, False])
def test_the_parts_of_ranks_put_together_are_the_whole(
    make_checkpoint: Callable[..., Any], family: str, size: int, tied: bool
) -> None:
    """Of two KV heads four ranks have each twice; of 96 ids they have 24 each."""
    made = make_checkpoint(family=family, tie_word_embeddings=tied, vocab_size=90)
    shape, host = load_shape(made.path), on_host(made)
    shards = [Shard(rank, size) for rank in range(size)]
    parts = [
        load_device_weights(NumpyDevice(), open_checkpoint(made.path), shape, "float32", 1, shard)
        for shard in shards
    ]
    rows = head_rows(shape.vocab_size, size)
    heads = np.concatenate([values(part.lm_head) for part in parts])
    assert heads.shape == (size * rows, shape.hidden_size)
    np.testing.assert_array_equal(heads[: shape.vocab_size], host.lm_head.T)
    assert not heads[shape.vocab_size :].any(), "void rows are zeros"
    for index, whole in enumerate((*host.layers, host.mtp[0].layer)):
        of = [(*part.layers, part.mtp[0].layer)[index] for part in parts]
        np.testing.assert_array_equal(np.concatenate([values(p.o) for p in of], 1), whole.o.T)
        np.testing.assert_array_equal(
            np.concatenate([values(p.down) for p in of], 1), whole.mlp.down.T
        )
        gates = [np.split(values(p.gate_up), 2) for p in of]
        joined = [np.concatenate(side) for side in zip(*gates, strict=True)]
        np.testing.assert_array_equal(np.concatenate(joined), whole.mlp.gate_up.T)
        query, key, value = np.split(whole.qkv.T, [shape.q_size, shape.q_size + shape.kv_size])
        for shard, part in zip(shards, of, strict=True):
            own = shard.kv_heads(shape.n_kv_heads)
            kv = slice(own.start * shape.head_dim, own.stop * shape.head_dim)
            wanted = np.concatenate([query[shard.part(shape.q_size)], key[kv], value[kv]])
            np.testing.assert_array_equal(values(part.qkv), wanted)
            if whole.qkv_bias is not None:
                query_bias, key_bias, value_bias = np.split(
                    whole.qkv_bias, [shape.q_size, shape.q_size + shape.kv_size]
                )
                bias = [query_bias[shard.part(shape.q_size)], key_bias[kv], value_bias[kv]]
                np.testing.assert_array_equal(values(part.qkv_bias), np.concatenate(bias))
            np.testing.assert_array_equal(values(part.post_norm), whole.post_norm)


@pytest.mark.parametrize("q_rank", [20, None])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_have_their_heads_matrices_and_all_of_what_heads_share(
    make_checkpoint: Callable[..., Any], size: int, q_rank: int | None
) -> None:
    """Compressed rows and what makes them are on every rank, as compressed queries are."""
    made = make_checkpoint("deepseek_v3", q_lora_rank=q_rank)
    shape, host = load_shape(made.path), on_host(made)
    parts = [
        load_device_weights(
            NumpyDevice(), open_checkpoint(made.path), shape, "float32", 1, Shard(rank, size)
        )
        for rank in range(size)
    ]
    for index, whole in enumerate((*host.layers, host.mtp[0].layer)):
        of = [(*part.layers, part.mtp[0].layer)[index] for part in parts]
        np.testing.assert_array_equal(np.concatenate([values(p.o) for p in of], 1), whole.o.T)
        up = np.concatenate([values(p.latent.kv_up) for p in of])
        np.testing.assert_array_equal(up, whole.latent.kv_up.reshape(-1, 16))
        query, row = np.split(whole.qkv.T, [shape.projected_sizes[0]])
        own = [query] * size if q_rank else np.split(query, size)
        for part, wanted in zip(of, own, strict=True):
            np.testing.assert_array_equal(values(part.qkv), np.concatenate([wanted, row]))
            np.testing.assert_array_equal(values(part.latent.kv_norm), whole.latent.kv_norm)
        if q_rank:
            up = np.concatenate([values(p.latent.q_up) for p in of])
            np.testing.assert_array_equal(up, whole.latent.q_up.T)


@pytest.mark.parametrize("piece", [1, 200, 1000])
def test_pieces_of_any_size_give_the_same(
    make_checkpoint: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    made = make_checkpoint()
    monkeypatch.setattr(staging, "PIECE_BYTES", piece)
    for ours, theirs in pairs(streamed(made), on_host(made), load_shape(made.path)):
        np.testing.assert_array_equal(values(ours), theirs)


def test_a_device_that_is_too_small_says_so(make_checkpoint: Callable[..., Any]) -> None:
    with pytest.raises(DeviceError, match="allocate float32"):
        streamed(make_checkpoint(), device=NumpyDevice(total=20_000))


def test_a_long_load_tells_how_far_it_is(
    make_checkpoint: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = make_checkpoint()
    monkeypatch.setattr(load_progress, "TOLD_SECONDS", 0.0)
    with caplog.at_level("INFO", logger=load_progress.__name__):
        streamed(made)
    told = [vars(record)["bytes_read"] for record in caplog.records]
    assert told == sorted(told)
    assert told[-2:] == [vars(caplog.records[0])["bytes"]] * 2, "all of it, and that it is over"


@pytest.mark.parametrize(
    ("storage", "wanted", "dtype"),
    [
        ("F32", "auto", "float32"),
        ("BF16", "auto", "bfloat16"),
        ("F16", "auto", "bfloat16"),
        ("BF16", "float32", "float32"),
        ("F32", "bfloat16", "bfloat16"),
    ],
)
def test_auto_is_the_checkpoints_dtype(
    make_checkpoint: Callable[..., Any], storage: str, wanted: str, dtype: str
) -> None:
    made = make_checkpoint(storage=storage)
    assert model_dtype(open_checkpoint(made.path), wanted) == dtype


def test_rounding_is_to_the_nearest_and_ties_to_even() -> None:
    bits = np.array(
        [0x3F800000, 0x3F807FFF, 0x3F808000, 0x3F808001, 0x3F818000, 0x7F7FFFFF, 0xFF800000], "<u4"
    )
    assert [hex(value) for value in rounded(bits.view("<f4")).tolist()] == [
        "0x3f80", "0x3f80", "0x3f80", "0x3f81", "0x3f82", "0x7f80", "0xff80",
    ]  # fmt: skip


def test_each_float16_is_rounded_as_its_float32_is() -> None:
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    halves = halves[np.isfinite(halves)]
    out = np.empty(halves.shape, np.uint16)
    StoredTensor("x", "F16", halves.shape, halves).write_to(out, slice(None))
    np.testing.assert_array_equal(out, rounded(halves.astype(np.float32)))


@pytest.mark.parametrize("bits", [0x7F800001, 0x7FFFFFFF, 0xFFC00000])
def test_a_nan_stays_one(bits: int) -> None:
    stored = np.array([bits], "<u4").view("<f4")
    out = rounded(stored)
    assert np.isnan((out.astype(np.uint32) << 16).view(np.float32)).all()
