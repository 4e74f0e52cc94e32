"""Fixtures for the engine: the committed tiny model, and random checkpoints in either naming."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors import TensorSpec, serialize_file

from baton_testing.tiny_model import TINY_MODEL
from baton_worker.engine.model.families.registry import FAMILIES

Tensors = dict[str, npt.NDArray[np.float32]]


@dataclass(frozen=True)
class MadeCheckpoint:
    """A Hugging Face folder, and its tensors as float32 with the values that were stored."""

    path: Path
    config: dict[str, Any]
    tensors: Tensors


@pytest.fixture(scope="session")
def tiny_model_dir() -> Path:
    return TINY_MODEL


@pytest.fixture
def load_example(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """`load("network")` imports that module of the tiny model's training script."""

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"tiny_{name}", TINY_MODEL / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        # Dataclasses look their own module up by name.
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., MadeCheckpoint]:
    """`make(family="ernie4_5", mtp="ernie", storage="F32", shards=1, seed=0, edit=None, **config)`.

    `mtp` is the naming of MTP layers, `ernie`, `deepseek` or `mimo`, which MiMo has. `edit` may
    change the tensors before they are written. Other keywords go to config.json.
    """

    def make(
        family: str = "ernie4_5",
        mtp: str = "ernie",
        storage: str = "F32",
        shards: int = 1,
        seed: int = 0,
        edit: Callable[[Tensors], object] | None = None,
        **config: Any,
    ) -> MadeCheckpoint:
        folder = tmp_path_factory.mktemp("checkpoint")
        full = _config(family) | config
        naming = {"mimo": "mimo", "glm4_moe": "deepseek", "deepseek_v3": "deepseek"}.get(
            family, mtp
        )
        tensors = _random_tensors(full, naming, np.random.default_rng(seed))
        if edit is not None:
            edit(tensors)
        (folder / "config.json").write_text(json.dumps(full))
        return MadeCheckpoint(folder, full, _write(folder, tensors, storage, shards))

    return make


COUNTS = {
    "qwen3_moe": "num_experts",
    "ernie4_5_moe": "moe_num_experts",
    "glm4_moe": "n_routed_experts",
    "deepseek_v3": "n_routed_experts",
}
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "num_hidden_layers": 3,
        "num_nextn_predict_layers": 0,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
    },
    "ernie4_5_moe": {
        "num_hidden_layers": 3,
        "moe_num_experts": 8,
        "moe_k": 3,
        "moe_intermediate_size": 24,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
    },
    "glm4_moe": {
        "num_hidden_layers": 3,
        "tie_word_embeddings": False,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "attention_bias": True,
        "use_qk_norm": True,
    },
    "deepseek_v3": {
        "num_hidden_layers": 3,
        "tie_word_embeddings": False,
        "num_key_value_heads": 4,
        "head_dim": None,
        "q_lora_rank": 20,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 6,
        "v_head_dim": 10,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
    },
}


def _config(family: str) -> dict[str, Any]:
    return {
        "architectures": [FAMILIES[family].architecture],
        "model_type": family,
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "float32",
        **MIXTURES.get(family, {}),
    }


def _random_tensors(config: Mapping[str, Any], mtp: str, rng: np.random.Generator) -> Tensors:
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    vocab = (config["vocab_size"], hidden)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": vocab,
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = vocab
    for i in range(layers):
        shapes |= _layer_shapes(f"model.layers.{i}", config)
    for i in range(config["num_nextn_predict_layers"] or 0):
        norms, proj, block, last = {
            "ernie": (
                (f"model.mtp_emb_norm.{i}", f"model.mtp_hidden_norm.{i}"),
                f"model.mtp_linear_proj.{i}",
                f"model.mtp_block.{i}",
                (),
            ),
            "deepseek": (
                (f"model.layers.{layers + i}.enorm", f"model.layers.{layers + i}.hnorm"),
                f"model.layers.{layers + i}.eh_proj",
                f"model.layers.{layers + i}",
                (),
            ),
            "mimo": (
                (f"model.mtp_layers.{i}.token_layernorm", f"model.mtp_layers.{i}.hidden_layernorm"),
                f"model.mtp_layers.{i}.input_proj",
                f"model.mtp_layers.{i}",
                (f"model.mtp_layers.{i}.final_layernorm",),
            ),
        }[mtp]
        shapes |= {f"{norm}.weight": (hidden,) for norm in (*norms, *last)}
        shapes[f"{proj}.weight"] = (hidden, 2 * hidden)
        shapes |= _layer_shapes(block, config)
    return {key: _random(key, shape, rng) for key, shape in shapes.items()}


def _layer_shapes(prefix: str, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden = config["hidden_size"]
    if config.get("kv_lora_rank"):
        return _latent_shapes(prefix, config) | _mlp_shapes(prefix, config)
    head_dim = config["head_dim"] or hidden // config["num_attention_heads"]
    q = config["num_attention_heads"] * head_dim
    kv = config["num_key_value_heads"] * head_dim
    family = FAMILIES[config["model_type"]]
    has_norms = config.get("use_qk_norm") if family.has_qk_norm is None else family.has_qk_norm
    has_bias = config.get("attention_bias") if family.has_qkv_bias is None else family.has_qkv_bias
    norms = ("q_norm", "k_norm") if has_norms else ()
    biases = {"q": q, "k": kv, "v": kv} if has_bias else {}
    extra = {f"{prefix}.self_attn.{n}.weight": (head_dim,) for n in norms}
    extra |= {f"{prefix}.self_attn.{n}_proj.bias": (width,) for n, width in biases.items()}
    return extra | {
        f"{prefix}.input_layernorm.weight": (hidden,),
        f"{prefix}.self_attn.q_proj.weight": (q, hidden),
        f"{prefix}.self_attn.k_proj.weight": (kv, hidden),
        f"{prefix}.self_attn.v_proj.weight": (kv, hidden),
        f"{prefix}.self_attn.o_proj.weight": (hidden, q),
        f"{prefix}.post_attention_layernorm.weight": (hidden,),
        **_mlp_shapes(prefix, config),
    }


def _latent_shapes(prefix: str, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """MLA's: queries compressed or not, one row for keys and values."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    q_rank, kv_rank = config["q_lora_rank"], config["kv_lora_rank"]
    nope, turning = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    value, query = config["v_head_dim"], heads * (nope + turning)
    attention: dict[str, tuple[int, ...]] = {"q_proj": (query, hidden)}
    if q_rank:
        attention = {
            "q_a_proj": (q_rank, hidden),
            "q_a_layernorm": (q_rank,),
            "q_b_proj": (query, q_rank),
        }
    attention |= {
        "kv_a_proj_with_mqa": (kv_rank + turning, hidden),
        "kv_a_layernorm": (kv_rank,),
        "kv_b_proj": (heads * (nope + value), kv_rank),
        "o_proj": (hidden, heads * value),
    }
    return {
        f"{prefix}.input_layernorm.weight": (hidden,),
        **{f"{prefix}.self_attn.{name}.weight": shape for name, shape in attention.items()},
        f"{prefix}.post_attention_layernorm.weight": (hidden,),
    }


def _mlp_shapes(prefix: str, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Layer 0 and ERNIE's draft layers are dense, others have a mixture if the family has one."""
    name, hidden = config["model_type"], config["hidden_size"]
    widths = {f"{prefix}.mlp": config["intermediate_size"]}
    extra: dict[str, tuple[int, ...]] = {}
    if name in COUNTS and prefix.startswith("model.layers.") and prefix[-2:] != ".0":
        count = config[COUNTS[name]]
        width = config["moe_intermediate_size"]
        widths = {f"{prefix}.mlp.experts.{i}": width for i in range(count)}
        extra[f"{prefix}.mlp.gate.weight"] = (count, hidden)
        if name == "ernie4_5_moe":
            widths[f"{prefix}.mlp.shared_experts"] = 2 * width
            extra[f"{prefix}.mlp.moe_statics.e_score_correction_bias"] = (1, count)
        if name in ("glm4_moe", "deepseek_v3"):
            widths[f"{prefix}.mlp.shared_experts"] = width
            extra[f"{prefix}.mlp.gate.e_score_correction_bias"] = (count,)
    for mlp, width in widths.items():
        extra |= {f"{mlp}.{half}_proj.weight": (width, hidden) for half in ("gate", "up")}
        extra[f"{mlp}.down_proj.weight"] = (hidden, width)
    return extra


def _random(key: str, shape: tuple[int, ...], rng: np.random.Generator) -> npt.NDArray[np.float32]:
    if key.endswith("e_score_correction_bias"):
        return rng.normal(0.0, 0.1, shape).astype(np.float32)
    if key.endswith(".bias"):
        return rng.normal(0.0, 1.0, shape).astype(np.float32)
    if len(shape) == 1:
        return rng.normal(1.0, 0.1, shape).astype(np.float32)
    return rng.normal(0.0, shape[1] ** -0.5, shape).astype(np.float32)


def _write(folder: Path, tensors: Tensors, storage: str = "F32", shards: int = 1) -> Tensors:
    stored = {key: _to_storage(value, storage) for key, value in tensors.items()}
    keys = list(stored)
    if shards == 1:
        _write_file(folder / "model.safetensors", stored, storage)
    else:
        weight_map = {}
        for i in range(shards):
            name = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
            _write_file(folder / name, {key: stored[key] for key in keys[i::shards]}, storage)
            weight_map |= dict.fromkeys(keys[i::shards], name)
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return {key: _from_storage(value, storage) for key, value in stored.items()}


def _to_storage(value: npt.NDArray[np.float32], storage: str) -> npt.NDArray[Any]:
    if storage == "BF16":
        return (np.ascontiguousarray(value).view(np.uint32) >> 16).astype(np.uint16)
    return np.ascontiguousarray(value, {"F32": np.float32, "F16": np.float16}[storage])


def _from_storage(value: npt.NDArray[Any], storage: str) -> npt.NDArray[np.float32]:
    if storage == "BF16":
        return (value.astype(np.uint32) << 16).view(np.float32)
    return value.astype(np.float32)


def _write_file(path: Path, stored: Mapping[str, npt.NDArray[Any]], storage: str) -> None:
    name = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[storage]
    specs = {
        key: TensorSpec(
            dtype=name, shape=value.shape, data_ptr=value.ctypes.data, data_len=value.nbytes
        )
        for key, value in stored.items()
    }
    serialize_file(specs, path, metadata={"format": "np"})
