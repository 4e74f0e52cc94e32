"""Chunk by chunk and in all, as many logprob entries as tokens, across the handoff too (R42)."""

from __future__ import annotations

import json

import pytest

PROMPT = "the quick brown fox jumps over the lazy dog"


def chunks_of(gateway, path, body):
    with gateway.http() as client:
        text = client.post(path, json={"model": "tiny", "stream": True} | body).text
    events = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
    return [choice for event in events for choice in event["choices"]]


@pytest.mark.parametrize("workers", ["pd", "m"])
@pytest.mark.parametrize("per_step", [1, 2, 5])
@pytest.mark.parametrize("k", [0, 3])
def test_chat_chunks(start_gateway, workers, per_step, k):
    gateway = start_gateway(per_step=per_step, workers=workers)
    body = {
        "messages": [{"role": "user", "content": PROMPT}],
        "logprobs": True,
        "top_logprobs": k,
        "return_token_ids": True,
    }
    total = 0
    for choice in chunks_of(gateway, "/v1/chat/completions", body):
        ids = choice.get("token_ids") or []
        entries = (choice.get("logprobs") or {"content": []})["content"]
        assert len(entries) == len(ids)
        assert all(len(entry["top_logprobs"]) == k for entry in entries)
        total += len(ids)
    with gateway.http() as client:
        answer = client.post("/v1/chat/completions", json={"model": "tiny"} | body).json()
    assert total == answer["usage"]["completion_tokens"] > 5
    assert len(answer["choices"][0]["logprobs"]["content"]) == total
    assert len(answer["choices"][0]["token_ids"]) == total


@pytest.mark.parametrize("workers", ["pd", "m"])
def test_completion_chunks(start_gateway, workers):
    gateway = start_gateway(per_step=3, workers=workers)
    body = {"prompt": PROMPT, "logprobs": 2, "return_token_ids": True}
    total = 0
    for choice in chunks_of(gateway, "/v1/completions", body):
        ids = choice.get("token_ids") or []
        logprobs = choice.get("logprobs")
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert len(logprobs[name] if logprobs else []) == len(ids), name
        total += len(ids)
    assert total > 5


def test_a_chunk_cut_by_a_stop_string_is_cut_in_both(start_gateway):
    gateway = start_gateway(per_step=5)
    body = {"prompt": PROMPT, "logprobs": 2, "return_token_ids": True, "stop": ["fox"]}
    choices = chunks_of(gateway, "/v1/completions", body)
    assert choices[-1]["finish_reason"] == "stop"
    for choice in choices:
        entries = choice["logprobs"]["tokens"] if choice.get("logprobs") else []
        assert len(entries) == len(choice.get("token_ids") or [])
