"""A checkpoint that does not fit stops the load with the key and what was expected."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from baton_testing.numpy_device import NumpyDevice
from baton_worker.engine.backends.device.loading import load_device_weights
from baton_worker.engine.model.checkpoint import CheckpointError, open_checkpoint
from baton_worker.engine.model.shape import load_shape
from baton_worker.engine.model.weights import load_weights

Edit = Callable[[dict[str, Any]], object]


def load(folder: Path) -> object:
    """Load for the host; what is refused there is refused for a device in the same words."""
    shape = load_shape(folder)
    try:
        return load_weights(folder, shape)
    except CheckpointError as error:
        device = NumpyDevice()
        with pytest.raises(CheckpointError, match=f"^{re.escape(str(error))}$"):
            load_device_weights(device, open_checkpoint(folder), shape, "float32", 0)
        assert device.memory().peak == 0, "it is refused before anything is copied"
        raise


def drop(key: str) -> Edit:
    return lambda tensors: tensors.pop(key)


def put(key: str, *shape: int) -> Edit:
    return lambda tensors: tensors.update({key: np.zeros(shape, np.float32)})


@pytest.mark.parametrize(
    ("family", "count"),
    [
        ("ernie4_5", 33),
        ("qwen3", 39),
        ("qwen2", 42),
        ("mimo", 43),
        pytest.param("qwen3_moe", 80, marks=pytest.mark.slow),
        pytest.param("ernie4_5_moe", 94, marks=pytest.mark.slow),
        pytest.param("glm4_moe", 140, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", 132, marks=pytest.mark.slow),
    ],
)
def test_every_single_missing_key_is_named(
    make_checkpoint: Callable[..., Any], family: str, count: int
) -> None:
    keys = list(make_checkpoint(family, tie_word_embeddings=False).tensors)
    assert len(keys) == count
    for key in keys:
        made = make_checkpoint(family, tie_word_embeddings=False, edit=drop(key))
        with pytest.raises(CheckpointError, match=rf"^{re.escape(key)}: missing key"):
            load(made.path)


def test_every_single_wrong_shape_is_named_with_both_shapes(
    make_checkpoint: Callable[..., Any],
) -> None:
    for key, value in make_checkpoint().tensors.items():
        made = make_checkpoint(edit=put(key, *value.shape[:-1], 7))
        found = (*value.shape[:-1], 7)
        file = made.path / "model.safetensors"
        expected = f"{key}: expected shape {value.shape}, found {found} ({file})"
        with pytest.raises(CheckpointError, match=f"^{re.escape(expected)}$"):
            load(made.path)


@pytest.mark.parametrize(
    "key",
    [
        "model.layers.2.input_layernorm.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "model.mtp_block.1.input_layernorm.weight",
        "model.layers.0.mlp.experts.0.gate_proj.weight",
    ],
)
def test_an_unknown_key_is_named(make_checkpoint: Callable[..., Any], key: str) -> None:
    made = make_checkpoint(edit=put(key, 32))
    with pytest.raises(CheckpointError, match=rf"^{re.escape(key)}: unknown key for ernie4_5"):
        load(made.path)


@pytest.mark.parametrize("q_rank", [20, None])
def test_every_key_of_compressed_rows_is_named_missing_or_of_another_shape(
    make_checkpoint: Callable[..., Any], q_rank: int | None
) -> None:
    sizes = {"num_hidden_layers": 2, "q_lora_rank": q_rank}
    tensors = make_checkpoint("deepseek_v3", **sizes).tensors
    keys = [key for key in tensors if ".2.self_attn." in key]
    assert len(keys) == (7 if q_rank else 5)
    for key in keys:
        with pytest.raises(CheckpointError, match=rf"^{re.escape(key)}: missing key"):
            load(make_checkpoint("deepseek_v3", edit=drop(key), **sizes).path)
        found = (*tensors[key].shape[:-1], 9)
        made = make_checkpoint("deepseek_v3", edit=put(key, *found), **sizes)
        message = f"{key}: expected shape {tensors[key].shape}, found {found} ({made.path}"
        with pytest.raises(CheckpointError, match=f"^{re.escape(message)}"):
            load(made.path)


@pytest.mark.parametrize("key", ["q_proj.weight", "q_a_proj.bias", "kv_b_proj.weight_scale_inv"])
def test_an_unknown_key_of_deepseek_is_named(make_checkpoint: Callable[..., Any], key: str) -> None:
    key = f"model.layers.1.self_attn.{key}"
    made = make_checkpoint("deepseek_v3", edit=put(key, 32))
    with pytest.raises(CheckpointError, match=rf"^{re.escape(key)}: unknown key for deepseek_v3"):
        load(made.path)


@pytest.mark.parametrize(
    "key",
    [
        "model.layers.0.self_attn.o_proj.bias",
        "model.layers.0.self_attn.sinks",
        "model.layers.2.eh_proj.weight",
        "model.mtp_layers.1.input_proj.weight",
    ],
)
def test_an_unknown_key_of_mimo_is_named(make_checkpoint: Callable[..., Any], key: str) -> None:
    made = make_checkpoint("mimo", edit=put(key, 32))
    with pytest.raises(CheckpointError, match=rf"^{re.escape(key)}: unknown key for mimo"):
        load(made.path)


def test_a_wrong_bias_is_named_with_both_shapes(make_checkpoint: Callable[..., Any]) -> None:
    key = "model.mtp_layers.0.self_attn.k_proj.bias"
    made = make_checkpoint("mimo", edit=put(key, 32))
    expected = f"{key}: expected shape (16,), found (32,) ({made.path / 'model.safetensors'})"
    with pytest.raises(CheckpointError, match=f"^{re.escape(expected)}$"):
        load(made.path)


def test_unexpected_mtp_weights_are_unknown_keys(make_checkpoint: Callable[..., Any]) -> None:
    made = make_checkpoint()
    config = made.config | {"num_nextn_predict_layers": 0}
    (made.path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        CheckpointError,
        match=r"mtp_block.*unknown key and 11 more .* 0 MTP layers: num_nextn_predict_layers is 0",
    ):
        load(made.path)


@pytest.mark.parametrize(
    ("mtp", "copy"),
    [
        ("ernie", "lm_head.weight"),
        ("deepseek", "model.layers.2.embed_tokens.weight"),
        ("deepseek", "model.layers.2.shared_head.head.weight"),
    ],
)
def test_a_copy_that_differs_from_its_original_is_named(
    make_checkpoint: Callable[..., Any], mtp: str, copy: str
) -> None:
    made = make_checkpoint(mtp=mtp, edit=put(copy, 96, 32))
    expected = f"{copy}: must equal model.embed_tokens.weight"
    with pytest.raises(CheckpointError, match=re.escape(expected)):
        load(made.path)


def test_a_storage_dtype_that_is_no_plain_float_is_named(
    make_checkpoint: Callable[..., Any],
) -> None:
    made = make_checkpoint()
    tensors = load_file(made.path / "model.safetensors")
    key = "model.layers.1.mlp.up_proj.weight"
    tensors[key] = tensors[key].astype(np.int8)
    save_file(tensors, made.path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"^{re.escape(key)}: stored as I8"):
        load(made.path)


@pytest.mark.parametrize("n_bytes", [1, 5000])
def test_a_truncated_file_is_refused_with_the_tensor_that_is_cut(
    make_checkpoint: Callable[..., Any], n_bytes: int
) -> None:
    path = make_checkpoint(shards=2).path / "model-00002-of-00002.safetensors"
    sizes = [(tensor.nbytes, key, tensor) for key, tensor in load_file(path).items()]
    path.write_bytes(path.read_bytes()[:-n_bytes])
    with pytest.raises(CheckpointError) as refused:
        load(path.parent)
    told = re.fullmatch(
        rf"{re.escape(str(path))}: .*: (\S+), F32 (\(.*\)), ends (\d+) bytes behind the file's end:"
        " it was cut off",
        str(refused.value),
    )
    assert told, refused.value
    size, shape = next((size, tensor.shape) for size, key, tensor in sizes if key == told[1])
    assert told[2] == str(shape)
    assert 0 < int(told[3]) <= min(n_bytes, size), "the first that is cut"


def test_a_missing_key_tells_where_it_was_looked_for(make_checkpoint: Callable[..., Any]) -> None:
    one, two = (make_checkpoint(edit=drop("model.norm.weight"), shards=n).path for n in (1, 2))
    for folder, told in ((one, f"({one / 'model.safetensors'})"), (two, f"({two}, 2 files)")):
        with pytest.raises(CheckpointError, match=f"{re.escape(told)}$"):
            load(folder)


@pytest.mark.parametrize("content", [b"", b"\x00" * 7, b"\xff" * 64, b"\x02" + b"\x00" * 7 + b"[]"])
def test_a_file_that_is_no_safetensors_is_refused(
    make_checkpoint: Callable[..., Any], content: bytes
) -> None:
    path = make_checkpoint().path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=re.escape(str(path))):
        load(path.parent)


def test_a_folder_without_weights_is_refused(make_checkpoint: Callable[..., Any]) -> None:
    made = make_checkpoint()
    (made.path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"neither model.safetensors nor .*index.json"):
        load(made.path)


def test_an_absent_shard_is_named(make_checkpoint: Callable[..., Any]) -> None:
    made = make_checkpoint(shards=2)
    (made.path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors"):
        load(made.path)


def test_an_index_that_cannot_be_read_is_named(make_checkpoint: Callable[..., Any]) -> None:
    path = make_checkpoint(shards=2).path / "model.safetensors.index.json"
    path.write_text('{"metadata":' + "[" * 20_000)
    with pytest.raises(CheckpointError, match=f"^{re.escape(str(path))}: "):
        load(path.parent)
    path.unlink()
    path.mkdir()
    with pytest.raises(CheckpointError, match=f"^{re.escape(str(path))}: Is a directory"):
        load(path.parent)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weight_map: weight_map.pop("model.norm.weight"), "model.norm.weight: in model-"),
        (
            lambda weight_map: weight_map.update(
                {"ghost.weight": "model-00001-of-00002.safetensors"}
            ),
            "ghost.weight: model.safetensors.index.json says model-00001",
        ),
        (
            lambda weight_map: weight_map.update({"ghost.weight": "../elsewhere.safetensors"}),
            "'../elsewhere.safetensors' is not a plain file name",
        ),
        *(
            (lambda m, name=name: m.update({"ghost.weight": name}), f"{name!r} is not a plain file")
            for name in ("", "..", "cut\0off.safetensors")
        ),
    ],
    ids=[
        "key not in the index",
        "key not in its file",
        "file outside the folder",
        "no name",
        "the folder above",
        "a name that no file can have",
    ],
)
def test_an_index_that_disagrees_with_its_files_is_refused(
    make_checkpoint: Callable[..., Any], change: Callable[[dict[str, str]], object], message: str
) -> None:
    path = make_checkpoint(shards=2).path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=re.escape(message)):
        load(path.parent)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_bias_of_the_choice_that_is_no_number_is_named(
    make_checkpoint: Callable[..., Any], value: float
) -> None:
    """An expert that is never wanted would be missed by nobody."""
    key = "model.layers.1.mlp.gate.e_score_correction_bias"

    def spoil(tensors: dict[str, Any]) -> None:
        tensors[key][2] = value

    made = make_checkpoint("glm4_moe", edit=spoil)
    with pytest.raises(CheckpointError, match=f"^{re.escape(key)}: must be finite"):
        load(made.path)


def test_experts_in_one_tensor_are_named(make_checkpoint: Callable[..., Any]) -> None:
    key = "model.layers.1.mlp.experts.gate_up_proj"
    made = make_checkpoint("qwen3_moe", edit=put(key, 8, 48, 32))
    with pytest.raises(CheckpointError, match=f"^{re.escape(key)}: experts in one tensor are not"):
        load(made.path)


@pytest.mark.parametrize("family", ["ernie4_5", "glm4_moe", "mimo"])
def test_draft_layers_that_are_told_of_and_not_there_are_named_by_field(
    make_checkpoint: Callable[..., Any], family: str
) -> None:
    """As transformers saves a model that had one."""
    made = make_checkpoint(family, num_nextn_predict_layers=0)
    config = made.config | {"num_nextn_predict_layers": 1}
    (made.path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="num_nextn_predict_layers is 1; 0 for a checkpoint"):
        load_weights(made.path, load_shape(made.path))
