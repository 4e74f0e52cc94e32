"""Small models of families with biases or experts, random, as folders in Hugging Face's layout.

Owns how they are made so that their text is worth trying, as `random_model` does on a GPU: the
likeliest token is often the next of a short cycle, which the draft layer foretells, and as often a
near-tie decides. Written as float32, in the family's own key names.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from baton_worker.engine.model import naming
from baton_worker.engine.model.families.deepseek_v3 import DEEPSEEK_V3, GROUPED_BIAS
from baton_worker.engine.model.families.family import Family
from baton_worker.engine.model.families.glm_moe import GLM_MOE
from baton_worker.engine.model.families.registry import FAMILIES

Array = npt.NDArray[np.float32]

VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, LAYERS = 512, 64, 4, 2, 16, 96, 3
CYCLE, PULL = 8, 0.15
EXPERTS, EXPERT_INNER = 16, 32
GROUPED_FIELDS = {
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": EXPERT_INNER,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
Q_RANK, KV_RANK, NOPE, TURNING, VALUE = 48, 32, 16, 8, 16
OF_FAMILY: dict[str, dict[str, Any]] = {
    "glm4_moe": GROUPED_FIELDS | {"attention_bias": True},
    "deepseek_v3": GROUPED_FIELDS
    | {
        "num_key_value_heads": HEADS,
        "head_dim": TURNING,
        "q_lora_rank": Q_RANK,
        "kv_lora_rank": KV_RANK,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": TURNING,
        "v_head_dim": VALUE,
        "n_group": 4,
        "topk_group": 2,
    },
}


GROUPED = (GLM_MOE, DEEPSEEK_V3)
"""Those with a mixture of DeepSeek-V3's form, and a draft layer that has one too."""


def write_small_model(folder: Path, model_type: str, seed: int = 0, n_mtp: int = 1) -> Path:
    """Write `config.json` and `model.safetensors` of a family; return the folder.

    Args:
        n_mtp: draft layers, of a family that has some.
    """
    family = FAMILIES[model_type]
    n_mtp *= int(family.mtp_order == "hidden_embedding" or family in GROUPED)
    config = {
        "architectures": [family.architecture],
        "model_type": model_type,
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_nextn_predict_layers": n_mtp,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-5,
        "rope_theta": 640_000.0,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "eos_token_id": 1,
        "torch_dtype": "float32",
        **OF_FAMILY.get(model_type, {}),
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_tensors(family, n_mtp, np.random.default_rng(seed)), folder / "model.safetensors")
    return folder


class _Random:
    """Tensors in the order in which they are asked for."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def normal(self, *shape: int, scale: float) -> Array:
        return self._rng.normal(0.0, scale, shape).astype(np.float32)

    def matrix(self, rows: int, columns: int, scale: float = 1.0) -> Array:
        return self.normal(rows, columns, scale=scale * columns**-0.5)

    def norm(self, size: int) -> Array:
        return 1 + self.normal(size, scale=0.1)

    def mixture(self, keys: naming.LayerKeys, into_residual: float) -> dict[str, Any]:
        """Of DeepSeek-V3's form."""
        found: dict[str, Any] = {keys.router: self.matrix(EXPERTS, HIDDEN)}
        found[f"{keys.prefix}.{GROUPED_BIAS}"] = self.normal(EXPERTS, scale=0.1)
        for mlp in (keys.shared, *map(keys.expert, range(EXPERTS))):
            found |= {key: self.matrix(EXPERT_INNER, HIDDEN) for key in mlp.gate_up}
            found[mlp.down] = self.matrix(HIDDEN, EXPERT_INNER, into_residual)
        return found

    def latent(self, keys: naming.LayerKeys) -> dict[str, Any]:
        """Of multi-head latent attention, the output's projection aside."""
        return {
            keys.query_down: self.matrix(Q_RANK, HIDDEN),
            keys.query_norm: self.norm(Q_RANK),
            keys.query_up: self.matrix(HEADS * (NOPE + TURNING), Q_RANK),
            keys.kv_down: self.matrix(KV_RANK + TURNING, HIDDEN),
            keys.kv_norm: self.norm(KV_RANK),
            keys.kv_up: self.matrix(HEADS * (NOPE + VALUE), KV_RANK),
        }

    def layer(self, keys: naming.LayerKeys, family: Family, is_mixed: bool) -> dict[str, Any]:
        q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
        into_residual = (2 * LAYERS) ** -0.5
        found = {keys.input_norm: self.norm(HIDDEN), keys.post_norm: self.norm(HIDDEN)}
        if family.has_mla:
            found |= self.latent(keys)
            q = HEADS * VALUE
        else:
            for weight, bias, width in zip(keys.qkv, keys.qkv_bias, (q, kv, kv), strict=True):
                found[weight] = self.matrix(width, HIDDEN)
                found[bias] = self.normal(width, scale=1.0)
        if is_mixed:
            found[keys.o] = self.matrix(HIDDEN, q, into_residual)
            return found | self.mixture(keys, into_residual)
        found |= {key: self.matrix(INNER, HIDDEN) for key in keys.mlp.gate_up}
        found[keys.o] = self.matrix(HIDDEN, q, into_residual)
        found[keys.mlp.down] = self.matrix(HIDDEN, INNER, into_residual)
        return found


def _tensors(family: Family, n_mtp: int, rng: np.random.Generator) -> dict[str, Any]:
    random = _Random(rng)
    embed = random.normal(VOCAB, HIDDEN, scale=1.0)
    tokens = np.arange(VOCAB)
    before = tokens // CYCLE * CYCLE + (tokens + CYCLE - 1) % CYCLE
    final_norm = random.norm(HIDDEN)
    tensors: dict[str, Any] = {
        naming.EMBED: embed,
        naming.FINAL_NORM: final_norm,
        naming.LM_HEAD: random.matrix(VOCAB, HIDDEN) + np.float32(PULL) * embed[before],
    }
    for index in range(LAYERS):
        tensors |= random.layer(naming.main_layer(index), family, family in GROUPED and index > 0)
    for index in range(n_mtp):
        keys = family.mtp_namings[0](index, LAYERS, False)
        proj = random.matrix(HIDDEN, 2 * HIDDEN, 0.1)
        side = slice(HIDDEN) if family.mtp_order == "embedding_hidden" else slice(HIDDEN, None)
        proj[:, side] += np.eye(HIDDEN, dtype=np.float32)
        tensors |= random.layer(keys.layer, family, family in GROUPED) | {
            keys.proj: proj,
            keys.final_norm: final_norm.copy(),
        }
        tensors |= {key: random.norm(HIDDEN) for key in (keys.emb_norm, keys.hidden_norm)}
    return tensors
