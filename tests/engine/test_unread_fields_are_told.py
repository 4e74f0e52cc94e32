"""Fields of config.json that nothing reads are told by name; those known to be harmless are not."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton_testing.tiny_model import TINY_MODEL
from baton_worker.compatibility import process_semantic_hash
from baton_worker.config import ConfigError, EngineConfig, ModelConfig, ProcessConfig
from baton_worker.engine import build
from baton_worker.engine.build import build_engine
from baton_worker.engine.model.families.registry import FAMILIES
from baton_worker.engine.model.refusals import ModelShapeError
from baton_worker.engine.model.shape import load_shape
from baton_worker.engine.model.unread_fields import unread_fields

PUBLISHED = {
    "_commit_hash": "0f1e2d",
    "attention_dropout": 0.0,
    "attn_factor": 1.0,
    "add_cross_attention": False,
    "auto_map": {"AutoConfig": "configuration.Config"},
    "classifier_dropout": 0.1,
    "do_sample": False,
    "initializer_range": 0.02,
    "is_llama_config": True,
    "is_quantized": False,
    "max_length": 20,
    "max_window_layers": 28,
    "moe_gate": "topk",
    "multi_token_pred_lambda": 0.1,
    "num_beams": 1,
    "pad_token_id": 0,
    "pretraining_tp": 1,
    "pruned_heads": {},
    "rope_interleaved": False,
    "router_aux_loss_coef": 0.001,
    "scale_attn_weights": True,
    "temperature": 1.0,
    "tokenizer_class": "LlamaTokenizerFast",
    "transformers_version": "4.51.0",
    "unsloth_fixed": True,
    "use_cache": True,
    "use_rmsnorm": True,
}


def with_field(tmp_path: Path, field: bytes) -> Path:
    """Return a copy of the tiny model whose config.json has this field too."""
    folder = shutil.copytree(TINY_MODEL, tmp_path / "model")
    path = folder / "config.json"
    path.write_bytes(path.read_bytes().rstrip().removesuffix(b"}") + b", " + field + b"}")
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_what_families_read_and_what_is_harmless_is_not_told(
    make_checkpoint: Callable[..., Any], family: str
) -> None:
    made = make_checkpoint(family)
    (made.path / "config.json").write_text(json.dumps(made.config | PUBLISHED))
    has_experts = load_shape(made.path).experts is not None
    assert unread_fields(made.path, has_experts) == ()


def test_a_field_that_nobody_reads_is_named_at_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = shutil.copytree(TINY_MODEL, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    told = {"residual_multiplier": 0.22, "attention_multiplier": 0.5, "swish_beta": None}
    (folder / "config.json").write_text(json.dumps(config | told))
    engine = EngineConfig(device="sim", max_model_len=64)
    with caplog.at_level(logging.WARNING):
        build_engine(ProcessConfig(model=ModelConfig(path=str(folder)), engine=engine))
    messages = [record.getMessage() for record in caplog.records]
    assert [message for message in messages if "nothing reads" in message] == [
        "config.json has fields that nothing reads: attention_multiplier, residual_multiplier"
    ]


@pytest.mark.parametrize("value", [b'"\xff\xfe"', b"1e400", b"9" * 5000, b'{"\xff": 1}'])
def test_a_value_that_nobody_reads_need_not_be_one(tmp_path: Path, value: bytes) -> None:
    folder = with_field(tmp_path, b'"odd": ' + value)
    assert unread_fields(folder, False) == ("odd",)
    with_it, without = (
        ProcessConfig(model=ModelConfig(path=str(path), served_name="model"))
        for path in (folder, TINY_MODEL)
    )
    assert process_semantic_hash(with_it) == process_semantic_hash(without)


def test_a_name_that_is_no_text_is_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[object] = []
    monkeypatch.setattr(build, "_simulated", lambda *given: loaded.append(given))
    folder = with_field(tmp_path, b'"\xff": 1')
    engine = EngineConfig(device="sim", max_model_len=64)
    with pytest.raises(ModelShapeError, match=r"/model/config\.json: .*utf-8"):
        build_engine(ProcessConfig(model=ModelConfig(path=str(folder)), engine=engine))
    assert not loaded


@pytest.mark.parametrize("text", [b"", b'{"vocab_size": "many"}', b'{"vocab_size": 1e400}'])
def test_a_size_of_the_vocabulary_that_is_none_is_a_configuration_error(
    tmp_path: Path, text: bytes
) -> None:
    folder = shutil.copytree(TINY_MODEL, tmp_path / "model")
    (folder / "config.json").write_bytes(text)
    with pytest.raises(ConfigError, match=r"model\.path: .*config\.json: "):
        process_semantic_hash(ProcessConfig(model=ModelConfig(path=str(folder))))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("moe_intermediate_size", 32),
        ("first_k_dense_replace", 1),
        ("n_group", 8),
        ("n_shared_experts", 1),
        ("norm_topk_prob", True),
        ("routed_scaling_factor", 2.5),
        ("scoring_func", "sigmoid"),
    ],
)
def test_what_tells_of_experts_is_read_where_there_are_some(
    make_checkpoint: Callable[..., Any], name: str, value: object
) -> None:
    dense, mixture = make_checkpoint("llama"), make_checkpoint("glm4_moe")
    (dense.path / "config.json").write_text(json.dumps(dense.config | {name: value}))
    assert unread_fields(dense.path, load_shape(dense.path).experts is not None) == (name,)
    (mixture.path / "config.json").write_text(json.dumps(mixture.config | {name: value}))
    assert unread_fields(mixture.path, True) == ()


def test_fields_of_experts_that_say_nothing_are_not_told(
    make_checkpoint: Callable[..., Any],
) -> None:
    """As `transformers` writes some for models without."""
    made, says = make_checkpoint("qwen3"), {"n_group": 1, "num_experts": 0, "mlp_only_layers": []}
    path = made.path / "config.json"
    path.write_text(json.dumps(made.config | says | {"routed_scaling_factor": 1.0, "moe_k": None}))
    assert unread_fields(made.path, load_shape(made.path).experts is not None) == ()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("moe_gate", b'"top2_fused"'),
        ("rope_interleaved", b"true"),
        ("is_quantized", b"true"),
        ("pruned_heads", b'{"0": [1]}'),
    ],
)
def test_what_is_harmless_with_one_value_is_told_with_another(
    tmp_path: Path, name: str, value: bytes
) -> None:
    folder = with_field(tmp_path, b'"' + name.encode() + b'": ' + value)
    assert unread_fields(folder, False) == (name,)


def test_the_tiny_model_says_nothing_that_nobody_reads() -> None:
    assert unread_fields(TINY_MODEL, False) == ()
