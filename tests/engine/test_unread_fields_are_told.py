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
from baton_worker.config import EngineConfig, ModelConfig, ProcessConfig
from baton_worker.engine.build import build_engine
from baton_worker.engine.model.families.registry import FAMILIES
from baton_worker.engine.model.unread_fields import unread_fields

PUBLISHED = {
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration.Config"},
    "initializer_range": 0.02,
    "max_window_layers": 28,
    "pad_token_id": 0,
    "pretraining_tp": 1,
    "router_aux_loss_coef": 0.001,
    "transformers_version": "4.51.0",
    "use_cache": True,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_families_read_and_what_is_harmless_is_not_told(
    make_checkpoint: Callable[..., Any], family: str
) -> None:
    made = make_checkpoint(family)
    (made.path / "config.json").write_text(json.dumps(made.config | PUBLISHED))
    assert unread_fields(made.path) == ()


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


def test_the_tiny_model_says_nothing_that_nobody_reads() -> None:
    assert unread_fields(TINY_MODEL) == ()
