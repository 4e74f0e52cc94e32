"""A model folder with its decoder's matrices in FP8, as the published checkpoints store them.

Made of a folder in float32 (which it becomes), by the formats' definitions and not the engine's
code: weights in blocks of 128 x 128 or by output, each scale the largest of its part / 448.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from safetensors import TensorSpec, serialize_file

from baton_testing.e4m3_numbers import nearest_bits
from baton_worker.engine.model.checkpoint import SINGLE_FILE, open_checkpoint

Scheme = Literal["fp8", "block", "channel"]
"""DeepSeek-V3's and Qwen3's own, and the two that `compressed-tensors` ships."""
Stored = dict[str, tuple[str, npt.NDArray[Any]]]
"""dtype in safetensors' words, and the array."""

MATRICES = re.compile(r"\.((q|k|v|o|gate|up|down|q_a|q_b|kv_b)_proj|kv_a_proj_with_mqa)\.weight$")
DRAFT_MATRICES = re.compile(r"(\.(eh|input)_proj|\.mtp_linear_proj\.\d+)\.weight$")
_NUMBERS = {"num_bits": 8, "type": "float", "symmetric": True}


def quantise_folder(
    folder: Path,
    scheme: Scheme = "fp8",
    kept: tuple[str, ...] = (),
    scales_as: Literal["float32", "bfloat16"] = "float32",
    with_drafts: bool = False,
    edit: Callable[[Stored], object] = lambda stored: None,
) -> None:
    """Rewrite a folder.

    Args:
        folder: of a model in float32.
        scheme: how.
        kept: modules that stay as they are, by whole names.
        scales_as: the dtype of scales.
        with_drafts: the projection of draft layers is FP8 too.
        edit: may change what is stored before it is written.
    """
    stored: Stored = {}
    for key, tensor in open_checkpoint(folder).items():
        value, module = tensor.float32(), key.removesuffix(".weight")
        is_matrix = MATRICES.search(key) or (with_drafts and DRAFT_MATRICES.search(key))
        if not is_matrix or module in kept:
            stored[key] = ("float32", value)
            continue
        bits, scales = quantised(value, *((1, 0) if scheme == "channel" else (128, 128)))
        stored[key] = ("float8_e4m3fn", bits)
        name = "weight_scale_inv" if scheme == "fp8" else "weight_scale"
        stored[f"{module}.{name}"] = (scales_as, _as(scales, scales_as))
    edit(stored)
    _write(folder / SINGLE_FILE, stored)
    path = folder / "config.json"
    fields = json.loads(path.read_text()) | {"quantization_config": said(scheme, kept)}
    path.write_text(json.dumps(fields))


def said(scheme: Scheme, kept: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the `quantization_config` of a scheme, with the fields that are published."""
    if scheme == "fp8":
        return {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head", *kept],
        }
    is_block = scheme == "block"
    weights = _NUMBERS | {"dynamic": False, "strategy": scheme, "observer": "minmax"}
    inputs = _NUMBERS | {"dynamic": True, "strategy": "group" if is_block else "token"}
    if is_block:
        weights["block_structure"] = [128, 128]
        inputs["group_size"] = 128
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "global_compression_ratio": 1.5,
        "ignore": ["lm_head", "re:.*mlp[.]gate$", *kept],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": inputs,
                "output_activations": None,
            }
        },
    }


def quantised(
    weight: npt.NDArray[np.float32], rows: int, columns: int
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]:
    """Return e4m3 bits [out, in] and scales by blocks of `rows` x `columns`, 0 for all columns."""
    outputs, inputs = weight.shape
    columns = columns or inputs
    scales = np.empty((-(-outputs // rows), -(-inputs // columns)), np.float32)
    bits = np.empty(weight.shape, np.uint8)
    for i, j in np.ndindex(scales.shape):
        part = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
        scales[i, j] = np.abs(weight[part]).max() / 448.0
        bits[part] = nearest_bits(weight[part] / scales[i, j])
    return bits, scales


def _as(scales: npt.NDArray[np.float32], name: str) -> npt.NDArray[Any]:
    if name == "float32":
        return scales
    return (scales.view(np.uint32) >> 16).astype(np.uint16)


def _write(path: Path, stored: Stored) -> None:
    specs = {
        key: TensorSpec(
            dtype=name, shape=value.shape, data_ptr=value.ctypes.data, data_len=value.nbytes
        )
        for key, (name, value) in stored.items()
    }
    serialize_file(specs, path, metadata={"format": "pt"})
