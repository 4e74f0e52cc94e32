"""An FP8 checkpoint is read as it is stored, whole or in parts, or refused by key."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from baton_testing.e4m3_numbers import number
from baton_testing.fp8_folder import Scheme, Stored, quantise_folder
from baton_worker.engine.model.checkpoint import CheckpointError, StoredTensor, open_checkpoint
from baton_worker.engine.model.matrices import Matrix, ScaledMatrix
from baton_worker.engine.model.shape import load_shape
from baton_worker.engine.model.shards import WHOLE, Shard, split_groups
from baton_worker.engine.model.weights import LayerWeights, Weights, load_weights

SIZES = {"hidden_size": 160, "intermediate_size": 200, "head_dim": 40}
EVEN = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
UP = "model.layers.1.mlp.up_proj"
NUMBERS = np.array([number(bits) for bits in range(256)])

Make = Callable[..., Path]


@pytest.fixture
def make(make_checkpoint: Callable[..., Any]) -> Make:
    """`make(family="qwen2", scheme="fp8", sizes=SIZES, config=None, **how)`: a quantised folder."""

    def made(
        family: str = "qwen2",
        scheme: Scheme = "fp8",
        sizes: dict[str, int] = SIZES,
        config: dict[str, Any] | None = None,
        **how: Any,
    ) -> Path:
        drafts = {"num_nextn_predict_layers": 0} if family.startswith("qwen") else {}
        made = make_checkpoint(family, **(drafts | sizes | (config or {})))
        quantise_folder(made.path, scheme, **how)
        return Path(made.path)

    return made


def load(folder: Path, shard: Shard = WHOLE, n_mtp: int | None = None) -> Weights:
    return load_weights(folder, load_shape(folder), shard, n_mtp)


def value(matrix: Matrix) -> npt.NDArray[np.float64]:
    """Return what a matrix stands for."""
    if not isinstance(matrix, ScaledMatrix):
        return matrix.astype(np.float64)
    each = np.repeat(matrix.scales, matrix.group, axis=0)[: len(matrix.values)]
    return matrix.values * each.astype(np.float64)


def stored_value(folder: Path, module: str, scale: str) -> npt.NDArray[np.float64]:
    """Return `[in, out]`, by the definition: each element by itself."""
    checkpoint = open_checkpoint(folder)
    bits, scales = checkpoint[f"{module}.weight"].raw, checkpoint[f"{module}.{scale}"].float32()
    size = (128, 128) if scale.endswith("inv") else (1, bits.shape[1])
    out = [
        [NUMBERS[b] * scales[i // size[0], j // size[1]] for j, b in enumerate(row)]
        for i, row in enumerate(bits)
    ]
    return np.array(out, np.float64).T


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("scheme", "scale"), [("fp8", "weight_scale_inv"), ("channel", "weight_scale")]
)
@pytest.mark.parametrize("scales_as", ["float32", "bfloat16"])
def test_every_element_is_its_number_times_its_own_scale(
    make: Make, scheme: Scheme, scale: str, scales_as: Any
) -> None:
    folder = make("mimo", scheme, scales_as=scales_as, with_drafts=True)
    weights = load(folder)

    def of(*modules: str) -> npt.NDArray[np.float64]:
        return np.concatenate([stored_value(folder, each, scale) for each in modules], axis=1)

    layers = {"model.layers.1": weights.layers[1], "model.mtp_layers.0": weights.mtp[0].layer}
    for prefix, layer in layers.items():
        attention = [f"{prefix}.self_attn.{name}_proj" for name in "qkv"]
        np.testing.assert_array_equal(value(layer.qkv), of(*attention))
        np.testing.assert_array_equal(value(layer.o), of(f"{prefix}.self_attn.o_proj"))
        assert layer.mlp is not None
        halves = [f"{prefix}.mlp.{name}_proj" for name in ("gate", "up")]
        np.testing.assert_array_equal(value(layer.mlp.gate_up), of(*halves))
        np.testing.assert_array_equal(value(layer.mlp.down), of(f"{prefix}.mlp.down_proj"))
        assert not isinstance(layer.input_norm, ScaledMatrix)
    np.testing.assert_array_equal(value(weights.mtp[0].proj), of("model.mtp_layers.0.input_proj"))
    assert isinstance(weights.lm_head, np.ndarray)


def test_blocks_of_compressed_tensors_are_the_same_as_deepseeks(make: Make) -> None:
    ours, theirs = (load(make("qwen3", scheme)) for scheme in ("block", "fp8"))
    for one, other in zip(ours.layers, theirs.layers, strict=True):
        assert isinstance(one.o, ScaledMatrix)
        assert one.o.group == 128
        np.testing.assert_array_equal(value(one.o), value(other.o))


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
def test_experts_are_quantised_and_their_router_is_not(make: Make, family: str) -> None:
    layer = load(make(family)).layers[1]
    assert layer.mixture is not None
    assert isinstance(layer.mixture.router, np.ndarray)
    for expert in layer.mixture.experts:
        assert isinstance(expert.gate_up, ScaledMatrix)
        assert isinstance(expert.down, ScaledMatrix)
    assert layer.mlp is None or isinstance(layer.mlp.down, ScaledMatrix)


def test_modules_that_are_not_converted_are_as_stored(make: Make) -> None:
    first, second = load(make(kept=("model.layers.0.mlp.down_proj",))).layers
    assert first.mlp is not None
    assert second.mlp is not None
    assert isinstance(first.mlp.down, np.ndarray)
    assert isinstance(first.mlp.gate_up, ScaledMatrix)
    assert isinstance(second.mlp.down, ScaledMatrix)


def test_a_draft_layers_projection_is_what_its_dtype_says(make: Make) -> None:
    """DeepSeek-V3 lists nothing and keeps it."""
    for with_drafts in (False, True):
        projection = load(make("glm4_moe", with_drafts=with_drafts)).mtp[0].proj
        assert isinstance(projection, ScaledMatrix) == with_drafts


def test_draft_layers_that_nobody_wants_are_checked_and_not_read(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make("glm4_moe", with_drafts=True)
    read: list[str] = []
    real = StoredTensor.e4m3

    def counted(self: StoredTensor, rows: slice = slice(None), columns: slice = slice(None)) -> Any:
        out = real(self, rows, columns)
        read.extend([self.key] * bool(out.size))
        return out

    monkeypatch.setattr(StoredTensor, "e4m3", counted)
    assert load(folder, n_mtp=0).mtp == ()
    assert read
    assert not [key for key in read if key.startswith("model.layers.3.")]


def matrices(layer: LayerWeights) -> list[Matrix]:
    assert layer.mlp is not None
    return [layer.qkv, layer.o, layer.mlp.gate_up, layer.mlp.down]


def test_ranks_have_the_elements_of_the_whole(make: Make) -> None:
    """Rows are cut anywhere, 32 of the keys' 128; columns where groups end."""
    sizes = EVEN | {"num_key_value_heads": 4}
    folder = make("qwen2", sizes=sizes)
    whole, parts = load(folder), [load(folder, Shard(rank, 2)) for rank in (0, 1)]
    for n, layer in enumerate(whole.layers):
        qkv, o, gate_up, down = (value(each) for each in matrices(layer))
        cut = [[value(each) for each in matrices(part.layers[n])] for part in parts]
        np.testing.assert_array_equal(np.concatenate([each[1] for each in cut]), o)
        np.testing.assert_array_equal(np.concatenate([each[3] for each in cut]), down)
        thirds = [np.split(each[0], 3, axis=1) for each in cut]
        rejoined = [np.concatenate(both, axis=1) for both in zip(*thirds, strict=True)]
        np.testing.assert_array_equal(np.concatenate(rejoined, axis=1), qkv)
        halves = [np.split(each[2], 2, axis=1) for each in cut]
        rejoined = [np.concatenate(both, axis=1) for both in zip(*halves, strict=True)]
        np.testing.assert_array_equal(np.concatenate(rejoined, axis=1), gate_up)


@pytest.mark.parametrize(
    ("scheme", "changed", "named"),
    [
        ("fp8", {"intermediate_size": 384}, "intermediate_size 384 over 2 ranks"),
        ("fp8", {"head_dim": 40}, "num_attention_heads x head_dim 160 over 2 ranks"),
        ("channel", {}, "scales of activations are of all elements"),
    ],
)
def test_ranks_that_would_share_a_scale_are_refused_by_name(
    make: Make, scheme: Scheme, changed: dict[str, int], named: str
) -> None:
    folder = make("qwen2", scheme, sizes=EVEN | changed)
    with pytest.raises(ValueError, match=re.escape(named)):
        load(folder, Shard(0, 2))
    assert split_groups(load_shape(folder), 1) == ""


def edited(change: Callable[[Stored], object]) -> dict[str, Any]:
    return {"edit": change}


def put(key: str, dtype: str, array: npt.NDArray[Any]) -> dict[str, Any]:
    return edited(lambda stored: stored.update({key: (dtype, array)}))


def zeros(*shape: int) -> npt.NDArray[np.float32]:
    return np.zeros(shape, np.float32)


def with_scale(worst: float) -> npt.NDArray[np.float32]:
    scales = np.ones((2, 2), np.float32)
    scales[1, 1] = worst
    return scales


FLOATS_ALONE = (
    "supported are ['BF16', 'F16', 'F32']; decoder layers' matrices alone may be FP8, where "
    "quantization_config of config.json says so"
)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no-scales": (
        edited(lambda stored: stored.pop(f"{UP}.weight_scale_inv")),
        f"{UP}.weight_scale_inv: missing key for qwen2",
    ),
    "other-scales": (
        put(f"{UP}.weight_scale_inv", "float32", zeros(2, 1)),
        f"{UP}.weight_scale_inv: expected shape (2, 2), found (2, 1)",
    ),
    "scales-of-fp8": (
        put(f"{UP}.weight_scale_inv", "float8_e4m3fn", np.zeros((2, 2), np.uint8)),
        f"{UP}.weight_scale_inv: stored as F8_E4M3, supported are",
    ),
    "nan-scale": (
        put(f"{UP}.weight_scale_inv", "float32", with_scale(np.nan)),
        f"{UP}.weight_scale_inv: must be finite, and is not",
    ),
    "negative-scale": (
        put(f"{UP}.weight_scale_inv", "float32", with_scale(-1.0)),
        f"{UP}.weight_scale_inv: scales must be >= 0",
    ),
    "a-float-that-should-be-fp8": (
        put(f"{UP}.weight", "float32", zeros(200, 160)),
        f"{UP}.weight: stored as F32, quantization_config wants it as F8_E4M3, or in its list",
    ),
    "of-another-shape": (
        put(f"{UP}.weight", "float8_e4m3fn", np.zeros((200, 128), np.uint8)),
        f"{UP}.weight: expected shape (200, 160), found (200, 128)",
    ),
    "e5m2": (
        put(f"{UP}.weight", "float8_e5m2", np.zeros((200, 160), np.uint8)),
        f"{UP}.weight: stored as F8_E5M2, quantization_config wants it as F8_E4M3",
    ),
    "a-scale-of-nothing": (
        put("model.norm.weight_scale_inv", "float32", zeros(1, 1)),
        "model.norm.weight_scale_inv: unknown key",
    ),
    "a-static-scale": (
        put(f"{UP}.activation_scale", "float32", zeros(1)),
        f"{UP}.activation_scale: unknown key",
    ),
    "a-norm-of-fp8": (
        put("model.norm.weight", "float8_e4m3fn", np.zeros(160, np.uint8)),
        f"model.norm.weight: stored as F8_E4M3, {FLOATS_ALONE}",
    ),
    "an-embedding-of-fp8": (
        put("model.embed_tokens.weight", "float8_e4m3fn", np.zeros((96, 160), np.uint8)),
        f"model.embed_tokens.weight: stored as F8_E4M3, {FLOATS_ALONE}",
    ),
    "a-head-of-fp8": (
        put("lm_head.weight", "float8_e4m3fn", np.zeros((96, 160), np.uint8)),
        f"lm_head.weight: stored as F8_E4M3, {FLOATS_ALONE}",
    ),
    "kept-in-part": (
        {"kept": (UP,)},
        "model.layers.1.mlp.gate_proj.weight, model.layers.1.mlp.up_proj.weight: quantised in part",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_by_key(make: Make, case: str) -> None:
    how, message = REFUSED[case]
    folder = make("qwen2", **how)
    with pytest.raises(CheckpointError, match=f"^{re.escape(message)}"):
        load(folder)


def test_what_the_list_keeps_must_be_floats(make: Make) -> None:
    folder = make("qwen2")
    path = folder / "config.json"
    listed = '"modules_to_not_convert": ["lm_head", "mlp.down_proj"'
    path.write_text(path.read_text().replace('"modules_to_not_convert": ["lm_head"', listed))
    message = "model.layers.0.mlp.down_proj.weight: stored as F8_E4M3, quantization_config wants "
    with pytest.raises(CheckpointError, match=re.escape(f"{message}it as floats")):
        load(folder)


def test_fp8_without_a_word_of_it_in_the_config_is_refused(make: Make) -> None:
    folder = make("qwen2")
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"quantization_config"', '"another_field"'))
    with pytest.raises(
        CheckpointError,
        match=r"q_proj.weight: stored as F8_E4M3, supported are .*quantization_config of",
    ):
        load(folder)


def test_a_file_that_is_cut_while_it_is_read_is_told_by_key(make: Make) -> None:
    """And does not end the process, as a read through a map would."""
    path = make("qwen2") / "model.safetensors"
    stored = open_checkpoint(path.parent)[f"{UP}.weight"]
    whole = stored.e4m3()
    assert (stored.e4m3(slice(3, 9), slice(1, 5)) == whole[3:9, 1:5]).all()
    os.truncate(path, 4096)
    with pytest.raises(CheckpointError, match=rf"^{UP}.weight: F8_E4M3 .* it was longer when"):
        stored.e4m3()
