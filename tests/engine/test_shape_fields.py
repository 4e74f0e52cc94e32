"""config.json and generation_config.json become one ModelShape."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton_testing.tiny_model import TINY_MODEL
from baton_worker.engine.model.mla import Mla
from baton_worker.engine.model.rope import Llama3Scaling, YarnScaling
from baton_worker.engine.model.shape import ModelShape, fingerprint, load_shape


@pytest.fixture
def write_config(make_checkpoint: Callable[..., Any]) -> Callable[..., Path]:
    """Write a config.json without the keys in `drop` and with `fields`; returns the folder."""
    made = make_checkpoint()

    def write(drop: tuple[str, ...] = (), **fields: Any) -> Path:
        config = {key: value for key, value in made.config.items() if key not in drop} | fields
        (made.path / "config.json").write_text(json.dumps(config))
        folder: Path = made.path
        return folder

    return write


def test_every_field_is_read(write_config: Callable[..., Path]) -> None:
    shape = load_shape(write_config(baton_mtp_hidden="post_norm", rms_norm_eps=1e-6))
    assert shape == ModelShape(
        model_type="ernie4_5",
        vocab_size=96,
        hidden_size=32,
        n_layers=2,
        n_mtp_layers=1,
        n_heads=4,
        n_kv_heads=2,
        head_dim=8,
        intermediate_size=48,
        rope_style="interleaved",
        rope_theta=10000.0,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        mtp_hidden="post_norm",
        bos_token_id=0,
        eos_token_ids=(1,),
        max_position_embeddings=512,
        dtype="float32",
    )
    assert (shape.q_size, shape.kv_size, shape.n_kv_layers) == (32, 16, 3)


def test_llama_rotates_halves_and_does_not_tie_by_default(
    write_config: Callable[..., Path],
) -> None:
    shape = load_shape(
        write_config(
            drop=("tie_word_embeddings", "rope_theta"),
            model_type="llama",
            architectures=["LlamaForCausalLM"],
        )
    )
    assert (shape.rope_style, shape.rope_theta) == ("half", 10000.0)
    assert not shape.tie_word_embeddings


def test_qwen3_norms_heads_whose_size_is_apart(make_checkpoint: Callable[..., Any]) -> None:
    made = make_checkpoint("qwen3", head_dim=20, use_sliding_window=False, sliding_window=4096)
    shape = load_shape(made.path)
    assert (shape.rope_style, shape.has_qk_norm, shape.head_dim) == ("half", True, 20)
    assert shape.q_size == 80 != shape.hidden_size
    assert fingerprint(shape, "w") != fingerprint(
        dataclasses.replace(shape, has_qk_norm=False), "w"
    )


def test_qwen2_has_biases_and_a_head_size_that_follows(
    make_checkpoint: Callable[..., Any],
) -> None:
    shape = load_shape(make_checkpoint("qwen2", head_dim=None, num_nextn_predict_layers=None).path)
    assert (shape.has_qkv_bias, shape.has_qk_norm, shape.head_dim) == (True, False, 8)
    assert (shape.rope_style, shape.n_mtp_layers) == ("half", 0)


def test_mimo_drafts_from_normed_states_that_come_first(
    make_checkpoint: Callable[..., Any],
) -> None:
    shape = load_shape(
        make_checkpoint("mimo", attention_bias=True, num_nextn_predict_layers=2).path
    )
    assert (shape.has_qkv_bias, shape.n_mtp_layers) == (True, 2)
    assert (shape.mtp_hidden, shape.mtp_order) == ("post_norm", "hidden_embedding")
    switched = load_shape(make_checkpoint("mimo", baton_mtp_hidden="pre_norm").path)
    assert (switched.mtp_hidden, switched.mtp_order) == ("pre_norm", "hidden_embedding")


DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "max_position_embeddings": 163840,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "moe_layer_freq": 1,
    "ep_size": 1,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
"""What deepseek-ai publishes for V3 and R1, the quantisation of their weights aside."""


def test_deepseek_keeps_one_row_of_576_and_scales_scores_by_what_stretches(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK))
    shape = load_shape(tmp_path)
    assert shape.mla is not None
    grown = 0.1 * np.log(40) + 1.0
    assert shape.mla.score_scale == pytest.approx(192**-0.5 * grown**2, rel=1e-15)
    assert dataclasses.replace(shape.mla, score_scale=1.0) == Mla(1536, 512, 128, 64, 128, 1.0)
    assert (shape.n_heads, shape.n_kv_heads, shape.head_dim) == (128, 1, 576)
    assert (shape.projected_sizes, shape.o_size) == ((1536, 576), 16384)
    assert (shape.rope_style, shape.rope_head_size) == ("interleaved", 64)
    assert isinstance(shape.rope_scaling, YarnScaling)
    assert shape.rope_scaling.attention_factor == 1.0
    assert (shape.mtp_hidden, shape.mtp_order) == ("post_norm", "embedding_hidden")
    experts = shape.experts
    assert experts is not None
    assert (experts.layers[0], experts.layers[-1], experts.has_mtp) == (3, 60, True)
    assert (experts.n_groups, experts.n_chosen_groups, experts.scaling) == (8, 4, 2.5)
    left_out = ("first_k_dense_replace", "n_group", "topk_group", "routed_scaling_factor")
    shorter = {name: value for name, value in DEEPSEEK.items() if name not in left_out}
    (tmp_path / "config.json").write_text(json.dumps(shorter | {"rope_interleave": False}))
    assert load_shape(tmp_path) == dataclasses.replace(shape, rope_style="half"), "its defaults"


@pytest.mark.parametrize(
    ("fields", "grown"),
    [
        ({}, 1.0),
        ({"mscale": 0.7}, 1.0),
        ({"mscale": 1.0, "mscale_all_dim": 0.7}, 0.07 * np.log(4) + 1.0),
        ({"mscale_all_dim": 0.7}, 0.07 * np.log(4) + 1.0),
    ],
)
def test_scores_grow_by_mscale_all_dim_alone(
    make_checkpoint: Callable[..., Any], fields: dict[str, float], grown: float
) -> None:
    block = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    for name in ("rope_scaling", "rope_parameters"):
        shape = load_shape(make_checkpoint("deepseek_v3", **{name: block | fields}).path)
        assert shape.mla is not None
        assert shape.mla.score_scale == pytest.approx(14**-0.5 * grown**2, rel=1e-15)


def test_llama3_scaling_is_read(write_config: Callable[..., Path]) -> None:
    block = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
        "rope_type": "llama3",
    }
    shape = load_shape(write_config(rope_scaling=block))
    assert shape.rope_scaling == Llama3Scaling(8.0, 1.0, 4.0, 128)
    assert shape.max_position_embeddings == 512
    newer = load_shape(
        write_config(drop=("rope_theta",), rope_parameters=block | {"rope_theta": 5e5})
    )
    assert (newer.rope_scaling, newer.rope_theta) == (shape.rope_scaling, 5e5)


def test_yarn_lengthens_the_context_of_a_config_that_tells_the_old_one(
    write_config: Callable[..., Path],
) -> None:
    block = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    shape = load_shape(write_config(rope_scaling=block))
    assert shape.rope_scaling == YarnScaling(
        factor=4.0,
        original_positions=256,
        beta_fast=32.0,
        beta_slow=1.0,
        attention_factor=pytest.approx(0.1 * np.log(4.0) + 1.0, rel=1e-15),
    )
    assert shape.max_position_embeddings == 1024
    longer = load_shape(write_config(rope_scaling=block, max_position_embeddings=4096))
    assert longer.max_position_embeddings == 4096


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"attention_factor": 1.25}, 1.25),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        (
            {"mscale": 0.707, "mscale_all_dim": 1.0},
            (0.0707 * np.log(4) + 1) / (0.1 * np.log(4) + 1),
        ),
        ({"mscale": 0.707}, 0.1 * np.log(4) + 1),
        ({"factor": 1.0}, 1.0),
    ],
)
def test_yarns_attention_factor_is_told_or_follows(
    write_config: Callable[..., Path], fields: dict[str, float], expected: float
) -> None:
    block = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256} | fields
    scaling = load_shape(write_config(rope_scaling=block)).rope_scaling
    assert scaling is not None
    assert scaling.attention_factor == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("family", "eps"),
    [("llama", 1e-6), ("qwen2", 1e-6), ("qwen3", 1e-6), ("ernie4_5", 1e-5), ("mimo", 1e-6)],
)
def test_an_absent_epsilon_is_the_familys(
    make_checkpoint: Callable[..., Any], family: str, eps: float
) -> None:
    assert load_shape(make_checkpoint(family, rms_norm_eps=None).path).rms_norm_eps == eps


def test_absent_fields_take_the_family_defaults(write_config: Callable[..., Path]) -> None:
    drop = (
        "tie_word_embeddings",
        "rope_theta",
        "num_key_value_heads",
        "head_dim",
        "num_nextn_predict_layers",
        "bos_token_id",
        "eos_token_id",
        "architectures",
        "torch_dtype",
    )
    shape = load_shape(write_config(drop=drop))
    assert (shape.tie_word_embeddings, shape.rope_theta) == (True, 500000.0)
    assert (shape.n_kv_heads, shape.head_dim, shape.n_mtp_layers) == (4, 8, 0)
    assert (shape.bos_token_id, shape.eos_token_ids) == (None, ())
    assert (shape.mtp_hidden, shape.dtype) == ("pre_norm", "float32")


def test_rope_parameters_of_newer_configs_are_read(write_config: Callable[..., Path]) -> None:
    block = {"rope_theta": 250000.0, "rope_type": "default"}
    assert (
        load_shape(write_config(drop=("rope_theta",), rope_parameters=block)).rope_theta == 250000
    )


@pytest.mark.parametrize("scaling", [None, {"type": "default"}, {"rope_type": "none"}])
def test_a_rope_scaling_that_scales_nothing_is_accepted(
    write_config: Callable[..., Path], scaling: object
) -> None:
    assert load_shape(write_config(rope_scaling=scaling)).rope_theta == 10000.0


@pytest.mark.parametrize(
    ("config_eos", "generation_eos", "expected"),
    [
        (5, None, (5,)),
        ([5, 6], None, (5, 6)),
        (5, [6, 5], (5, 6)),
        (None, 7, (7,)),
        (5, 0, (5, 0)),
    ],
)
def test_end_of_sequence_ids_of_both_files_count_once_each(
    write_config: Callable[..., Path],
    config_eos: object,
    generation_eos: object,
    expected: tuple[int, ...],
) -> None:
    folder = write_config(eos_token_id=config_eos)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation_eos}))
    assert load_shape(folder).eos_token_ids == expected


def test_fields_that_decide_nothing_are_ignored(write_config: Callable[..., Path]) -> None:
    plain = load_shape(write_config())
    assert load_shape(write_config(transformers_version="5.3", attention_dropout=0.0)) == plain


@pytest.mark.parametrize(
    "change",
    [
        {"rope_theta": 1e6},
        {"mtp_hidden": "post_norm"},
        {"rope_style": "half"},
        {"rms_norm_eps": 1e-6},
        {"n_kv_heads": 4},
        {"has_qkv_bias": True},
        {"mtp_order": "hidden_embedding"},
        {"rope_scaling": Llama3Scaling(8.0, 1.0, 4.0, 128)},
        {"mla": Mla(0, 16, 8, 4, 8, 0.25)},
    ],
)
def test_the_fingerprint_follows_what_decides_kv(
    write_config: Callable[..., Path], change: dict[str, Any]
) -> None:
    shape = load_shape(write_config())
    assert fingerprint(shape, "w") == fingerprint(dataclasses.replace(shape), "w")
    assert fingerprint(shape, "w") != fingerprint(dataclasses.replace(shape, **change), "w")
    assert fingerprint(shape, "w") != fingerprint(shape, "other weights")


def test_models_of_the_first_release_keep_their_names() -> None:
    """Workers of both versions must pair while one is taken for the other."""
    assert fingerprint(load_shape(TINY_MODEL), "w") == "41b40191d56f59d44ffce72934724170"


@pytest.mark.parametrize(
    "change", [{"eos_token_ids": (3, 4)}, {"dtype": "bfloat16"}, {"max_position_embeddings": 8}]
)
def test_the_fingerprint_ignores_what_does_not(
    write_config: Callable[..., Path], change: dict[str, Any]
) -> None:
    shape = load_shape(write_config())
    assert fingerprint(shape, "w") == fingerprint(dataclasses.replace(shape, **change), "w")


def test_the_base_counts_wherever_it_is_told(write_config: Callable[..., Path]) -> None:
    block = {"rope_type": "default", "rope_theta": 500000.0}
    for name in ("rope_scaling", "rope_parameters"):
        shape = load_shape(write_config(**{"rope_theta": None, name: block}))
        assert (shape.rope_theta, shape.rope_scaling) == (500000.0, None)


def test_the_older_name_of_a_kind_counts_where_the_newer_is_null(
    write_config: Callable[..., Path],
) -> None:
    block = {
        "rope_type": None, "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
    }  # fmt: skip
    assert isinstance(load_shape(write_config(rope_scaling=block)).rope_scaling, YarnScaling)
