"""A weight that is NaN or infinite stops the load with file and key, wherever it goes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton_testing.fp8_folder import Stored, quantise_folder
from baton_testing.numpy_device import NumpyDevice
from baton_worker.engine.backends.device.loading import load_device_weights
from baton_worker.engine.backends.device.seam import DType
from baton_worker.engine.model.checkpoint import CheckpointError, StoredTensor, open_checkpoint
from baton_worker.engine.model.shape import load_shape
from baton_worker.engine.model.weights import load_weights


def to_device(dtype: DType) -> Callable[[Path], object]:
    def load(folder: Path) -> object:
        shape = load_shape(folder)
        return load_device_weights(NumpyDevice(), open_checkpoint(folder), shape, dtype, 1)

    return load


LOADERS: dict[str, Callable[[Path], object]] = {
    "host": lambda folder: load_weights(folder, load_shape(folder)),
    "device-float32": to_device("float32"),
    "device-bfloat16": to_device("bfloat16"),
}
KEYS = (
    "model.embed_tokens.weight",
    "model.layers.1.self_attn.q_proj.bias",
    "model.layers.1.mlp.down_proj.weight",
    "model.mtp_layers.0.input_proj.weight",
    "lm_head.weight",
)


@pytest.mark.fast_cases(8)
@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("storage", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_a_number_that_is_none_is_refused_by_file_and_key(
    make_checkpoint: Callable[..., Any], loader: str, storage: str, value: float
) -> None:
    for key in KEYS:

        def spoil(tensors: dict[str, Any], key: str = key) -> None:
            tensors[key].reshape(-1)[-1] = value

        made = make_checkpoint("mimo", storage=storage, tie_word_embeddings=False, edit=spoil)
        message = f"^{re.escape(key)}: must be finite, and is not.*model.safetensors"
        with pytest.raises(CheckpointError, match=message):
            LOADERS[loader](made.path)


@pytest.mark.parametrize("loader", LOADERS)
def test_the_largest_numbers_of_either_sign_are_taken(
    make_checkpoint: Callable[..., Any], loader: str
) -> None:
    largest = float(np.array([0x7F7F0000], np.uint32).view(np.float32)[0])

    def stretch(tensors: dict[str, Any]) -> None:
        tensors[KEYS[2]].reshape(-1)[:4] = [largest, -largest, 0.0, -0.0]

    LOADERS[loader](make_checkpoint("mimo", tie_word_embeddings=False, edit=stretch).path)


def test_a_number_that_bfloat16_does_not_hold_is_told_as_one(
    make_checkpoint: Callable[..., Any],
) -> None:
    def stretch(tensors: dict[str, Any]) -> None:
        tensors[KEYS[2]][0, 0] = np.finfo(np.float32).max

    made = make_checkpoint("mimo", edit=stretch)
    LOADERS["device-float32"](made.path)
    message = (
        f"^{re.escape(KEYS[2])}: must be finite, and is not, or beyond what bfloat16 holds \\("
    )
    with pytest.raises(CheckpointError, match=message):
        LOADERS["device-bfloat16"](made.path)


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("bits", [0x7F, 0xFF])
def test_an_e4m3_number_that_is_none_is_refused_by_file_and_key(
    make_checkpoint: Callable[..., Any], loader: str, bits: int
) -> None:
    """It has no infinity: the largest of either sign, 0x7E, is 448 and taken."""
    folder, key = make_checkpoint("mimo", tie_word_embeddings=False).path, KEYS[2]
    quantise_folder(folder, with_drafts=True)
    path = folder / "model.safetensors"
    head = int.from_bytes(path.read_bytes()[:8], "little")
    at = 8 + head + json.loads(path.read_bytes()[8 : 8 + head])[key]["data_offsets"][0]
    whole = bytearray(path.read_bytes())
    whole[at : at + 2] = b"\x7e\xfe"
    path.write_bytes(whole)
    LOADERS[loader](folder)
    whole[at] = bits
    path.write_bytes(whole)
    with pytest.raises(CheckpointError, match=f"^{re.escape(key)}: must be finite, and is not"):
        LOADERS[loader](folder)


MULTIPLIED_OUT = "model.layers.1.self_attn.kv_b_proj"
"""Heads' matrices of compressed rows alone are."""
OVERFLOWS = [("host", 1e38), ("device-float32", 1e38), ("device-bfloat16", 1e38)]
ROUNDS_BEYOND = 7.59e35
"""Times 448 float32 holds it, and the bfloat16 nearest to that is infinite."""


def scaled_by(scale: float, folder: Path) -> Path:
    def stretch(stored: Stored) -> None:
        key = f"{MULTIPLIED_OUT}.weight_scale_inv"
        name, scales = stored[key]
        stored[key] = (name, np.full_like(scales, scale))

    quantise_folder(folder, with_drafts=True, edit=stretch)
    return folder


@pytest.mark.parametrize(("loader", "scale"), [*OVERFLOWS, ("device-bfloat16", ROUNDS_BEYOND)])
def test_numbers_that_overflow_times_their_scales_are_refused_by_file_and_key(
    make_checkpoint: Callable[..., Any], loader: str, scale: float
) -> None:
    folder = scaled_by(scale, make_checkpoint("deepseek_v3").path)
    message = f"{MULTIPLIED_OUT}.weight: must be finite, and times its scales is not"
    with pytest.raises(CheckpointError, match=f"^{re.escape(message)}.*model.safetensors"):
        LOADERS[loader](folder)


def test_what_float32_holds_of_numbers_times_their_scales_is_taken_as_such(
    make_checkpoint: Callable[..., Any],
) -> None:
    folder = scaled_by(ROUNDS_BEYOND, make_checkpoint("deepseek_v3").path)
    LOADERS["host"](folder)
    LOADERS["device-float32"](folder)


@pytest.mark.parametrize(
    ("dtype", "wanted", "bits"),
    [("F32", np.float32, 0x7F800000), ("F32", np.uint16, 0x7F7FFFFF), ("BF16", np.uint16, 0xFF80)],
)
def test_a_number_in_memory_that_is_none_is_refused_as_one_of_a_file(
    dtype: str, wanted: type[np.generic], bits: int
) -> None:
    raw = np.array([[0, bits]], np.uint32 if dtype == "F32" else np.uint16)
    stored = StoredTensor("x", dtype, raw.shape, raw.view("<f4") if dtype == "F32" else raw)
    with pytest.raises(CheckpointError, match=r"^x: must be finite, and is not"):
        stored.write_to(np.empty(raw.shape, wanted), slice(None))
