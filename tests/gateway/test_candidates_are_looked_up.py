"""Naming a candidate costs a look-up: no tokenizer runs per token (R40)."""

from __future__ import annotations

import pytest

from baton_worker.gateway.text.tokenizer import GatewayTokenizer
from baton_worker.gateway.text.vocabulary import Vocabulary


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_named_without_the_tokenizer(start_gateway, monkeypatch, stream):
    gateway = start_gateway()

    def forbidden(*_args, **_options):
        raise AssertionError("the tokenizer ran while tokens were served")

    monkeypatch.setattr(GatewayTokenizer, "decode", forbidden)
    monkeypatch.setattr(GatewayTokenizer, "encode", forbidden)
    body = {"model": "tiny", "prompt": [70, 71, 72], "logprobs": 20, "stream": stream}
    with gateway.http() as client:
        answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200
    assert "error" not in answer.text
    if not stream:
        logprobs = answer.json()["choices"][0]["logprobs"]
        assert len(logprobs["tokens"]) == answer.json()["usage"]["completion_tokens"]
        assert all(len(alternatives) >= 20 for alternatives in logprobs["top_logprobs"])


def test_a_name_is_made_once(tokenizer):
    names, entries = tokenizer.vocabulary.names, tokenizer.vocabulary.entries
    for token in range(tokenizer.vocabulary.size):
        assert names[token] is names[token]
        assert entries[token] is entries[token]


def test_many_are_named_as_each_is_and_ids_without_a_token_as_no_bytes(tokenizer):
    names, entries = tokenizer.vocabulary.names, tokenizer.vocabulary.entries
    size = tokenizer.vocabulary.size
    for ids in (range(size), [size - 1, size, size + 7, 0], []):
        assert names.of(ids) == [names[token] for token in ids]
        assert entries.of(ids) == [entries[token] for token in ids]
    assert names.of([size]) == [""]
    assert entries.of([size]) == [b'{"token":"","logprob":%b,"bytes":[]']


def test_an_id_far_beyond_all_others_costs_no_memory():
    full = {0: b"a", 1: b"b", 1 << 40: b"far"}
    names = Vocabulary(full, frozenset()).names
    assert names.of([0, 1 << 40, 7, 1]) == ["a", "far", "", "b"]
