"""Which workers compute whole prompts beside their role, and in which chunks."""

from __future__ import annotations

import msgspec
import pytest

from baton_worker.config import ConfigError, EngineConfig, ModelConfig, ProcessConfig, load_config
from baton_worker.identity import Role
from baton_worker.main import main
from baton_worker.messages import DECODE_PROMPTS, FEATURES
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
