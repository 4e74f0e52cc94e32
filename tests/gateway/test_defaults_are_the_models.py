"""Sampling fields that a request leaves out are the model's own; one that cannot be is refused."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton_worker.config import ConfigError
from baton_worker.gateway.intake.defaults import (
    SamplingDefaults,
    not_taken_over,
    read_defaults,
)
from baton_worker.gateway.text.tokenizer import GatewayTokenizer, load_tokenizer
from baton_worker.messages import Submit

QWEN = {
    "bos_token_id": 151643,
    "do_sample": True,
    "eos_token_id": [151645, 151643],
    "pad_token_id": 151643,
    "repetition_penalty": 1.05,
    "temperature": 0.7,
    "top_k": 20,
    "top_p": 0.8,
    "transformers_version": "4.37.0",
}


@pytest.fixture
def told(tmp_path: Path) -> Callable[[Any], Path]:
    """`told(fields)`: a folder whose generation_config.json says so."""

    def write(fields: Any) -> Path:
        (tmp_path / "generation_config.json").write_bytes(msgspec.json.encode(fields))
        return tmp_path

    return write


def test_every_field_that_is_taken_over_is_read(told: Callable[[Any], Path]) -> None:
    assert read_defaults(told(QWEN | {"min_p": 0.05})) == SamplingDefaults(
        temperature=0.7, top_p=0.8, top_k=20, min_p=0.05, repetition_penalty=1.05
    )


@pytest.mark.parametrize("fields", [{}, {"temperature": None}, {"top_k": 0}, {"top_k": -1}])
def test_what_it_does_not_tell_is_the_apis(told: Callable[[Any], Path], fields: Any) -> None:
    assert read_defaults(told(fields)) == SamplingDefaults()


def test_a_folder_without_the_file_has_the_apis(tmp_path: Path) -> None:
    assert read_defaults(tmp_path) == SamplingDefaults()


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"temperature": 3.0}, "temperature is 3.0: it must be 0 or"),
        ({"top_p": 0.0}, "top_p is 0.0: it must be"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"min_p": 2.0}, "min_p is 2.0"),
        ({"temperature": "hot"}, "Expected `float | null`, got `str` - at `$.temperature`"),
        ([], "Expected `object`"),
    ],
)
def test_a_value_that_no_request_could_ask_for_is_named(
    told: Callable[[Any], Path], fields: Any, shown: str
) -> None:
    folder = told(fields)
    with pytest.raises(ConfigError, match=re.escape(shown)) as caught:
        read_defaults(folder)
    assert str(folder / "generation_config.json") in str(caught.value)


OTHERS = {"max_new_tokens": 2048, "presence_penalty": 1.5, "num_beams": 4, "do_sample": False}


def test_what_is_not_taken_over_is_known_by_name(told: Callable[[Any], Path]) -> None:
    assert not_taken_over(told(QWEN | OTHERS)) == OTHERS


NOTHING = {
    "do_sample": True, "max_length": 20, "num_beams": 1, "presence_penalty": 0.0, "typical_p": 1.0,
    "max_new_tokens": None, "bad_words_ids": [], "pad_token_id": 3, "use_cache": False,
}  # fmt: skip


def test_what_asks_for_nothing_is_no_cause_for_a_word(
    told: Callable[[Any], Path], tmp_path: Path
) -> None:
    assert not_taken_over(tmp_path) == {}
    assert not_taken_over(told(QWEN | NOTHING)) == {}
    folder = told([])
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        not_taken_over(folder)


@pytest.fixture(scope="module")
def model_folder(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizer's folder, and Qwen's defaults beside it."""
    folder = tmp_path_factory.mktemp("with-defaults") / "model"
    shutil.copytree(model_folder, folder)
    (folder / "generation_config.json").write_bytes(msgspec.json.encode(QWEN | OTHERS))
    return folder


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> GatewayTokenizer:
    return load_tokenizer(model_folder)


def asked(gateway: Any, path: str, **body: Any) -> Any:
    """Return the sampling parameters that a worker was given."""
    is_chat = "chat" in path
    content = {"messages": [{"role": "user", "content": "a"}]} if is_chat else {"prompt": "a"}
    with gateway.http() as client:
        answer = client.post(path, json={"max_tokens": 2, **content, **body})
    assert answer.status_code == 200, answer.text
    return gateway.link.sent(Submit)[-1][1].sampling


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_request_gets_what_it_leaves_out(start_gateway: Any, path: str) -> None:
    gateway = start_gateway()
    plain = asked(gateway, path)
    assert (plain.temperature, plain.top_p, plain.top_k) == (0.7, 0.8, 20)
    assert (plain.repetition_penalty, plain.min_p) == (1.05, 0.0)
    own = asked(gateway, path, temperature=0.0, top_k=-1, top_p=1.0, repetition_penalty=1.0)
    assert (own.temperature, own.top_k, own.top_p, own.repetition_penalty) == (0.0, 0, 1.0, 1.0)
    null = asked(gateway, path, temperature=None)
    assert null.temperature == 0.7, "null is the same as leaving it out"


def test_none_keeps_the_apis(start_gateway: Any) -> None:
    plain = asked(start_gateway(generation_config="none"), "/v1/completions")
    assert (plain.temperature, plain.top_p, plain.top_k) == (1.0, 1.0, 0)
    assert plain.repetition_penalty == 1.0


def test_the_defaults_are_shown_and_what_is_left_out_is_logged(
    start_gateway: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"), start_gateway().http() as client:
        (card,) = client.get("/v1/models").json()["data"]
        assert client.get(f"/v1/models/{card['id']}").json() == card
    assert card["sampling_defaults"] == {
        "temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.0, "repetition_penalty": 1.05,
    }  # fmt: skip
    (warning,) = [record for record in caplog.records if "is not taken over" in record.message]
    assert warning.levelname == "WARNING"
    assert {name: getattr(warning, name) for name in OTHERS} == OTHERS
    assert any("sampling defaults" in record.message for record in caplog.records)


def test_with_none_the_apis_are_shown(start_gateway: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"), start_gateway(generation_config="none").http() as client:
        (card,) = client.get("/v1/models").json()["data"]
    assert (card["sampling_defaults"]["temperature"], card["sampling_defaults"]["top_k"]) == (
        1.0,
        0,
    )
    assert not any("is not taken over" in record.message for record in caplog.records)
