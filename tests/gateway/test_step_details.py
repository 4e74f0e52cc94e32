"""`include_step_details`: what each engine step did reaches the client, and only who asks."""

import json

import httpx
import pytest

from baton_worker.gateway.output.merge import Part
from baton_worker.gateway.output.step_details import StepsOf
from baton_worker.gateway.text.vocabulary import Vocabulary
from baton_worker.records.columns import FLAG_FIRST_TOKEN
from baton_worker.records.rows import Row

WORDS = Vocabulary({1: b"one ", 2: b"two ", 3: b"three "}, frozenset())


def row(position, tokens, flags=0, drafts=(), verified=(0, 0)):
    ranks = list(range(1, len(tokens) + 1))
    return Row(1, 0, position, tokens, 1, flags, [-1.0] * len(tokens), ranks, [], [],
               list(drafts), *verified)  # fmt: skip


def test_the_first_token_is_prefills_and_carries_its_drafts_by_name():
    detail = StepsOf(WORDS).detail(Part(row(0, [1], FLAG_FIRST_TOKEN, [2, 3]), 0), 1)
    assert (detail.computed_by, detail.position, detail.drafts) == (
        "prefill",
        0,
        ["two ", "three "],
    )


def test_a_mixed_worker_computes_everything():
    steps = StepsOf(WORDS, alone="mixed")
    rows = [row(0, [1], FLAG_FIRST_TOKEN), row(1, [2])]
    assert [steps.detail(Part(r, 0), 1).computed_by for r in rows] == ["mixed", "mixed"]


@pytest.mark.parametrize(
    ("skip", "used", "accepted", "ranks"),
    [(0, 3, 2, [1, 2, 3]), (0, 1, 1, [1]), (1, 2, 1, [2, 3]), (2, 1, 0, [3])],
)
def test_only_delivered_tokens_count(skip, used, accepted, ranks):
    part = Part(row(5, [1, 2, 3], verified=(2, 2)), skip)
    detail = StepsOf(WORDS).detail(part, used)
    assert (detail.position, detail.n_tokens) == (5 + skip, used)
    assert (detail.n_accepted, detail.ranks) == (accepted, ranks)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_steps_add_up_to_the_tokens_of_each_chunk(start_gateway, path):
    gateway = start_gateway()
    body = {"model": "tiny", "stream": True, "return_token_ids": True, "include_step_details": True}
    body |= {"prompt": "a stop here", "max_tokens": 8, "logprobs": 0}
    if "chat" in path:
        del body["prompt"]
        body |= {"messages": [{"role": "user", "content": "a stop here"}], "logprobs": True}
    text = httpx.post(gateway.url + path, json=body).text
    chunks = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
    choices = [c for chunk in chunks for c in chunk["choices"] if c.get("token_ids")]
    assert choices
    for choice in choices:
        steps = choice["step_details"]
        assert sum(step["n_tokens"] for step in steps) == len(choice["token_ids"])
        assert sum(len(step["ranks"]) for step in steps) == len(choice["token_ids"])
    assert choices[0]["step_details"][0]["position"] == 0


def test_the_extension_is_absent_unless_asked_for(start_gateway):
    gateway = start_gateway()
    reply = httpx.post(f"{gateway.url}/v1/completions", json={"model": "tiny", "prompt": "a"})
    assert "step_details" not in reply.json()["choices"][0]
