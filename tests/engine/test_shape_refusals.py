"""A model that Baton cannot run is refused at start, by file, field and value."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton_worker.engine.model.families.registry import FAMILIES
from baton_worker.engine.model.shape import ModelShapeError, load_shape

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.fixture
def refuse(make_checkpoint: Callable[..., Any]) -> Callable[..., None]:
    """Assert that a config with these fields is refused with the file's name and `message`."""
    made = make_checkpoint()

    def check(message: str, **fields: Any) -> None:
        path: Path = made.path / "config.json"
        path.write_text(json.dumps(made.config | fields))
        with pytest.raises(ModelShapeError, match=re.escape(message)) as caught:
            load_shape(made.path)
        assert str(path) in str(caught.value)

    return check


@pytest.mark.parametrize(
    ("field", "value", "shown"),
    [
        (
            "model_type",
            "bloom",
            f"model_type is 'bloom', supported is one of {sorted(FAMILIES)}",
        ),
        ("model_type", "deepseek_v2", "for it Baton lacks: its choice of experts"),
        ("kv_lora_rank", 512, "kv_lora_rank is 512, supported is unset or false"),
        ("q_lora_rank", 1536, "q_lora_rank is 1536, supported is unset or false"),
        ("v_head_dim", 128, "v_head_dim is 128"),
        ("rope_interleave", True, "rope_interleave is True"),
        ("model_type", "gpt_oss", "sliding windows, attention sinks"),
        ("model_type", "mixtral", "for it Baton lacks: its names of experts"),
        ("use_sliding_window", True, "use_sliding_window is True"),
        ("layer_types", ["full_attention", "linear_attention"], "layer_types is ['full_attention'"),
        ("architectures", ["LlamaForCausalLM"], "architectures is ['LlamaForCausalLM']"),
        ("hidden_act", "gelu", "hidden_act is 'gelu'"),
        ("use_bias", True, "use_bias is True"),
        ("attention_bias", True, "attention_bias is True"),
        ("mlp_bias", True, "mlp_bias is True"),
        ("use_qk_norm", True, "use_qk_norm is True"),
        ("sliding_window", 4096, "sliding_window is 4096"),
        ("use_rmsnorm", False, "use_rmsnorm is False, supported is unset or true"),
        ("moe_num_experts", 64, "moe_num_experts is 64"),
        ("moe_num_experts", [64, 64], "moe_num_experts is [64, 64]"),
        ("num_local_experts", 8, "num_local_experts is 8"),
        ("num_experts", 8, "num_experts is 8"),
        ("n_routed_experts", 256, "n_routed_experts is 256"),
        ("use_mrope", True, "use_mrope is True"),
        ("compression_config", {"format": "pack"}, "compression_config is {'format': 'pack'}"),
        (
            "quantization_config",
            {"quant_method": "gptq", "bits": 4},
            "quantization_config.quant_method is 'gptq', supported is 'fp8'",
        ),
        ("partial_rotary_factor", 0.5, "partial_rotary_factor is 0.5"),
        ("compression_ratio", 2.0, "compression_ratio is 2.0"),
        ("rope_scaling", {"type": "linear"}, "rope_scaling.rope_type is 'linear'"),
        ("rope_scaling", {"type": "dynamic", "factor": 2.0}, "supported is 'default', 'llama3' or"),
        ("rope_parameters", {"rope_type": "longrope"}, "rope_parameters.rope_type is 'longrope'"),
        ("rope_theta", 0, "rope_theta is 0"),
        ("rope_parameters", {"rope_theta": "big"}, "rope_parameters.rope_theta is 'big'"),
        ("rope_theta", 1.0, "rope_theta is 1.0, supported is a number > 1"),
        ("rope_parameters", {"rope_theta": 10**400}, "rope_parameters.rope_theta is 1000"),
        ("rope_scaling", {"factor": 4.0}, "rope_scaling.factor is 4.0, supported is unset without"),
        (
            "rope_scaling",
            {"rope_type": "default", "factor": 4.0},
            "rope_scaling.factor is 4.0, supported is unset for 'default'",
        ),
        (
            "rope_parameters",
            {"full_attention": {"rope_type": "yarn", "factor": 4.0}},
            "rope_parameters.full_attention is {'rope_type': 'yarn'",
        ),
        (
            "rope_scaling",
            YARN | {"type": "llama3"},
            "rope_scaling.type is 'llama3', supported is unset or 'yarn'",
        ),
        ("rope_scaling", YARN | {"factor": 1e308}, "rope_scaling.factor is 1e+308"),
        ("rope_scaling", YARN | {"factor": 10**400}, "rope_scaling.factor is 1000"),
        (
            "rope_scaling",
            YARN | {"original_max_position_embeddings": 10**400},
            "rope_scaling.original_max_position_embeddings is 1000",
        ),
        ("rope_scaling", YARN | {"attention_factor": 1e39}, "attention_factor is 1e+39"),
        (
            "rope_scaling",
            YARN | {"mscale": 1e300, "mscale_all_dim": 1e-9},
            "rope_scaling.attention_factor is 1.",
        ),
        ("rms_norm_eps", -1e-6, "rms_norm_eps is -1e-06"),
        ("rms_norm_eps", 1e30, "rms_norm_eps is 1e+30"),
        ("max_position_embeddings", 10**18, "max_position_embeddings is 1000000000000000000"),
        ("baton_mtp_hidden", "both", "$.baton_mtp_hidden"),
        ("num_key_value_heads", 3, "num_key_value_heads is 3, supported is a divisor of 4 heads"),
        ("num_key_value_heads", 0, "num_key_value_heads is 0"),
        ("head_dim", 0, "head_dim is 0"),
        ("head_dim", 7, "head_dim is 7"),
        ("hidden_size", 0, "hidden_size is 0"),
        ("num_attention_heads", 0, "num_attention_heads is 0"),
        ("num_hidden_layers", -1, "num_hidden_layers is -1"),
        ("num_hidden_layers", 10**9, "num_hidden_layers is 1000000000"),
        ("num_nextn_predict_layers", -1, "num_nextn_predict_layers is -1"),
        ("vocab_size", "many", "$.vocab_size"),
        ("eos_token_id", 96, "eos_token_id is 96"),
        ("eos_token_id", [1, -5], "eos_token_id is -5"),
        ("bos_token_id", 4000, "bos_token_id is 4000"),
    ],
)
def test_the_field_and_its_value_are_named(
    refuse: Callable[..., None], field: str, value: object, shown: str
) -> None:
    refuse(shown, **{field: value})


def test_an_absent_size_is_named(make_checkpoint: Callable[..., Any]) -> None:
    made = make_checkpoint()
    del made.config["hidden_size"]
    (made.path / "config.json").write_text(json.dumps(made.config))
    with pytest.raises(ModelShapeError, match="hidden_size"):
        load_shape(made.path)


@pytest.mark.parametrize("field", ["head_dim", "num_key_value_heads"])
def test_qwen3_must_say_what_does_not_follow_from_other_sizes(
    make_checkpoint: Callable[..., Any], field: str
) -> None:
    made = make_checkpoint("qwen3")
    (made.path / "config.json").write_text(json.dumps(made.config | {field: None}))
    with pytest.raises(ModelShapeError, match=f"{field} is None, supported is a number"):
        load_shape(made.path)


@pytest.mark.parametrize(
    ("family", "fields", "shown"),
    [
        ("qwen3_moe", {"num_experts": None}, "num_experts is None, supported is one number >= 1"),
        ("qwen3_moe", {"num_experts": 0}, "num_experts is 0"),
        (
            "qwen3_moe",
            {"num_experts_per_tok": 9},
            "num_experts_per_tok is 9, supported is <= the 8",
        ),
        ("qwen3_moe", {"moe_intermediate_size": [24, 8]}, "moe_intermediate_size is [24, 8]"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ("qwen3_moe", {"mlp_only_layers": [0, 1, 2]}, "mlp_only_layers: no layer would have"),
        ("ernie4_5_moe", {"moe_num_experts": [8, 8]}, "moe_num_experts is [8, 8]"),
        ("qwen3_moe", {"mlp_only_layers": [77]}, "mlp_only_layers is [77], supported is some of 0"),
        ("qwen3_moe", {"num_experts_per_tok": [3, 3]}, "num_experts_per_tok is [3, 3]"),
        ("ernie4_5_moe", {"moe_k": None}, "moe_k is None"),
        ("ernie4_5_moe", {"moe_k": 9}, "moe_k is 9, supported is <= the 8 experts"),
        ("ernie4_5_moe", {"moe_k": [3, 3]}, "moe_k is [3, 3], supported is one number"),
        (
            "ernie4_5_moe",
            {"moe_layer_interval": 5},
            "moe_layer_end_index and moe_layer_interval: no layer would have experts",
        ),
        ("glm4_moe", {"n_routed_experts": [8]}, "n_routed_experts is [8], supported is one number"),
        ("glm4_moe", {"first_k_dense_replace": -1}, "first_k_dense_replace is -1"),
        ("ernie4_5_moe", {"moe_layer_start_index": [1, 1]}, "moe_layer_start_index is [1, 1]"),
        (
            "ernie4_5_moe",
            {"moe_layer_end_index": 3},
            "moe_layer_end_index is 3, supported is -1 or",
        ),
        ("ernie4_5_moe", {"moe_layer_end_index": 10**18}, "moe_layer_end_index is 1000000"),
        ("ernie4_5_moe", {"moe_layer_end_index": -5}, "moe_layer_end_index is -5"),
        ("ernie4_5_moe", {"moe_norm_min": -1}, "moe_norm_min is -1"),
        ("ernie4_5_moe", {"moe_num_shared_experts": -1}, "moe_num_shared_experts is -1"),
        ("glm4_moe", {"n_routed_experts": None}, "n_routed_experts is None"),
        ("glm4_moe", {"n_group": 3}, "n_group is 3, supported is a divisor of the 8 experts"),
        ("glm4_moe", {"topk_group": 5}, "topk_group is 5, supported is in 1..4"),
        ("glm4_moe", {"n_group": 8}, "n_group is 8, supported is groups of two experts or more"),
        ("glm4_moe", {"topk_group": 1}, "num_experts_per_tok is 3, supported is <= the 2 in"),
        ("glm4_moe", {"first_k_dense_replace": 3}, "first_k_dense_replace: no layer would have"),
        ("glm4_moe", {"routed_scaling_factor": 0}, "routed_scaling_factor is 0"),
        ("glm4_moe", {"partial_rotary_factor": 0.1}, "partial_rotary_factor is 0.1"),
        ("glm4_moe", {"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5"),
        (
            "ernie4_5_moe",
            {"num_experts_per_tok": 1},
            "moe_k is 3, supported is unset or 1, as num_e",
        ),
        ("qwen3_moe", {"num_local_experts": 4}, "num_experts is 8, supported is unset or 4, as"),
        ("deepseek_v3", {"kv_lora_rank": None}, "kv_lora_rank is None, supported is a number >= 1"),
        ("deepseek_v3", {"v_head_dim": 0}, "v_head_dim is 0"),
        ("deepseek_v3", {"qk_rope_head_dim": 7}, "qk_rope_head_dim is 7, supported is an even"),
        ("deepseek_v3", {"kv_lora_rank": 8192}, "kv_lora_rank is 8192, supported is <= 4074"),
        ("deepseek_v3", {"kv_lora_rank": 33}, "kv_lora_rank is 33, supported is an even number"),
        (
            "deepseek_v3",
            {"qk_rope_head_dim": 8192},
            "qk_rope_head_dim is 8192, supported is < 4080",
        ),
        (
            "deepseek_v3",
            {
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                    "mscale_all_dim": 1e160,
                }
            },
            "mscale_all_dim is 1e+160, supported is a smaller number",
        ),
        (
            "deepseek_v3",
            {"q_lora_rank": 0},
            "q_lora_rank is 0, supported is a number >= 1, or null",
        ),
        ("deepseek_v3", {"qk_head_dim": 13}, "qk_head_dim is 13, supported is unset or 14"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads is 2, supported is unset"),
        ("deepseek_v3", {"head_dim": 8}, "head_dim is 8, supported is unset or 6"),
        ("deepseek_v3", {"attention_bias": True}, "attention_bias is True"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method is 'greedy'"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ("deepseek_v3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        (
            "deepseek_v3",
            {"rope_scaling": YARN | {"mscale_all_dim": 1e4, "mscale": 1e4, "factor": 40.0}},
            "rope_scaling.mscale_all_dim is 10000.0",
        ),
        ("glm4_moe", {"num_local_experts": 4}, "n_routed_experts is 8, supported is unset or 4"),
        ("glm4_moe", {"num_experts": 16}, "num_experts is 16, supported is unset"),
        (
            "glm4_moe",
            {"scoring_func": "softmax"},
            "scoring_func is 'softmax', supported is unset or",
        ),
        ("glm4_moe", {"topk_method": "greedy"}, "topk_method is 'greedy'"),
        ("glm4_moe", {"rope_interleave": True}, "rope_interleave is True"),
        ("glm4_moe", {"moe_layer_freq": 2}, "moe_layer_freq is 2, supported is unset or 1"),
        ("glm4_moe", {"routed_scaling_factor": 1e39}, "routed_scaling_factor is 1e+39"),
        (
            "ernie4_5_moe",
            {"norm_topk_prob": False},
            "norm_topk_prob is False, supported is unset or",
        ),
        ("ernie4_5_moe", {"moe_gate_act": "sigmoid"}, "moe_gate_act is 'sigmoid'"),
        ("qwen3_moe", {"routed_scaling_factor": 2.5}, "routed_scaling_factor is 2.5, supported is"),
        ("qwen3_moe", {"n_shared_experts": 1}, "n_shared_experts is 1, supported is unset"),
        ("qwen3_moe", {"qkv_bias": True}, "qkv_bias is True"),
        ("qwen3_moe", {"use_qk_norm": False}, "use_qk_norm is False, supported is unset or True"),
        (
            "qwen3",
            {"dual_chunk_attention_config": {"chunk_size": 4}},
            "dual_chunk_attention_config",
        ),
        ("qwen3", {"swiglu_limit": 7.0}, "swiglu_limit is 7.0"),
        (
            "glm4_moe",
            {"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 1.0}},
            "supported is unset or 1.0, as rope_parameters.partial_rotary_factor is",
        ),
    ],
)
def test_a_mixture_that_there_cannot_be_is_named(
    make_checkpoint: Callable[..., Any], family: str, fields: dict[str, Any], shown: str
) -> None:
    made = make_checkpoint(family)
    (made.path / "config.json").write_text(json.dumps(made.config | fields))
    with pytest.raises(ModelShapeError, match=re.escape(shown)):
        load_shape(made.path)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        (
            "qwen3_moe",
            {
                "use_qk_norm": True,
                "qkv_bias": False,
                "shared_expert_intermediate_size": 0,
                "num_local_experts": 8,
                "router_aux_loss_coef": 0.0,
            },
        ),
        (
            "ernie4_5_moe",
            {"num_experts_per_tok": 3, "moe_use_aux_free": True, "moe_capacity": [64]},
        ),
        ("glm4_moe", {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}),
    ],
)
def test_what_published_configs_say_beside_is_no_reason_to_refuse_them(
    make_checkpoint: Callable[..., Any], family: str, fields: dict[str, Any]
) -> None:
    made = make_checkpoint(family)
    plain = load_shape(made.path)
    (made.path / "config.json").write_text(json.dumps(made.config | fields))
    assert load_shape(made.path) == plain


def test_a_row_may_be_as_wide_as_attention_has_room_for(
    make_checkpoint: Callable[..., Any],
) -> None:
    """Two queries and eight warps' results of 2 * 258 values, as float32 in 48 KiB."""
    made = make_checkpoint("deepseek_v3")
    path = made.path / "config.json"
    path.write_text(json.dumps(made.config | {"kv_lora_rank": 4074}))
    row = load_shape(made.path).head_dim
    assert (2 * row + 8 * 2 * 258) * 4 <= 48 * 1024 < (2 * (row + 2) + 8 * 2 * 258) * 4
    path.write_text(json.dumps(made.config | {"kv_lora_rank": 4076}))
    with pytest.raises(ModelShapeError, match="kv_lora_rank is 4076, supported is <= 4074"):
        load_shape(made.path)


def test_whether_queries_are_compressed_must_be_said(make_checkpoint: Callable[..., Any]) -> None:
    """Null says no; what transformers takes for an absent one is one model's own size."""
    made = make_checkpoint("deepseek_v3")
    config = {name: value for name, value in made.config.items() if name != "q_lora_rank"}
    (made.path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelShapeError, match=r"q_lora_rank is absent, .* or null for queries"):
        load_shape(made.path)


def test_an_absent_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelShapeError, match=re.escape(str(tmp_path / "config.json"))):
        load_shape(tmp_path)


def test_a_malformed_generation_config_is_named(make_checkpoint: Callable[..., Any]) -> None:
    path = make_checkpoint().path / "generation_config.json"
    path.write_text("{")
    with pytest.raises(ModelShapeError, match=re.escape(str(path))):
        load_shape(path.parent)


@pytest.mark.parametrize("family", ["qwen2", "mimo"])
def test_biases_that_a_family_always_has_cannot_be_switched_off(
    make_checkpoint: Callable[..., Any], family: str
) -> None:
    for value in (True, None):
        assert load_shape(make_checkpoint(family, attention_bias=value).path).has_qkv_bias
    message = f"attention_bias is False, supported is unset or true for {family}"
    with pytest.raises(ModelShapeError, match=message):
        load_shape(make_checkpoint(family, attention_bias=False).path)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mimo"])
@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"use_sliding_window": True, "sliding_window": 32}, "use_sliding_window is True"),
        ({"sliding_window": 32}, "sliding_window is 32"),
    ],
)
def test_a_window_that_may_slide_is_refused(
    make_checkpoint: Callable[..., Any], family: str, fields: dict[str, Any], shown: str
) -> None:
    with pytest.raises(ModelShapeError, match=shown):
        load_shape(make_checkpoint(family, **fields).path)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("block", "change", "shown"),
    [
        (LLAMA3, {"factor": None}, "factor is None, supported is a number > 0"),
        (LLAMA3, {"factor": 0.5}, "factor is 0.5, supported is a number >= 1"),
        (LLAMA3, {"factor": "8"}, "factor is '8', supported is a number > 0"),
        (LLAMA3, {"factor": True}, "factor is True, supported is a number > 0"),
        (LLAMA3, {"high_freq_factor": 1.0}, "high_freq_factor is 1.0, supported is more than low"),
        (LLAMA3, {"low_freq_factor": -1}, "low_freq_factor is -1, supported is a number > 0"),
        (
            LLAMA3,
            {"original_max_position_embeddings": None},
            "original_max_position_embeddings is None, supported is a whole number >= 1",
        ),
        (LLAMA3, {"beta_fast": 32}, "beta_fast is 32, supported is unset for 'llama3'"),
        (YARN, {"short_factor": [1.0]}, "short_factor is [1.0], supported is unset for 'yarn'"),
        (
            YARN,
            {"beta_fast": 1, "beta_slow": 2},
            "beta_fast is 1, supported is more than beta_slow",
        ),
        (YARN, {"truncate": "no"}, "truncate is 'no', supported is true or false"),
        (YARN, {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, supported is unset"),
        (YARN, {"attention_factor": 0}, "attention_factor is 0, supported is a number > 0"),
    ],
)
@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_what_no_formula_stands_for_is_named(
    refuse: Callable[..., None], name: str, block: Any, change: Any, shown: str
) -> None:
    refuse(f"{name}.{shown}", **{name: block | change})


def test_two_scalings_that_differ_are_refused(refuse: Callable[..., None]) -> None:
    other = YARN | {"factor": 2.0}
    refuse("unset where rope_parameters scales too", rope_scaling=YARN, rope_parameters=other)


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_a_base_that_is_told_twice_must_be_the_same(refuse: Callable[..., None], name: str) -> None:
    refuse(
        f"rope_theta is 10000.0, supported is unset or 500000.0, as {name}.rope_theta is",
        **{"rope_theta": 10000.0, name: YARN | {"rope_theta": 500000.0}},
    )


def test_the_file_that_names_a_strange_end_is_named(make_checkpoint: Callable[..., Any]) -> None:
    made = make_checkpoint()
    path = made.path / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": [1, 4000]}))
    with pytest.raises(ModelShapeError, match=re.escape(f"{path}: eos_token_id is 4000")):
        load_shape(made.path)


@pytest.mark.parametrize("text", [b'{"model_type": "\xff"}', b'{"a":' + b"[" * 99999])
def test_a_file_that_is_no_json_is_named(make_checkpoint: Callable[..., Any], text: bytes) -> None:
    made = make_checkpoint()
    (made.path / "config.json").write_bytes(text)
    with pytest.raises(ModelShapeError, match=re.escape(str(made.path / "config.json"))):
        load_shape(made.path)
