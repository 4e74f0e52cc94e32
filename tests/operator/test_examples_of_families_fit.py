"""Each family's example fits the GPUs that it asks for, by what the engine computes of its sizes.

The sizes are those of the published config.json files; `load_shape` reads them as it would there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from baton_operator.children.resources import config
from baton_operator.children.resources.meta import Owner
from baton_operator.children.resources.pods import worker_template
from baton_operator.models import PDDeploymentSpec
from baton_worker.config import load_config
from baton_worker.engine.backends.device.sizing import weight_bytes
from baton_worker.engine.kv.payload import KvShape
from baton_worker.engine.model.shape import ModelShape, load_shape
from baton_worker.engine.model.shards import local_shape
from baton_worker.engine.options import resolve_options
from baton_worker.ranks import with_ranks

OWNER = Owner("ns", "chat", "uid-1")
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
H100_BYTES, H200_BYTES = 80 * 10**9, 141 * 10**9
BF16 = 2
WORKING_BYTES = 6 * 10**9
"""What a step needs beside weights and KV: the engine's workspace for it has 2.2 to 5.3 GB for
these sizes, graphs and logprobs some hundred MB."""


def sizes(
    model_type: str, hidden: int, layers: int, heads: tuple[int, int], mlp: int, vocab: int,
    context: int, **others: Any,
) -> dict[str, Any]:  # fmt: skip
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "intermediate_size": mlp,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        **others,
    }


LLAMA3_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN_ROPE = {
    "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32,
    "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
FP8_BLOCKS = {
    "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128],
    "activation_scheme": "dynamic",
}  # fmt: skip
GLM = {
    "head_dim": 128, "partial_rotary_factor": 0.5, "attention_bias": True, "num_experts_per_tok": 8,
    "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_nextn_predict_layers": 1, "tie_word_embeddings": False,
}  # fmt: skip
PUBLISHED: Mapping[str, dict[str, Any]] = {
    "llama-3.1-8b.yaml": sizes(
        "llama", 4096, 32, (32, 8), 14336, 128256, 131072, rope_scaling=LLAMA3_ROPE
    ),
    "qwen2.5-7b.yaml": sizes("qwen2", 3584, 28, (28, 4), 18944, 152064, 32768),
    "qwen3-8b.yaml": sizes(
        "qwen3", 4096, 36, (32, 8), 12288, 151936, 40960, head_dim=128, tie_word_embeddings=False
    ),
    "qwen3-30b-a3b.yaml": sizes(
        "qwen3_moe", 2048, 48, (32, 4), 6144, 151936, 40960, head_dim=128, num_experts=128,
        num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True,
        decoder_sparse_step=1, mlp_only_layers=[], tie_word_embeddings=False,
    ),
    "mimo-7b.yaml": sizes(
        "mimo", 4096, 36, (32, 8), 11008, 151680, 32768, attention_bias=True,
        num_nextn_predict_layers=1, tie_word_embeddings=False,
    ),
    "ernie-4.5-0.3b.yaml": sizes(
        "ernie4_5", 1024, 18, (16, 2), 3072, 103424, 131072, head_dim=128, tie_word_embeddings=True
    ),
    "ernie-4.5-21b-a3b.yaml": sizes(
        "ernie4_5_moe", 2560, 28, (20, 4), 12288, 103424, 131072, moe_num_experts=64, moe_k=6,
        moe_intermediate_size=1536, moe_num_shared_experts=2, moe_layer_start_index=1,
        tie_word_embeddings=True,
    ),
    "glm-4.5-air.yaml": sizes(
        "glm4_moe", 4096, 46, (96, 8), 10944, 151552, 131072, n_routed_experts=128,
        moe_intermediate_size=1408, first_k_dense_replace=1, use_qk_norm=False, **GLM,
    ),
    "glm-4.6.yaml": sizes(
        "glm4_moe", 5120, 92, (96, 8), 12288, 151552, 202752, n_routed_experts=160,
        moe_intermediate_size=1536, first_k_dense_replace=3, use_qk_norm=True, **GLM,
    ),
    "deepseek-v3.yaml": sizes(
        "deepseek_v3", 7168, 61, (128, 128), 18432, 129280, 163840, q_lora_rank=1536,
        kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8, moe_intermediate_size=2048,
        first_k_dense_replace=3, n_group=8, topk_group=4, norm_topk_prob=True,
        routed_scaling_factor=2.5, scoring_func="sigmoid", topk_method="noaux_tc",
        num_nextn_predict_layers=1, tie_word_embeddings=False, rope_scaling=YARN_ROPE,
        quantization_config=FP8_BLOCKS,
    ),
}  # fmt: skip
BILLIONS = {
    "llama-3.1-8b.yaml": 8.03, "qwen2.5-7b.yaml": 7.62, "qwen3-8b.yaml": 8.19,
    "qwen3-30b-a3b.yaml": 30.5, "ernie-4.5-0.3b.yaml": 0.36, "ernie-4.5-21b-a3b.yaml": 21.8,
}  # fmt: skip
"""Parameters as the model cards say, where they count what is loaded here."""


def spec_of(name: str) -> PDDeploymentSpec:
    document = yaml.safe_load((EXAMPLES / name).read_text())
    return msgspec.convert(document["spec"], PDDeploymentSpec)


def shape_of(name: str, folder: Path) -> ModelShape:
    (folder / "config.json").write_text(json.dumps(PUBLISHED[name]))
    return load_shape(folder)


@pytest.mark.parametrize("name", BILLIONS)
def test_the_sizes_are_the_published_ones(name: str, tmp_path: Path) -> None:
    n_bytes = weight_bytes(shape_of(name, tmp_path), 0, BF16)
    assert n_bytes / BF16 / 1e9 == pytest.approx(BILLIONS[name], rel=0.015)


@pytest.mark.parametrize("name", PUBLISHED)
def test_weights_and_one_longest_request_fit_each_role(name: str, tmp_path: Path) -> None:
    spec, shape = spec_of(name), shape_of(name, tmp_path)
    for role in spec.roles:
        path = tmp_path / "worker.yaml"
        path.write_text(config.worker_config(OWNER, spec, role.name, "r1"))
        pod = worker_template(OWNER, spec, role, "r1")["spec"]
        env = {each["name"]: each.get("value", "") for each in pod["containers"][0]["env"]}
        read = with_ranks(load_config(path), env)
        options, ranks = resolve_options(read, shape), role.parallelism.tensor
        assert read.engine.tensor_parallel_size == ranks
        local = local_shape(shape, ranks)
        kv = KvShape(
            n_layers=shape.n_layers + int(options.use_mtp), kv_heads=local.n_kv_heads,
            block_size=options.block_size, head_dim=shape.head_dim, n_blocks=options.n_blocks,
            dtype="bfloat16", is_by_block=True,
        )  # fmt: skip
        wanted = weight_bytes(shape, int(options.use_mtp), BF16, ranks)
        wanted += kv.bytes_of(options.max_model_len) + WORKING_BYTES
        assert wanted < read.engine.gpu_memory_utilization * gpu_bytes(name)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_role_asks_for_a_gpu_a_rank(name: str) -> None:
    for role in spec_of(name).roles:
        (container,) = role.template["spec"]["containers"]
        limit = container["resources"]["limits"]["nvidia.com/gpu"]
        assert limit == str(role.parallelism.tensor)


def gpu_bytes(name: str) -> int:
    document = yaml.safe_load((EXAMPLES / name).read_text())
    selector = document["spec"]["roles"][0]["template"]["spec"]["nodeSelector"]
    return H200_BYTES if selector["accelerator"].endswith("h200") else H100_BYTES
