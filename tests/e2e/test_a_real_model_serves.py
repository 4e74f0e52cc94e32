"""Weights that were really trained, through whole processes: English, and another's numbers.

What is known of the model beforehand was told by transformers 5.24 with PyTorch 2.15, in float32 on
a CPU; it read the same file by a reader of its own. Skipped where the package with it is absent.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from baton_testing import real_model as real
from baton_testing.gguf_folder import write_gguf_folder

WEIGHTS = "9e7a06a51fdacdc59d5796a7cab5060d1df61ce32003f4115eb261ae330a7381"
"""SHA-256 of the float32 tensors, which were found to be transformers' own of that file."""
PERPLEXITY = 25.48227
"""Of the paragraph, transformers'."""
FIRST = (-10.395807, -12.686263, -1.793205, -0.517037, -2.015047, -1.490797, -1.164768, -8.523388)
"""Logprobs of its second token and those behind it."""
CLOSE = 1e-4
MANY_BYTES = "naïve café \u2013 東京 🚀🇫🇷 é ß 👩‍👩‍👧"
MANY_BYTES_IDS = (
    *(3546, 46494, 37366, 816, 17097, 247, 126, 16736, 122, 15107, 244, 218, 10813, 225, 121),
    *(10813, 225, 132, 26411, 5549, 249, 15107, 235, 119, 321, 231, 10813, 235, 119, 321, 231),
    *(10813, 235, 117),
)

PAIR = ("-k", "3", "--speculative-method", "ngram", "--max-running", "8")
PLAIN = ("--prefill", "0", "--decode", "0", "--mixed", "1", "-k", "0", "--max-running", "8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("real") / real.NAME
    write_gguf_folder(real.real_gguf(), place, "float32")
    return place


@pytest.fixture(scope="module")
def pair(start_deployment: Callable[..., Any], folder: Path) -> Iterator[Any]:
    with start_deployment("--model", str(folder), *PAIR) as deployment:
        deployment.wait_lines(3)
        yield deployment


def told(deployment: Any, path: str, **body: Any) -> Any:
    reply = deployment.post(path, model=real.NAME, **body)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]


def chat(deployment: Any, kind: str, **body: Any) -> Any:
    messages = [{"role": "user", "content": real.CHATS[kind]}]
    body = {"logprobs": True, "top_logprobs": 2, "return_token_ids": True} | body
    return told(deployment, "/v1/chat/completions", messages=messages, **body)


def test_the_weights_are_those_that_transformers_reads(folder: Path) -> None:
    with (folder / "model.safetensors").open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == WEIGHTS


def test_the_paragraph_is_as_likely_as_transformers_says(pair: Any) -> None:
    choice = told(
        pair, "/v1/completions", prompt=real.PARAGRAPH, max_tokens=0, echo=True, logprobs=0
    )
    assert choice["text"] == real.PARAGRAPH
    logprobs = choice["logprobs"]["token_logprobs"][1:]
    assert len(logprobs) == 123
    assert logprobs[:8] == pytest.approx(FIRST, abs=CLOSE)
    assert math.exp(-sum(logprobs) / 123) == pytest.approx(PERPLEXITY, abs=CLOSE)


def test_characters_of_several_tokens_are_streamed_whole(folder: Path, pair: Any) -> None:
    """The model repeats a line of which most characters are two to four tokens each."""
    assert tuple(real.text_ids(folder, MANY_BYTES)) == MANY_BYTES_IDS, "as transformers reads it"
    reply = pair.post(
        "/v1/completions",
        model=real.NAME,
        prompt=f"Say: {MANY_BYTES}\nSay: {MANY_BYTES}\nSay:",
        max_tokens=40,
        temperature=0,
        logprobs=0,
        stop="\n",
        stream=True,
    )
    data = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
    assert data.pop() == "[DONE]"
    choices = [json.loads(line)["choices"][0] for line in data]
    texts = [choice["text"] for choice in choices]
    assert "".join(texts) == f" {MANY_BYTES}"
    assert not any("\ufffd" in text for text in texts)
    tokens = [token for choice in choices for token in choice["logprobs"]["tokens"]]
    spelt = b"".join(_bytes_of(token) for token in tokens)
    assert spelt.decode() == f" {MANY_BYTES}\n", "the line's end stopped it"


def _bytes_of(token: str) -> bytes:
    """Return what a completion's token stands for: parts of characters are written as bytes."""
    if not token.startswith("bytes:"):
        return token.encode()
    return bytes.fromhex(token.removeprefix("bytes:").replace("\\x", ""))


def test_a_pair_that_drafts_answers_as_one_plain_process(
    start_deployment: Callable[..., Any], folder: Path, pair: Any
) -> None:
    asked = (
        {"kind": "question", "temperature": 0},
        {"kind": "code", "temperature": 0, "max_tokens": 24},
        {"kind": "explain", "temperature": 0.8, "seed": 3, "max_tokens": 12},
    )
    with ThreadPoolExecutor(len(asked)) as clients:
        found = list(clients.map(lambda body: chat(pair, **body), asked))
        pair.wait_at_least("decode", "baton_draft_accepted_tokens_total", 1)
        pair.wait_at_least("prefill", "baton_handoff_sent_bytes_total", 1)
        assert found[0]["message"]["content"] == "The capital of France is Paris."
        assert found[0]["finish_reason"] == "stop"
        with start_deployment("--model", str(folder), *PLAIN) as plain:
            wanted = list(clients.map(lambda body: chat(plain, **body), asked))
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours["token_ids"] == theirs["token_ids"]
        assert ours["logprobs"] == theirs["logprobs"]
