"""Which workers compute whole prompts beside their role, and in which chunks."""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec
import pytest

from baton_testing.tiny_model import TINY_MODEL
from baton_worker.config import (
    ConfigError,
    ControlConfig,
    CurveConfig,
    EngineConfig,
    HttpConfig,
    LinkConfig,
    ModelConfig,
    ProcessConfig,
    load_config,
)
from baton_worker.engine.api import DeviceError
from baton_worker.engine.model.shape import load_shape
from baton_worker.engine.options import resolve_options
from baton_worker.identity import Role
from baton_worker.main import main
from baton_worker.messages import DECODE_PROMPTS, FEATURES
from baton_worker.roles import process
from baton_worker.roles.prompt_chunks import features_of, takes_prompts, with_chunks_of

ASKED = ProcessConfig(
    ModelConfig("m"),
    engine=EngineConfig(prefill_chunk_tokens=2048, decode_prompt_chunk_tokens=512),
)
OTHERS = [Role.PREFILL, Role.MIXED]


def test_a_decode_worker_that_is_told_to_says_so_and_no_step_of_its_own_is_larger():
    assert features_of(ASKED, Role.DECODE) == (DECODE_PROMPTS,)
    engine = with_chunks_of(ASKED, Role.DECODE).engine
    assert engine == msgspec.structs.replace(ASKED.engine, prefill_chunk_tokens=512)


@pytest.mark.parametrize("role", OTHERS, ids=str)
def test_other_roles_keep_their_chunks_and_say_nothing(role):
    assert not takes_prompts(ASKED, role)
    assert features_of(ASKED, role) == ()
    engine = with_chunks_of(ASKED, role).engine
    assert engine == msgspec.structs.replace(ASKED.engine, decode_prompt_chunk_tokens=0)


def test_no_worker_says_so_by_default():
    told_nothing = ProcessConfig(ModelConfig("m"))
    assert features_of(told_nothing, Role.DECODE) == ()
    assert with_chunks_of(told_nothing, Role.DECODE) == told_nothing
    assert DECODE_PROMPTS not in FEATURES, "what every worker of this version says"


@pytest.mark.parametrize("tokens", [1, 15])
def test_chunks_of_hardly_anything_are_refused_by_field_and_flag(tmp_path, capsys, tokens):
    path = tmp_path / "decode.yaml"
    path.write_text(f"model: {{path: m}}\nengine: {{decode_prompt_chunk_tokens: {tokens}}}\n")
    with pytest.raises(
        ConfigError, match=rf"engine.*decode_prompt_chunk_tokens is {tokens}: give 16"
    ):
        load_config(path)
    told = ["local", "--model", "m", "--decode-prompt-chunk", str(tokens)]
    assert main(told) == 78
    assert (
        f"--decode-prompt-chunk: decode_prompt_chunk_tokens is {tokens}" in capsys.readouterr().err
    )


@pytest.mark.parametrize("role", [Role.DECODE, Role.PREFILL], ids=str)
def test_a_chunk_that_the_device_has_no_room_for_is_told_by_the_field_it_is_from(
    monkeypatch, tmp_path, role
):
    """And what is said of another thing is said as it was."""

    def build(config, **_):
        path, options = Path(config.model.path), resolve_options(config, load_shape(TINY_MODEL))
        raise DeviceError(f"{path}: no room for {options.chunk_field} {options.prefill_tokens}")

    monkeypatch.setattr(process, "build_engine", build)
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)
    config = ProcessConfig(
        ModelConfig("engine.prefill_chunk_tokens"),
        engine=ASKED.engine,
        link=LinkConfig(gateways=("tcp://127.0.0.1:1",), curve=CurveConfig(enabled=False)),
        health=HttpConfig("127.0.0.1", 0),
        control=ControlConfig(str(tmp_path / "control")),
    )
    field = "decode_prompt_chunk_tokens 512" if role is Role.DECODE else "prefill_chunk_tokens 2048"
    with pytest.raises(
        ConfigError, match=rf"^engine\.prefill_chunk_tokens: no room for engine\.{field}$"
    ):
        process.run_worker(config, role, on_ready=lambda ready: None)
