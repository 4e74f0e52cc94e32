"""Which workers compute whole prompts beside their role, and in which chunks."""

from __future__ import annotations

import threading

import msgspec
import pytest

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
    assert with_chunks_of(ASKED, role) is ASKED


def test_no_worker_says_so_by_default():
    told_nothing = ProcessConfig(ModelConfig("m"))
    assert features_of(told_nothing, Role.DECODE) == ()
    assert with_chunks_of(told_nothing, Role.DECODE) is told_nothing
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
    def build(config, **_):
        chunk = config.engine.prefill_chunk_tokens
        raise DeviceError(f"no room for engine.prefill_chunk_tokens {chunk}; lower it")

    monkeypatch.setattr(process, "build_engine", build)
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)
    config = ProcessConfig(
        ModelConfig("m"),
        engine=ASKED.engine,
        link=LinkConfig(gateways=("tcp://127.0.0.1:1",), curve=CurveConfig(enabled=False)),
        health=HttpConfig("127.0.0.1", 0),
        control=ControlConfig(str(tmp_path / "control")),
    )
    field = "decode_prompt_chunk_tokens 512" if role is Role.DECODE else "prefill_chunk_tokens 2048"
    with pytest.raises(ConfigError, match=f"no room for engine.{field}; lower it"):
        process.run_worker(config, role, on_ready=lambda ready: None)
