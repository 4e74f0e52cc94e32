"""The committed tiny model is a complete Hugging Face folder that its own script would write."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from baton_worker.engine.model.shape import load_shape
from baton_worker.engine.model.weights import load_weights


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tiny_model_dir / "tokenizer.json"))


@pytest.fixture(scope="module")
def tokenizer_config(tiny_model_dir: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((tiny_model_dir / "tokenizer_config.json").read_text())
    return config


def render(config: dict[str, Any], messages: list[dict[str, str]], prompt: bool) -> str:
    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = raise_exception
    return environment.from_string(config["chat_template"]).render(
        messages=messages,
        bos_token=config["bos_token"],
        eos_token=config["eos_token"],
        add_generation_prompt=prompt,
    )


def test_the_weights_load_and_are_small_enough_to_commit(tiny_model_dir: Path) -> None:
    shape = load_shape(tiny_model_dir)
    weights = load_weights(tiny_model_dir, shape)
    assert (shape.n_layers, shape.n_mtp_layers, len(weights.mtp)) == (2, 1, 1)
    assert shape.rope_style == "interleaved"
    assert (tiny_model_dir / "model.safetensors").stat().st_size < 500_000


@settings(deadline=None)
@given(st.text())
def test_any_text_round_trips_through_the_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_encoding_puts_the_beginning_of_sequence_in_front(
    tokenizer: Tokenizer, tiny_model_dir: Path
) -> None:
    shape = load_shape(tiny_model_dir)
    assert tokenizer.encode("a licence").ids[0] == shape.bos_token_id
    assert shape.bos_token_id not in tokenizer.encode("a licence", add_special_tokens=False).ids


def test_token_ids_agree_across_the_files(
    tokenizer: Tokenizer, tokenizer_config: dict[str, Any], tiny_model_dir: Path
) -> None:
    shape = load_shape(tiny_model_dir)
    assert tokenizer.get_vocab_size() == shape.vocab_size
    assert tokenizer.token_to_id(tokenizer_config["bos_token"]) == shape.bos_token_id
    ends = (tokenizer_config["eos_token"], "<|end|>")
    assert tuple(map(tokenizer.token_to_id, ends)) == shape.eos_token_ids
    assert tokenizer_config["model_max_length"] == shape.max_position_embeddings


def test_the_chat_template_renders_turns_and_the_prompt_for_an_answer(
    tokenizer: Tokenizer, tokenizer_config: dict[str, Any]
) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "You may copy"},
        {"role": "assistant", "content": "You may copy the Program."},
        {"role": "user", "content": "Go on."},
    ]
    text = render(tokenizer_config, messages, prompt=True)
    assert text == (
        "<s><|system|>Be brief.<|end|><|user|>You may copy<|end|>"
        "<|assistant|>You may copy the Program.</s><|user|>Go on.<|end|><|assistant|>"
    )
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    markers = ["<s>", "<|system|>", "<|end|>", "<|user|>", "<|assistant|>", "</s>"]
    assert [ids.count(tokenizer.token_to_id(marker)) for marker in markers] == [1, 1, 3, 2, 2, 1]
    assert not render(tokenizer_config, messages, prompt=False).endswith("<|assistant|>")


def test_the_chat_template_refuses_an_unknown_role(tokenizer_config: dict[str, Any]) -> None:
    with pytest.raises(jinja2.TemplateError, match="role tool is not"):
        render(tokenizer_config, [{"role": "tool", "content": "x"}], prompt=True)


def test_the_committed_template_is_the_one_that_training_used(
    tokenizer_config: dict[str, Any], load_example: Callable[[str], Any]
) -> None:
    vocabulary = load_example("vocabulary")
    assert tokenizer_config["chat_template"] == vocabulary.CHAT_TEMPLATE
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert vocabulary.render_chat(messages) == render(tokenizer_config, messages, prompt=False)
